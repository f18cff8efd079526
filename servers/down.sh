#!/usr/bin/env bash
# Stops what servers/up.sh started, and nothing else.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
    say "usage: servers/down.sh [PROFILE [ARM…]]   (no profile: everything that was started)"
    exit 0
fi
# A second Ctrl-C while servers shut down would leave some of them.
trap '' INT TERM HUP

stop_all_of() { # state folder
    local file arms=""
    STATE=$1 # what stop_arms looks at
    for file in "$STATE"/*.pid; do
        [ -f "$file" ] && arms="$arms $(basename "$file" .pid)"
    done
    # shellcheck disable=SC2086
    [ -z "$arms" ] || stop_arms $arms
}

if [ $# -eq 0 ]; then
    for folder in "$STATE_ROOT"/*/; do
        [ -d "$folder" ] && stop_all_of "${folder%/}"
    done
    exit 0
fi
find_profile "$1"
shift
if [ $# -eq 0 ]; then
    stop_all_of "$STATE"
else
    choose_arms "$@"
    # shellcheck disable=SC2086,SC2153
    stop_arms $ARMS
fi
