#!/usr/bin/env bash
# Runs a command while a profile's arms are up, then stops those that it had to start itself.
#   servers/with_arms.sh PROFILE "ARM ARM" -- COMMAND…
# The command finds the arms in FACEOFF_ARMS (name=url;key=value…, space separated) and FACEOFF_PROFILE.
# Exit code: the command's; 2 when the arms could not be brought up; 130 after Ctrl-C.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ $# -lt 4 ] || [ "$3" != -- ]; then
    say 'usage: servers/with_arms.sh PROFILE "ARM ARM" -- COMMAND…   ("" for the arms in default.arms)'
    exit 2
fi
find_profile "$1"
FACEOFF_PROFILE=$1
# shellcheck disable=SC2086
choose_arms $2
shift 3

watch_signals
# shellcheck disable=SC2086
if ! bring_up $ARMS; then
    stop_started
    exit "${EXIT_SIGNAL:-2}"
fi
FACEOFF_ARMS=""
for arm in $ARMS; do
    FACEOFF_ARMS="$FACEOFF_ARMS $(arm_spec "$arm")"
done
FACEOFF_ARMS=${FACEOFF_ARMS# }
# The command may call this with an arm's name when that arm died; whoever started the arm stops it as before.
FACEOFF_RESTART="bash $(printf '%q' "$ROOT/servers/restart.sh") $(printf '%q' "$FACEOFF_PROFILE")"
# Arms that were up before belong to somebody: they are not to be moved to another device.
FACEOFF_STARTED=${STARTED# }
export FACEOFF_ARMS FACEOFF_PROFILE FACEOFF_RESTART FACEOFF_STARTED

code=0
if [ -z "$EXIT_SIGNAL" ]; then
    run_command "$@" || code=$?
fi
stop_started
exit "${EXIT_SIGNAL:-$code}"
