#!/usr/bin/env bash
# Start one simulator in the foreground. Reads PORT, MODEL and FLAGS (an arm's env file), and optionally HOST,
# CALIBRATION, CLOCK_SCALE and SEED.
set -euo pipefail

# The launcher says where Faceoff is, so that a copy of this folder works anywhere.
cd "${FACEOFF_ROOT:-$(dirname "${BASH_SOURCE[0]}")/../../..}"

python=python3
if [[ -x .venv/bin/python ]]; then
  python=.venv/bin/python
fi

# FLAGS is one line of words; none of them holds a space (JSON is written without).
read -ra flags <<<"${FLAGS:-}"

exec "${FACEOFF_PYTHON:-$python}" -m servers.sim \
  --host "${HOST:-127.0.0.1}" \
  --port "${PORT:?PORT is not set: source an arm file of this profile first}" \
  --served-model-name "${MODEL:-qwen3.8-27b}" \
  --calibration "${CALIBRATION:-servers/calibrations/h100-qwen3.8-27b.toml}" \
  --clock-scale "${CLOCK_SCALE:-10}" \
  --seed "${SEED:-0}" \
  "${flags[@]+"${flags[@]}"}"
