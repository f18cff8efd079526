# shellcheck shell=bash
# What the launchers share: find a profile and its arms, start an arm in a session of its own, tell how it
# is doing, stop it. Sourced, never run. Words as everywhere: a profile is a folder, an arm one env file in it.
#
# State lives in results/servers/<profile>/: <arm>.pid ("pid start-time token config-checksum device"), <arm>.log
# (the log of the start before it is <arm>.log.previous) and <arm>.ready (it answered /health once).
# Written for bash 3.2 and later, with no other tools than the POSIX ones and Python.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
STATE_ROOT=${FACEOFF_STATE:-$ROOT/results/servers}
if [ -x "$ROOT/.venv/bin/python" ]; then
    FACEOFF_PYTHON=${FACEOFF_PYTHON:-$ROOT/.venv/bin/python}
else
    FACEOFF_PYTHON=${FACEOFF_PYTHON:-python3}
fi
export FACEOFF_PYTHON
export FACEOFF_ROOT="$ROOT"

STARTED="" # arms that this process started, space separated

# shellcheck source=/dev/null
. "$ROOT/servers/processes.sh"

say() { printf '%s\n' "$*" >&2; }

fail() { # message: one clear line, exit 1
    say "error: $*"
    exit 1
}

usage_error() { # message: the user asked for something that is not there, exit 2
    say "error: $*"
    exit 2
}

# ---- profiles and arms --------------------------------------------------------------------------------------

# Sets PROFILE (the name of the state folder), PROFILE_DIR, STATE. A name with a slash is the user's own folder;
# its state folder carries a checksum of the path, so that two folders of one name never share pid files.
find_profile() { # profile
    PROFILE_NAMED=$1
    case $1 in
    */*)
        [ -d "$1" ] || usage_error "no profile folder $1"
        PROFILE_DIR=$(cd "$1" && pwd -P)
        PROFILE=$(basename "$PROFILE_DIR")-$(printf '%s' "$PROFILE_DIR" | cksum | cut -d' ' -f1)
        ;;
    *)
        PROFILE_DIR=$ROOT/servers/profiles/$1
        PROFILE=$1
        [ -d "$PROFILE_DIR" ] ||
            usage_error "no profile '$1'; there are: $(profile_names). A folder of your own: give its path"
        ;;
    esac
    [ -f "$PROFILE_DIR/launch.sh" ] || usage_error "$PROFILE_DIR has no launch.sh"
    STATE=$STATE_ROOT/$PROFILE
    export FACEOFF_PROFILE_STATE="$STATE"
}

profile_names() {
    local dir names=""
    for dir in "$ROOT"/servers/profiles/*/; do
        [ -f "$dir/launch.sh" ] && names="$names $(basename "$dir")"
    done
    printf '%s' "${names# }"
}

