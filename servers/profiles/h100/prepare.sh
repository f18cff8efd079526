#!/usr/bin/env bash
# Run by up.sh before the first arm starts: without the GPUs that the arms ask for, say so now and not after
# minutes of loading. FACEOFF_DEVICES: the devices of the arms about to start.
set -euo pipefail

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ "${gpus:-0}" = 0 ]; then
    echo "error: profile h100 needs an NVIDIA GPU, and nvidia-smi finds none here. Without one:" \
        "PROFILE=sim (simulated) or PROFILE=cpu (real vLLM, a tiny model)" >&2
    exit 1
fi
for device in ${FACEOFF_DEVICES-}; do
    number=""
    case $device in
    gpu*) number=${device#gpu} ;;
    esac
    case $number in
    "" | *[!0-9]*)
        echo "error: DEVICE=$device is not of the form gpu0, gpu1, …" >&2
        exit 1
        ;;
    esac
    if [ "$number" -ge "$gpus" ]; then
        echo "error: an arm wants $device, but there are only $gpus GPUs (gpu0 to gpu$((gpus - 1)));" \
            "FACEOFF_DEVICE_<ARM>=gpu0 puts an arm elsewhere, one arm at a time" >&2
        exit 1
    fi
done
