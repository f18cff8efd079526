#!/usr/bin/env bash
# One arm of the h100 profile: vLLM on one GPU. The arm's .env says what differs (FLAGS); what must be alike for
# a fair comparison stands here once. servers/check.sh h100 asks vLLM's own parser about every flag.
set -euo pipefail

case $MODEL in
/* | ./* | ../*)
    [ -e "$MODEL" ] || {
        echo "error: the checkpoint $MODEL is not there; FACEOFF_CHECKPOINT takes its folder, or a model's name" >&2
        exit 1
    }
    ;;
esac

vllm=$FACEOFF_ROOT/.venv/bin/vllm
[ -x "$vllm" ] || vllm=vllm
# FACEOFF_VLLM: another vllm command than the project's own or the one on PATH.
command=("${FACEOFF_VLLM:-$vllm}")
# check.sh: have the command line looked at instead of run.
[ -z "${FACEOFF_CHECKER-}" ] || command=("$FACEOFF_CHECKER" "$FACEOFF_ROOT/servers/check_flags.py")
command -v "${command[0]}" >/dev/null || {
    echo "error: no vllm command; install the extra (pip install '.[vllm]') or set FACEOFF_VLLM" >&2
    exit 1
}

# One arm, one GPU: DEVICE=gpu1 means the second one. nvidia-smi's order, which is not CUDA's default.
export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${DEVICE#gpu}
# POST /reset_prefix_cache exists in development mode only. Bind to loopback (the default), or nobody else's
# network: development mode is not for the public.
export VLLM_SERVER_DEV_MODE=1
# uvicorn closes idle connections after 5 s by default; a user who thinks longer would pay for a new one.
export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=600
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# The key goes through the environment: a --api-key could be read in the process list.
[ -z "${FACEOFF_API_KEY-}" ] || export VLLM_API_KEY=$FACEOFF_API_KEY

options=(
    # One name for every arm, whatever folder the checkpoint lies in: requests name it.
    --host "$HOST" --port "$PORT" --served-model-name "${SERVED_NAME:-qwen3.8-27b}"
    # The reference case: one GPU per server, the full context, FP8 KV cache.
    --tensor-parallel-size 1 --max-model-len 262144 --kv-cache-dtype fp8
    # The checkpoint can also see; no memory for that here.
    --language-model-only
    # vLLM's default, said so that both arms get the same pool whatever the default becomes.
    --gpu-memory-utilization 0.92
    # vLLM's default for this size of GPU; it sets how long a decode waits behind a prefill chunk.
    --max-num-batched-tokens 8192
    # The default of 1024 would be more than this hybrid model's cache has blocks: vLLM would refuse to start.
    --max-num-seqs 64
    # Reasoning then comes as a field of its own and not as text between tags: TTFT and TTFA can be told apart.
    --reasoning-parser qwen3
    # usage then says how many prompt tokens came from the cache, and how a request spent its time.
    --enable-prompt-tokens-details --enable-per-request-metrics
    # Logging every request costs time and would put prompts into a file.
    --no-enable-log-requests --disable-uvicorn-access-log
)
# FLAGS is one line of words; none of them holds a space (JSON is written without).
read -ra flags <<<"${FLAGS-}"
exec "${command[@]}" serve "$MODEL" "${options[@]}" "${flags[@]}"
