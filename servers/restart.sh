#!/usr/bin/env bash
# Starts arms of a profile anew, whatever state they are in: a dead engine behind a live front end included.
#   servers/restart.sh PROFILE ARM…
set -euo pipefail

if [ $# -lt 2 ]; then
    printf 'usage: servers/restart.sh PROFILE ARM…\n' >&2
    exit 2
fi
here=$(dirname "${BASH_SOURCE[0]}")
bash "$here/down.sh" "$@"
exec bash "$here/up.sh" "$@"
