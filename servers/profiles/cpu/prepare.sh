#!/usr/bin/env bash
# Run by up.sh before the first arm starts: vLLM's venv and the tiny model, both only if missing.
set -euo pipefail
bash "$FACEOFF_ROOT/servers/setup_cpu.sh"
cd "$FACEOFF_ROOT"
.venv-cpu/bin/python -m servers.tiny_model results/models/tiny-mimo >&2
