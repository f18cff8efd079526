"""The simulator's engine beside vLLM's own scheduler: the same random loads, step by step, block by block.

Runs in vLLM's environment and needs no model, no device and no server: `python -m tests.real.scheduler_beside
FIRST LAST` takes the loads with these seeds and prints what differs.
"""

from __future__ import annotations

import os
import random
import sys
from hashlib import blake2b
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

from servers.sim.calibration import Calibration, Decode, Draft, Model, Prefill
from servers.sim.engine import Engine
from servers.sim.request import EngineConfig
from servers.sim.request import Request as Simulated

MAX_LEN = 96_000


def answer_token(key, index):
    """Token ``index`` of the answer to request ``key``, the same on both sides."""
    return 1_000_000 + int.from_bytes(blake2b(f"{key}/{index}".encode(), digest_size=3).digest(), "big")


class Content:
    """Tokens as the simulator wants them: a hash chain over units."""

    def __init__(self, key, tokens, unit):
        self.key, self.unit, self.prompt = key, unit, len(tokens)
        self.tokens = list(tokens)
        self.digest = key.encode()
        self.hashes = []
        self.extend(self.prompt)

    def extend(self, total):
        while len(self.tokens) < total:
            self.tokens.append(answer_token(self.key, len(self.tokens) - self.prompt))
        while (len(self.hashes) + 1) * self.unit <= total:
            start = len(self.hashes) * self.unit
            text = repr(self.tokens[start : start + self.unit]).encode()
            link = self.hashes[-1] if self.hashes else b""
            self.hashes.append(blake2b(link + text, digest_size=12).digest())