arm_names() { # every arm of the profile, space separated
    local file names=""
    for file in "$PROFILE_DIR"/*.env; do
        [ -f "$file" ] && names="$names $(basename "$file" .env)"
    done
    printf '%s' "${names# }"
}

# Sets ARMS: the arms asked for, or those of default.arms. Names are [a-z0-9_-]+, so a space separates them.
choose_arms() { # arms…
    local arm named=""
    if [ $# -gt 0 ]; then
        ARMS="$*"
    elif [ -f "$PROFILE_DIR/default.arms" ]; then
        ARMS=$(grep -v '^#' "$PROFILE_DIR/default.arms" | tr '\n' ' ')
    else
        ARMS=$(arm_names)
    fi
    for arm in $ARMS; do
        case $arm in
        *[!a-z0-9_-]*) usage_error "'$arm' is no arm name (a-z, 0-9, _ and - only)" ;;
        esac
        [ -f "$PROFILE_DIR/$arm.env" ] ||
            usage_error "profile $PROFILE has no arm '$arm'; there are: $(arm_names)"
        case " $named " in
        *" $arm "*) usage_error "arm '$arm' is named twice" ;;
        esac
        named="$named $arm"
    done
    [ -n "${ARMS// /}" ] || usage_error "profile $PROFILE has no arms: no .env file in $PROFILE_DIR"
}

arm_suffix() { printf '%s' "$1" | tr 'a-z-' 'A-Z_'; } # arm: as the names of its environment variables end

# Puts an arm's variables into the environment of the (sub)shell that calls it. What the caller's own
# environment happens to call PORT or HOST must not move a server; FACEOFF_HOST is the way to say it.
load_arm() { # arm
    local moved
    unset PORT MODEL FLAGS CACHING DRAFTS DEVICE METRICS HEALTH START_LIMIT EXCLUSIVE_DEVICE
    HOST=${FACEOFF_HOST:-127.0.0.1}
    ARM=$1
    set -a
    # shellcheck disable=SC1090
    . "$PROFILE_DIR/$1.env"
    set +a
    # FACEOFF_DEVICE_CACHE=gpu1 puts arm cache on another device than its file says: for a swap control.
    moved=FACEOFF_DEVICE_$(arm_suffix "$1")
    DEVICE=${!moved:-${DEVICE-}}
    HEALTH=${HEALTH:-/health}
    export ARM HOST DEVICE
    case ${PORT-} in
    "" | *[!0-9]*) usage_error "$PROFILE_DIR/$1.env: PORT is not a number" ;;
    esac
}

arm_field() ( # arm, variable: prints its value
    load_arm "$1"
    printf '%s' "${!2-}"
)

arm_address() ( # arm: prints "host port" to connect to
    load_arm "$1"
    case $HOST in
    0.0.0.0 | "" | ::) HOST=127.0.0.1 ;;
    esac
    printf '%s %s' "$HOST" "$PORT"
)

arm_url() {
    local address
    address=$(arm_address "$1") || exit $?
    printf 'http://%s:%s' "${address% *}" "${address#* }"
}

arm_spec() ( # arm: prints name=url;caching=…;drafts=…;device=…;log=… of what is known
    local address log spec
    load_arm "$1"
    address=$(arm_address "$1")
    spec="$1=http://${address% *}:${address#* }"
    log=$STATE/$1.log
    log=${log#"$ROOT"/}
    [ -z "${METRICS-}" ] || spec="$spec;metrics=$METRICS"
    [ -z "${CACHING-}" ] || spec="$spec;caching=$CACHING"
    [ -z "${DRAFTS-}" ] || spec="$spec;drafts=$DRAFTS"
    # A running arm is where it was started, whatever is said now.
    ! arm_alive "$1" || DEVICE=${PLACED:-${DEVICE-}}
    [ -z "${DEVICE-}" ] || spec="$spec;device=$DEVICE"
    case $log in
    *[[:space:]\;]*) ;; # a path that would break the spec apart
    *) spec="$spec;log=$log" ;;
    esac
    printf '%s' "$spec"
)

config_checksum() { # arm: changes when what would be started changes
    {
        cat "$PROFILE_DIR/$1.env" "$PROFILE_DIR/launch.sh"
        arm_field "$1" DEVICE
        # What a caller may set beside the files.
        printf '%s\n' "${FACEOFF_CHECKPOINT-}" "${FACEOFF_VLLM-}" "${SERVED_NAME-}" "${CORES-}" "${KV_GIB-}" \
            "${CALIBRATION-}" "${SEED-}" "${FACEOFF_HOST-}"
        [ "$PROFILE" != proxy ] || printf '%s' "${FACEOFF_BACKENDS-}"
    } | cksum | cut -d' ' -f1
}

# ---- state --------------------------------------------------------------------------------------------------

# Reads an arm's pid file into PID, BORN, TOKEN, CONFIG, PLACED; false when there is none or it is half written.
read_pid_file() { # arm
    PID="" BORN="" TOKEN="" CONFIG="" PLACED=""
    [ -f "$STATE/$1.pid" ] || return 1
    read -r PID BORN TOKEN CONFIG PLACED <"$STATE/$1.pid" || return 1
    case $PID in
    "" | *[!0-9]*) return 1 ;;
    esac
    [ -n "$TOKEN" ]
}

arm_alive() { # arm: is the process that we started still there?
    read_pid_file "$1" && [ "$(start_time "$PID")" = "$BORN" ]
}

# Prints up | starting | down | dead. Dead: we started it and it is gone, or it was up and no longer healthy
# (vLLM answers /health with 503 when its engine has died).
arm_state() { # arm
    local address
    if ! [ -f "$STATE/$1.pid" ]; then
        printf 'down'
    elif ! arm_alive "$1"; then
        printf 'dead'
    else
        address=$(arm_address "$1")
        # shellcheck disable=SC2086
        if [ "$(http_status $address "$(arm_field "$1" HEALTH)")" = 200 ]; then
            printf 'up'
        elif [ -f "$STATE/$1.ready" ]; then
            printf 'dead'
        else
            printf 'starting'
        fi
    fi
}

# ---- start --------------------------------------------------------------------------------------------------

start_arm() { # arm
    local arm=$1 pid born token address taken
    address=$(arm_address "$arm") || exit $?
    # shellcheck disable=SC2086
    if port_taken $address; then
        taken=${address#* }
        say "error: port $taken is taken by something that this profile did not start;" \
            "stop that, or change PORT in $PROFILE_DIR/$arm.env"
        return 1
    fi
    mkdir -p "$STATE" || return 1
    printf '%s\n' "$PROFILE_DIR" >"$STATE/folder" || return 1
    [ ! -f "$STATE/$arm.log" ] || mv -f "$STATE/$arm.log" "$STATE/$arm.log.previous"
    rm -f "$STATE/$arm.ready"
    token=$$.$RANDOM$RANDOM
    (
        load_arm "$arm"
        export FACEOFF_TOKEN="$token"
        # The key that the load will send to this arm is the one that it asks for.
        own_key=FACEOFF_API_KEY_$(arm_suffix "$arm")
        [ "$PROFILE" = proxy ] || [ -z "${!own_key-}" ] || export FACEOFF_API_KEY="${!own_key}"
        cd "$ROOT" || exit 1
        exec "$FACEOFF_PYTHON" -c "$DETACH" bash "$PROFILE_DIR/launch.sh"
    ) >"$STATE/$arm.log" 2>&1 </dev/null &
    pid=$!
    born=$(start_time "$pid")
    printf '%s %s %s %s %s\n' "$pid" "${born:-gone}" "$token" "$(config_checksum "$arm")" \
        "$(arm_field "$arm" DEVICE)" >"$STATE/$arm.pid"
    STARTED="$STARTED $arm"
    say "$arm: starting on http://${address% *}:${address#* } (log: ${STATE#"$ROOT"/}/$arm.log)"
}

# Waits until the arms answer /health. False, with the reason shown, when one dies or the time is up.
await_arms() { # arms…
    local waiting="$*" still arm state limit began=$SECONDS told=0
    while [ -n "$waiting" ]; do
        [ -z "$EXIT_SIGNAL" ] || return 1
        still=""
        for arm in $waiting; do
            state=$(arm_state "$arm")
            case $state in
            up)
                : >"$STATE/$arm.ready"
                case " $STARTED " in
                *" $arm "*) say "$arm: up after $((SECONDS - began)) s" ;;
                *) say "$arm: already up" ;;
                esac
                ;;
            starting)
                still="$still $arm"
                limit=${FACEOFF_START_LIMIT:-$(arm_field "$arm" START_LIMIT)}
                if [ $((SECONDS - began)) -ge "${limit:-180}" ]; then
                    say "error: $arm did not answer /health within ${limit:-180} s" \
                        "(START_LIMIT in $PROFILE_DIR/$arm.env, or FACEOFF_START_LIMIT)"
                    show_reason "$arm"
                    return 1
                fi
                ;;
            *)
                [ -z "$EXIT_SIGNAL" ] || return 1
                say "error: $arm died while starting"
                show_reason "$arm"
                return 1
                ;;
            esac
        done
        waiting=${still# }
        [ -n "$waiting" ] || break
        if [ $((SECONDS - told)) -ge 5 ] && [ $((SECONDS - began)) -ge 5 ]; then
            told=$SECONDS
            say "waiting for $waiting: $((SECONDS - began)) s"
        fi
        sleep 0.2 || true
    done
}

# Prints the devices of the arms about to start. False when an arm would have to share a device that one of
# them, or one already up, wants for itself (EXCLUSIVE_DEVICE in its .env).
claim_devices() { # arms about to start…
    local arm other device devices="" owners=""
    for other in $(arm_names); do
        ! arm_alive "$other" || owners="$owners ${PLACED:-$(arm_field "$other" DEVICE)}=$other"
    done
    for arm in "$@"; do
        device=$(arm_field "$arm" DEVICE)
        case " $owners " in
        *" $device="*)
            if [ -n "$(arm_field "$arm" EXCLUSIVE_DEVICE)" ]; then
                other=${owners##*" $device="}
                say "error: $arm and ${other%% *} both want $device for themselves: bring them up one after the" \
                    "other, or set FACEOFF_DEVICE_<ARM> to another device"
                return 1
            fi
            ;;
        esac
        owners="$owners $device=$arm"
        devices="$devices $device"
    done
    printf '%s' "${devices# }"
}

# Brings the arms up, leaving alone those that already are; STARTED says which were started here. False, with
# the reason shown, when one could not be: the caller then stops what it started.
bring_up() { # arms…
    local arm state missing=""
    for arm in "$@"; do
        state=$(arm_state "$arm")
        case $state in
        up | starting)
            read_pid_file "$arm"
            if [ "$CONFIG" != "$(config_checksum "$arm")" ]; then
                say "warning: $arm runs with other settings than $arm.env, launch.sh and the environment say now;" \
                    "servers/down.sh $PROFILE_NAMED $arm, then start again"
            fi
            ;;
        dead)
            say "$arm: was started before and has died; starting it again"
            stop_arms "$arm"
            missing="$missing $arm"
            ;;
        *) missing="$missing $arm" ;;
        esac
    done
    # shellcheck disable=SC2086
    FACEOFF_DEVICES=$(claim_devices $missing) || return 1
    export FACEOFF_DEVICES
    if [ -n "$missing" ] && [ -f "$PROFILE_DIR/prepare.sh" ]; then
        run_command bash "$PROFILE_DIR/prepare.sh" || {
            [ -n "$EXIT_SIGNAL" ] || say "no server started: ${PROFILE_DIR#"$ROOT"/}/prepare.sh failed"
            return 1
        }
    fi
    unset FACEOFF_DEVICES
    for arm in $missing; do
        [ -z "$EXIT_SIGNAL" ] || return 1
        start_arm "$arm" || return 1
    done
    await_arms "$@"
}

# ---- stop ---------------------------------------------------------------------------------------------------

# Stops arms that we started: TERM to the whole group, and KILL for what is left after STOP_LIMIT seconds.
stop_arms() { # arms…
    local arm began waiting still members
    waiting=""
    for arm in "$@"; do
        if ! read_pid_file "$arm"; then
            rm -f "$STATE/$arm.pid" "$STATE/$arm.ready"
            continue
        fi
        if arm_alive "$arm" || [ -n "$(group_members "$PID" "$TOKEN")" ]; then
            # The group exists from the moment the child called setsid; before that there is only the child.
            kill -TERM -- "-$PID" 2>/dev/null || kill -TERM "$PID" 2>/dev/null || true
            waiting="$waiting $arm"
        else
            rm -f "$STATE/$arm.pid" "$STATE/$arm.ready"
        fi
    done
    began=$SECONDS
    while [ -n "$waiting" ]; do
        still=""
        for arm in $waiting; do
            read_pid_file "$arm" || continue
            members=$(group_members "$PID" "$TOKEN")
            if [ -z "$members" ] && ! arm_alive "$arm"; then
                rm -f "$STATE/$arm.pid" "$STATE/$arm.ready"
                say "$arm: stopped"
            else
                still="$still $arm"
                if [ $((SECONDS - began)) -ge "${FACEOFF_STOP_LIMIT:-15}" ]; then
                    kill -KILL -- "-$PID" 2>/dev/null || kill -KILL "$PID" 2>/dev/null || true
                fi
            fi
        done
        waiting=${still# }
        [ -z "$waiting" ] || sleep 0.1 || true
    done
}

# Undo an unfinished start; a second Ctrl-C must not leave servers behind.
stop_started() {
    trap '' INT TERM HUP
    # shellcheck disable=SC2086
    [ -z "$STARTED" ] || stop_arms $STARTED
    STARTED=""
}
