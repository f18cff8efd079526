#!/usr/bin/env bash
# Asks vLLM's own argument parser about every flag of a profile's arms, without a GPU and without a model.
# Uses the vLLM that would serve, or the CPU build (servers/setup_cpu.sh): the parser is the same.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    say "usage: servers/check.sh PROFILE [ARM…]   (no arm: all of them)"
    [ $# -gt 0 ] || exit 2
    exit 0
fi
find_profile "$1"
shift
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2046
    set -- $(arm_names)
fi
choose_arms "$@"

# The vllm command that launch.sh would take.
vllm=$ROOT/.venv/bin/vllm
[ -x "$vllm" ] || vllm=vllm
vllm=$(command -v "${FACEOFF_VLLM:-$vllm}" || true)
[ -n "$vllm" ] || [ -z "${FACEOFF_VLLM-}" ] || fail "no vllm command $FACEOFF_VLLM (FACEOFF_VLLM)"
# Its first line names the Python that runs it.
[ -z "$vllm" ] || vllm=$(head -n 1 "$vllm" | LC_ALL=C tr -d '\000' | sed -n 's/^#! *\([^ ]*\).*/\1/p')
python=""
for candidate in ${FACEOFF_VLLM_PYTHON:+"$FACEOFF_VLLM_PYTHON"} ${vllm:+"$vllm"} \
    "$ROOT/.venv-cpu/bin/python"; do
    if "$candidate" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("vllm") is None)' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -z "$python" ] || say "asking the vLLM of $python"
[ -n "$python" ] || fail "no vLLM to ask: bash servers/setup_cpu.sh installs the CPU build, or set FACEOFF_VLLM_PYTHON"

bad=0
# shellcheck disable=SC2153
for arm in $ARMS; do
    (
        load_arm "$arm"
        export FACEOFF_CHECKER="$python"
        bash "$PROFILE_DIR/launch.sh"
    ) >"${TMPDIR:-/tmp}/faceoff-check.$$" 2>&1 || bad=1
    # What vLLM says while it is imported does not matter; the checker's own lines carry a mark.
    if grep -q '^check: ' "${TMPDIR:-/tmp}/faceoff-check.$$"; then
        sed -n "s/^check: /$arm: /p" "${TMPDIR:-/tmp}/faceoff-check.$$"
    else
        say "$arm: could not be checked"
        tail -n 5 "${TMPDIR:-/tmp}/faceoff-check.$$" | printable | sed 's/^/    /' >&2
        bad=1
    fi
done
rm -f "${TMPDIR:-/tmp}/faceoff-check.$$"
exit "$bad"
