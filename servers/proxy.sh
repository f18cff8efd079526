#!/usr/bin/env bash
# Runs a command with a LiteLLM proxy over two or more arms, which become arms of the comparison as well.
#   servers/proxy.sh PROFILE "ARM ARM" -- COMMAND…     brings the arms up and down, as with_arms.sh does
#   servers/proxy.sh "a=URL b=URL" -- COMMAND…         over servers that run already
# FACEOFF_PROXIES="proxy affinity" (default: proxy): which proxies, each a file in servers/profiles/proxy/.
# The command finds all arms in FACEOFF_ARMS and the proxies' key in FACEOFF_API_KEY_PROXY, …_AFFINITY.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    say 'usage: servers/proxy.sh PROFILE "ARM ARM" -- COMMAND…    or: servers/proxy.sh "a=URL b=URL" -- COMMAND…'
    exit 2
}

[ $# -ge 3 ] || usage
case $1 in
*://*)
    [ "$2" = -- ] || usage
    FACEOFF_BACKENDS=$1
    FACEOFF_PROFILE=${FACEOFF_PROFILE:-proxy}
    shift 2
    ;;
*)
    { [ $# -ge 4 ] && [ "$3" = -- ]; } || usage
    profile=$1
    arms=$2
    shift 3
    # The inner call finds the arms in its environment.
    # shellcheck disable=SC2016
    exec bash "$ROOT/servers/with_arms.sh" "$profile" "$arms" -- \
        bash -c 'exec bash "$0" "$FACEOFF_ARMS" -- "$@"' "$ROOT/servers/proxy.sh" "$@"
    ;;
esac
export FACEOFF_BACKENDS FACEOFF_PROFILE

find_profile proxy
# shellcheck disable=SC2086
choose_arms ${FACEOFF_PROXIES:-proxy}
# A proxy that an earlier command left over other backends would send the load there.
# shellcheck disable=SC2153
for arm in $ARMS; do
    if read_pid_file "$arm" && [ "$CONFIG" != "$(config_checksum "$arm")" ]; then
        say "$arm: runs over other backends; starting it again"
        stop_arms "$arm"
    fi
done

watch_signals
# shellcheck disable=SC2086
if ! bring_up $ARMS; then
    stop_started
    exit "${EXIT_SIGNAL:-2}"
fi

# Requests are counted, cached and drafted by the backends: that is where the metrics are.
metrics=""
for spec in $FACEOFF_BACKENDS; do
    url=${spec#*=}
    metrics="$metrics,${url%%;*}"
done
FACEOFF_ARMS=$FACEOFF_BACKENDS
for arm in $ARMS; do
    FACEOFF_ARMS="$FACEOFF_ARMS $(arm_spec "$arm");metrics=${metrics#,}"
    suffix=$(arm_suffix "$arm")
    export "FACEOFF_API_KEY_$suffix=$(cat "$STATE/master-key")"
    # A proxy is of another profile than the arms behind it, whose launcher may have set FACEOFF_RESTART.
    export "FACEOFF_RESTART_$suffix=bash $(printf '%q' "$ROOT/servers/restart.sh") proxy"
done
export FACEOFF_ARMS

code=0
if [ -z "$EXIT_SIGNAL" ]; then
    run_command "$@" || code=$?
fi
stop_started
exit "${EXIT_SIGNAL:-$code}"
