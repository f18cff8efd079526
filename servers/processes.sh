# shellcheck shell=bash
# Processes, signals and logs, as the launchers need them: who is alive, who answers, why one died, a command that gets
# Ctrl-C. Sourced by lib.sh, never run. Needs FACEOFF_PYTHON.

EXIT_SIGNAL="" # 130, 143 or 129 once a signal arrived
SIGNALS=0      # how many signals arrived
CHILD=""       # the command that run_command is waiting for

# Prints the start time of a process (kernel ticks; the ps form where there is no /proc). Empty when it is gone
# or only waits to be reaped. A pid alone proves nothing: numbers are used again.
start_time() { # pid
    local stat rest
    if [ -d /proc/self ]; then
        { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 0
        rest=${stat##*) } # the command name before it may hold anything
        case $rest in
        Z* | X*) return 0 ;;
        esac
        # shellcheck disable=SC2086
        set -- $rest
        printf '%s' "${20}"
    else
        ps -o lstart= -p "$1" 2>/dev/null | tr -s ' ' '-' || true
    fi
}

# Prints the living members of an arm's process group. A leader that died may leave workers behind (an engine
# process, say); those are ours if they carry the token that only our start put into their environment.
group_members() { # pid, token
    local file stat rest pid members=""
    if [ ! -d /proc/self ]; then
        ps -A -o pid=,pgid=,stat= | while read -r pid rest stat; do
            [ "$rest" = "$1" ] && [ "${stat#Z}" = "$stat" ] && printf '%s ' "$pid"
        done
        return 0
    fi
    for file in /proc/[0-9]*/stat; do
        { stat=$(<"$file"); } 2>/dev/null || continue
        pid=${file#/proc/}
        pid=${pid%/stat}
        rest=${stat##*) }
        case $rest in
        Z* | X*) continue ;;
        [A-Za-z]" "*" $1 "*) ;;
        *) continue ;;
        esac
        # state ppid pgrp …
        rest=${rest#* }
        rest=${rest#* }
        [ "${rest%% *}" = "$1" ] || continue
        grep -qzs -- "FACEOFF_TOKEN=$2" "/proc/$pid/environ" && members="$members $pid"
    done
    printf '%s' "${members# }"
}

http_status() ( # host, port, path: prints the HTTP status, 000 when nobody answers
    exec 2>/dev/null
    exec 3<>"/dev/tcp/$1/$2" || { printf '000' && exit 0; }
    printf 'GET %s HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n' "$3" "$1" >&3
    line=""
    IFS= read -r -t 3 -u 3 line || true
    line=${line#HTTP/* }
    case $line in
    [0-9][0-9][0-9]*) printf '%s' "${line:0:3}" ;;
    *) printf '000' ;;
    esac
)

port_taken() { # host, port
    (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}

# A session of its own keeps Ctrl-C on our terminal away from the server and gives one group to stop. Shells
# let background commands ignore SIGINT; both programs undo that.
# shellcheck disable=SC2034
DETACH='import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.setsid()
os.execvp(sys.argv[1], sys.argv[1:])'
ATTACH='import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as problem:
    sys.exit(f"error: cannot run {sys.argv[1]}: {problem.strerror}")'

# Signals only raise a flag, so that no process is ever started without its pid being written down.
on_signal() { # exit code
    # shellcheck disable=SC2034
    EXIT_SIGNAL=$1
    SIGNALS=$((SIGNALS + 1))
    # Ctrl-C reaches the command by itself (same terminal); TERM and HUP were sent to us alone.
    if [ "$1" != 130 ] && [ -n "$CHILD" ]; then
        kill -TERM "$CHILD" 2>/dev/null || true
    fi
}

watch_signals() {
    trap 'on_signal 130' INT
    trap 'on_signal 143' TERM
    trap 'on_signal 129' HUP
}

# Runs a command and waits for it to end by itself, signals or not; returns its exit code.
run_command() { # command…
    local code seen
    "$FACEOFF_PYTHON" -c "$ATTACH" "$@" <&0 &
    CHILD=$!
    while :; do
        seen=$SIGNALS
        code=0
        wait "$CHILD" || code=$?
        [ "$seen" != "$SIGNALS" ] || break
    done
    CHILD=""
    return "$code"
}

# ---- logs ---------------------------------------------------------------------------------------------------

# Shows the last lines of a log, and the line that looks like the reason: the last error that does not point to
# another one (vLLM's front end only says that its engine failed).
show_reason() { # arm
    local log=$STATE/$1.log reason
    [ -s "$log" ] || { say "  its log is empty" && return 0; }
    reason=$(printable <"$log" |
        grep -E '(Error|error:|Exception|out of memory|unrecognized|Killed|No such)' |
        grep -v -E '(Traceback|^ *File |raise |[Ss]ee (root cause|stack trace)|Shutting down|shutting down)' |
        tail -n 1 | sed -E 's/^\([^)]*pid=[0-9]+\) //; s/^[A-Z]+ [0-9-]+ [0-9:]+ \[[^]]*\] //; s/^ *//' || true)
    say "  last lines of $log:"
    tail -n 12 "$log" | printable | cut -c1-400 | sed 's/^/    /' >&2
    [ -z "$reason" ] || say "  reason: $(printf '%s' "$reason" | cut -c1-400)"
}

printable() { LC_ALL=C sed -e $'s/\033\\[[0-9;]*[A-Za-z]//g' | LC_ALL=C tr -d '\000-\010\013-\037\177'; }
