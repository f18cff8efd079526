# shellcheck shell=bash
# Makes a venv from a lock with hashes, once. Sourced after lib.sh by what needs a venv of its own.

choose_python311() { # prints a Python 3.11; the locks hold wheels of that version
    local candidate
    for candidate in ${FACEOFF_PYTHON311:+"$FACEOFF_PYTHON311"} python3.11 "$FACEOFF_PYTHON" python3; do
        if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]; then
            printf '%s' "$candidate"
            return 0
        fi
    done
    fail "this needs Python 3.11 (the lock holds wheels of that version); set FACEOFF_PYTHON311 to one"
}

# Shows how far pip is: one line every 10 s, whether pip says something or not.
show_progress() { # log file, number of packages
    local line count=0 last=$SECONDS began=$SECONDS status
    : >"$1"
    while :; do
        status=0
        IFS= read -r -t 5 line || status=$?
        if [ "$status" = 0 ]; then
            printf '%s\n' "$line" >>"$1"
            case $line in
            Collecting* | Processing*) count=$((count + 1)) ;;
            Installing*) count=$2 ;;
            esac
        elif [ "$status" -le 128 ]; then
            return 0 # end of pip's output; above 128 the 5 s have passed
        fi
        if [ $((SECONDS - last)) -ge 10 ]; then
            last=$SECONDS
            if [ "$count" -ge "$2" ]; then
                say "  unpacking $2 packages, $((SECONDS - began)) s"
            else
                say "  fetched $count of $2 packages, $((SECONDS - began)) s"
            fi
        fi
    done
}

# Installs a lock into a venv unless that is done; what it does and how long it takes goes to stderr.
install_lock() { # what it is called, venv, lock, MB of disk needed, modules to try
    local name=$1 venv=$2 lock=$3 needed=$4 modules=$5 free_kb log python
    # A copy of the lock that was installed to the end.
    if cmp -s "$lock" "$venv/installed-lock"; then
        say "$name: ready"
        return 0
    fi
    mkdir -p "$STATE_ROOT" || fail "cannot write to $STATE_ROOT"
    log=$STATE_ROOT/$(basename "$lock" .txt)-setup.log
    if command -v flock >/dev/null; then
        exec 9>"$STATE_ROOT/$(basename "$venv").lock"
        flock -n 9 || say "$name: another set-up is running; waiting for it"
        flock 9
        if cmp -s "$lock" "$venv/installed-lock"; then
            say "$name: ready"
            return 0
        fi
    fi
    python=$(choose_python311) || exit 1
    free_kb=$(df -Pk "$ROOT" | awk 'NR == 2 {print $4}')
    [ "$((free_kb / 1000))" -ge "$needed" ] ||
        fail "$name needs $needed MB of disk; $ROOT has $((free_kb / 1000)) MB left"

    say "$name: installing into ${venv#"$ROOT"/} (once; log: ${log#"$ROOT"/})"
    rm -rf "$venv"
    "$python" -m venv "$venv" 9>&-
    # A lock is complete, hence --no-deps: pip would miss what an overrides file leaves out on purpose.
    if ! "$venv/bin/python" -m pip install --progress-bar off --no-input --disable-pip-version-check \
        --no-deps --require-hashes -r "$lock" 2>&1 9>&- |
        show_progress "$log" "$(grep -c '^[a-zA-Z0-9].*==' "$lock")" 9>&-; then
        say "  last lines of $log:"
        tail -n 8 "$log" | printable | cut -c1-300 | sed 's/^/    /' >&2
        if grep -q 'torch==.*+cpu' "$log"; then
            say "  the CPU build of torch is not among your package sources: it comes from PyTorch's own index." \
                "Point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at that and try again"
        fi
        fail "$name could not be installed"
    fi
    "$venv/bin/python" -c "import $modules" >>"$log" 2>&1 9>&- ||
        fail "$name was installed but cannot be imported: $log"
    cp "$lock" "$venv/installed-lock"
    say "$name: ready after $SECONDS s"
}
