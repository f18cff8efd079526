#!/usr/bin/env bash
# One line per arm on stdout: name, URL, and up | starting | down | dead.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
    say "usage: servers/status.sh [PROFILE]   (no profile: every profile that has something started)"
    exit 0
fi

show() { # needs PROFILE_DIR and STATE
    local arm
    for arm in $(arm_names); do
        printf '%s %s %s\n' "$arm" "$(arm_url "$arm")" "$(arm_state "$arm")"
    done
}

if [ $# -gt 0 ]; then
    find_profile "$1"
    show
    exit 0
fi
found=0
for folder in "$STATE_ROOT"/*/; do
    folder=${folder%/}
    [ -n "$(find "$folder" -maxdepth 1 -name '*.pid' -print 2>/dev/null)" ] || continue
    found=1
    # shellcheck disable=SC2034
    STATE=$folder
    # shellcheck disable=SC2034
    PROFILE_DIR=$(cat "$folder/folder" 2>/dev/null || printf '%s' "$ROOT/servers/profiles/$(basename "$folder")")
    say "profile $(basename "$folder"):"
    show
done
[ "$found" = 1 ] || say "nothing started (servers/status.sh PROFILE lists a profile's arms)"
