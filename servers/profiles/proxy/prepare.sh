#!/usr/bin/env bash
# Run by the launchers before a proxy starts: its venv and a master key, both only if missing.
set -euo pipefail
# shellcheck source=/dev/null
. "$FACEOFF_ROOT/servers/lib.sh"
# shellcheck source=/dev/null
. "$ROOT/servers/venv.sh"

install_lock "LiteLLM proxy" "$ROOT/.venv-proxy" "$ROOT/servers/locks/proxy.txt" 2000 "litellm"
# LiteLLM does not start with an unset or a well-known key.
if [ ! -s "$FACEOFF_PROFILE_STATE/master-key" ]; then
    mkdir -p "$FACEOFF_PROFILE_STATE"
    (umask 077 && "$FACEOFF_PYTHON" -c 'import secrets; print("sk-" + secrets.token_hex(24))' \
        >"$FACEOFF_PROFILE_STATE/master-key")
fi
