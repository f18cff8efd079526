#!/usr/bin/env bash
# Brings the arms of a profile up and waits until each answers /health.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    say "usage: servers/up.sh PROFILE [ARM…]   (no arm: those in the profile's default.arms)"
    say "profiles: $(profile_names); a path with a slash is a folder of your own"
    [ $# -gt 0 ] || exit 2
    exit 0
fi
find_profile "$1"
shift
choose_arms "$@"

watch_signals
# shellcheck disable=SC2086
if ! bring_up $ARMS; then
    stop_started
    exit "${EXIT_SIGNAL:-1}"
fi
for arm in $ARMS; do
    printf '%s %s %s\n' "$arm" "$(arm_url "$arm")" "$(arm_state "$arm")"
done