class Real:
    """vLLM's scheduler on a configuration that has what it reads, and nothing behind it."""

    def __init__(self, sizes):
        self.drafts = sizes.drafts
        attention = FullAttentionSpec(
            block_size=sizes.block_size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["attention"], attention)]
        groups[0].is_eagle_group = sizes.drafts > 0
        for index in range(sizes.state_groups):
            state = MambaSpec(
                block_size=sizes.block_size if sizes.caching else MAX_LEN,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align" if sizes.caching else "none",
                num_speculative_blocks=sizes.drafts,
            )
            groups.append(KVCacheGroupSpec([f"state{index}"], state))
        cache = KVCacheConfig(
            num_blocks=sizes.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=0,
        )
        self.scheduler = Scheduler(
            self._config(sizes),
            cache,
            MagicMock(),
            block_size=MAX_LEN if sizes.state_groups and not sizes.caching else sizes.block_size,
            hash_block_size=sizes.match_unit,
        )
        self._hasher = get_request_block_hasher(sizes.match_unit, sha256)

    def _config(self, sizes):
        config = MagicMock()
        config.scheduler_config = SimpleNamespace(
            max_num_seqs=sizes.max_seqs,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=sizes.max_batched_tokens,
            max_num_batched_tokens=sizes.max_batched_tokens,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            policy="fcfs",
            watermark=0.0,
            scheduler_reserve_full_isl=True,
            enable_chunked_prefill=True,
            async_scheduling=False,
            disable_chunked_mm_input=False,
        )
        config.cache_config = SimpleNamespace(
            num_gpu_blocks=sizes.blocks,
            enable_prefix_caching=sizes.caching,
            block_size=sizes.block_size,
            mamba_cache_mode="align" if sizes.caching else "none",
            enable_mamba_shared_prefix_checkpoint=False,
            prefix_match_unit=None,
        )
        config.lora_config = config.kv_events_config = None
        config.kv_transfer_config = config.ec_transfer_config = None
        config.ec_manager_config.get_encoder_cache_manager_obj.return_value = None
        config.is_mm_encoder_only = False
        config.model_config = MagicMock(
            uses_mrope=False,
            is_encoder_decoder=False,
            max_model_len=MAX_LEN,
            runner_type="generate",
            is_diffusion=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        )
        config.observability_config = SimpleNamespace(
            per_request_spec_decode_metrics=None,
            kv_cache_metrics=False,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
        )
        config.parallel_config = SimpleNamespace(
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        )
        config.speculative_config = None
        if sizes.drafts:
            config.speculative_config = MagicMock(
                num_speculative_tokens_per_batch_size=None, max_num_new_slots_for_drafting=0
            )
        config.num_speculative_tokens = config.num_lookahead_tokens = sizes.drafts
        config.num_prefill_lookahead_tokens = 1 if sizes.drafts else 0
        config.max_in_flight_tokens = sizes.max_batched_tokens
        config.use_v2_model_runner = True
        config.aux_output_config = SimpleNamespace(enabled=False)
        return config

    def submit(self, key, tokens, output):
        request = Request(
            key,
            list(tokens),
            SamplingParams(max_tokens=output, ignore_eos=True),
            None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def step(self, given):
        """What a step computes, the blocks in use, and who is done; ``given``: tokens it gave to each."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        pool = scheduler.kv_cache_manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        rows, done = [], []
        for key, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[key]
            rows.append((key, request.num_computed_tokens - tokens, tokens))
            request.num_in_flight_tokens -= tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            drafted = len(output.scheduled_spec_decode_tokens.get(key, ()))
            count = 1
            if drafted:
                count = min(given.get(key, 1), 1 + drafted)
                request.num_computed_tokens -= drafted - (count - 1)
            before, limit = len(request.output_token_ids), request.sampling_params.max_tokens
            count = min(count, limit - before)
            request.append_output_token_ids([answer_token(key, before + i) for i in range(count)])
            request.spec_token_ids = [1] * self.drafts
            if before + count == limit:
                done.append(key)
                scheduler.running.remove(request)
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                scheduler._free_request(request)
        return sorted(rows), used, set(done)


def random_sizes(rng):
    """Small blocks and pools, so that everything is often full."""
    groups = rng.choice([0, 3, 3, 3])
    caching = rng.random() < 0.85
    drafts = rng.choice([0, 0, 3, 2])
    block = rng.choice([32, 64, 96]) if groups else rng.choice([16, 32, 64])
    unit = block // rng.choice([2, 4]) if groups and caching and rng.random() < 0.3 else block
    budget = rng.choice([1, 2, 5]) * block + rng.choice([0, 0, 7, block // 2])
    longest = rng.choice([4, 8, 20]) * block
    seqs = rng.choice([3, 8, 32])
    needed = longest * 3 // block + groups * (2 + drafts) + 6
    sizes = EngineConfig(
        max_model_len=MAX_LEN,
        max_batched_tokens=budget,
        max_seqs=seqs,
        block_size=block,
        blocks=max(seqs, rng.choice([needed, needed * 2, needed * 5])),
        caching=caching,
        drafts=drafts,
        state_groups=groups,
        match_unit=unit,
        drop_unit=drafts > 0,
    )
    return sizes, longest


def random_prompt(rng, history, shared, longest, block):
    """New, behind a shared beginning, or a continuation or repetition of something that has ended."""
    if history and rng.random() < 0.5:
        ended = rng.choice(history[-6:])
        answer = ended.generated if rng.random() < 0.7 else 0
        tokens = ended.content.tokens[: ended.prompt_tokens + answer]
        if rng.random() < 0.8:
            tokens = tokens + [rng.randrange(1000) for _ in range(rng.randrange(1, block * 2))]
    else:
        tokens = rng.choice(shared) + [rng.randrange(1000) for _ in range(rng.randrange(1, longest // 2))]
    tokens = tokens[:longest]
    return tokens[: max(block, len(tokens) // block * block)] if rng.random() < 0.2 else tokens


def compare(seed, requests=60, users=6):
    """Steps and preemptions of one load; raises AssertionError where the two schedulers part."""
    rng = random.Random(seed)
    sizes, longest = random_sizes(rng)
    real = Real(sizes)
    calibration = Calibration(
        model=Model("m"),
        prefill=Prefill(token_s=1e-9),
        decode=Decode(step_s=1.0),
        draft=Draft(acceptance=[0.8, 0.6, 0.5]),
    )
    engine = Engine(sizes, calibration)
    pool = engine.memory.pool
    shared = [[rng.randrange(1000) for _ in range(rng.randrange(longest // 2))] for _ in range(2)]
    live, history, sent, steps = {}, [], 0, 0
    while sent < requests or live:
        while sent < requests and len(live) < users and rng.random() < 0.7:
            tokens = random_prompt(rng, history, shared, longest, sizes.block_size)
            key, output = f"k{sent}", rng.randrange(1, sizes.block_size * rng.choice([1, 1, 2]))
            live[key] = Simulated(key, Content(key, tokens, sizes.match_unit), len(tokens), output)
            engine.submit(live[key], float(steps))
            real.submit(key, tokens, output)
            sent += 1
        if not live:
            continue
        steps += 1
        rows, used, outputs = [], pool.usable - pool.free, []
        if engine.begin(float(steps)) is not None:
            step = engine.step
            rows = [(r.key, r.computed, 1 + sizes.drafts) for r in step.decodes]
            if rows:
                rows[-1] = (*rows[-1][:2], 1 + step.last_drafts)
            rows += [(r.key, start, tokens) for r, start, tokens in step.chunks]
            used = pool.usable - pool.free
            outputs = engine.finish()
        mine = (sorted(rows), used, {output.request.key for output in outputs if output.finished})
        theirs = real.step({output.request.key: output.tokens for output in outputs})
        assert mine == theirs, (
            f"seed {seed}, {sizes}, step {steps}:\n  simulator {mine}\n  vLLM      {theirs}"
        )
        history += [live.pop(key) for key in sorted(mine[2])]
    return steps, engine.counters.preemptions


def main(first, last):
    init_none_hash(sha256)
    steps = preemptions = failed = 0
    for seed in range(first, last):
        try:
            more, preempted = compare(seed)
        except AssertionError as error:
            print(error)
            failed += 1
        else:
            steps, preemptions = steps + more, preemptions + preempted
    print(f"{last - first} loads, {steps} steps, {preemptions} preemptions, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
