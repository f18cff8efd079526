#!/usr/bin/env bash
# One arm of the cpu profile: real vLLM on the tiny model. The arm's .env says what differs (FLAGS); what is
# the same for every arm stands here once, so that arms cannot drift apart.
set -euo pipefail

venv=$FACEOFF_ROOT/.venv-cpu
[ -x "$venv/bin/python" ] || {
    echo "error: no vLLM for the CPU in $venv: run servers/setup_cpu.sh" >&2
    exit 1
}
[ -f "$MODEL/config.json" ] || {
    echo "error: the checkpoint $MODEL has no config.json; servers/profiles/cpu/prepare.sh makes the tiny one" >&2
    exit 1
}

# Nothing is ever looked up or reported outside this machine.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# Host memory for KV blocks: 1 GiB holds 262144 tokens of this model.
export VLLM_CPU_KVCACHE_SPACE=${KV_GIB:-1}
# Left to itself vLLM keeps one core for the front end; here both compute.
export VLLM_CPU_OMP_THREADS_BIND=${CORES:-0-1}
# Intel's OpenMP must come first, or every parallel loop is slower; it lies in the venv itself.
export LD_PRELOAD=$venv/lib/libiomp5.so
# POST /reset_prefix_cache exists in development mode only.
export VLLM_SERVER_DEV_MODE=1
# uvicorn closes idle connections after 5 s by default; a user who thinks longer would pay for a new one.
export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=600
# The key goes through the environment: a --api-key could be read in the process list.
[ -z "${FACEOFF_API_KEY-}" ] || export VLLM_API_KEY=$FACEOFF_API_KEY

# The module, not the vllm command: that looks for a package named vllm and fails in this build.
command=("$venv/bin/python" -m vllm.entrypoints.openai.api_server)
# check.sh: have the command line looked at instead of run.
[ -z "${FACEOFF_CHECKER-}" ] || command=("$FACEOFF_CHECKER" "$FACEOFF_ROOT/servers/check_flags.py")

options=(
    --host "$HOST" --port "$PORT" --model "$MODEL" --served-model-name tiny-mimo
    --dtype bfloat16 --max-model-len 32768
    # Compiling would cost minutes at each start.
    --enforce-eager
    # vLLM's default on a CPU, said so that no later default changes what is compared.
    --max-num-batched-tokens 2048
    # The default of 128 is far above what two cores carry.
    --max-num-seqs 32
    # usage then says how many prompt tokens came from the cache.
    --enable-prompt-tokens-details
    # Logging every request costs time and would put prompts into a file.
    --no-enable-log-requests --disable-uvicorn-access-log
)
# FLAGS is one line of words; none of them holds a space (JSON is written without).
read -ra flags <<<"${FLAGS-}"
# Server and load generator share the cores here: the generator needs little, but at once.
exec nice -n 10 "${command[@]}" "${options[@]}" "${flags[@]}"
