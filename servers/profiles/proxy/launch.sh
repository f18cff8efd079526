#!/usr/bin/env bash
# A LiteLLM proxy over the servers in FACEOFF_BACKENDS (arm specs, as in FACEOFF_ARMS). servers/proxy.sh does it
# all: arms up, proxy over them, command, everything down again.
set -euo pipefail

[ -n "${FACEOFF_BACKENDS-}" ] || {
    echo "error: FACEOFF_BACKENDS names no servers (\"a=http://127.0.0.1:8101 b=http://127.0.0.1:8102\");" \
        "servers/proxy.sh sets it" >&2
    exit 1
}
[ -s "$FACEOFF_PROFILE_STATE/master-key" ] || {
    echo "error: no $FACEOFF_PROFILE_STATE/master-key; servers/profiles/proxy/prepare.sh makes one" >&2
    exit 1
}
venv=$FACEOFF_ROOT/.venv-proxy
# Not on a command line and in no log: the configuration only says which variable holds it.
LITELLM_MASTER_KEY=$(cat "$FACEOFF_PROFILE_STATE/master-key")
export LITELLM_MASTER_KEY
# Nothing is looked up or reported outside this machine, and no page is served that nobody asked for.
export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_TELEMETRY=False LITELLM_LOG=ERROR DO_NOT_TRACK=1
export NO_DOCS=True NO_REDOC=True DISABLE_ADMIN_UI=True

config=$FACEOFF_PROFILE_STATE/$ARM.yaml
"$FACEOFF_PYTHON" "$FACEOFF_ROOT/servers/proxy_config.py" --affinity "$AFFINITY" >"$config"
exec "$venv/bin/litellm" --config "$config" --host "$HOST" --port "$PORT" --num_workers 1 --telemetry False
