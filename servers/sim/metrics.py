"""The ``/metrics`` page: vLLM 0.32's names, types and labels, in the Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from .engine import Engine, Output

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LATENESS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, … up to ``limit``: vLLM's buckets for token counts."""
    buckets: list[int] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > limit:
                return tuple(buckets)
            buckets.append(mantissa * scale)
        scale *= 10


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


class Histogram:
    """A Prometheus histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, help_text: str, labels: Mapping[str, str]) -> list[str]:
        """Text format."""
        lines = [f"# HELP {name} {help_text}", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip([*map(float, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f"{name}_bucket{_labels({**labels, 'le': str(bound)})} {float(total)}")
        lines.append(f"{name}_count{_labels(labels)} {float(total)}")
        lines.append(f"{name}_sum{_labels(labels)} {self.sum}")
        return lines


class Metrics:
    """Histograms fed by the driver; counters and gauges are read from the engine on request."""

    def __init__(self, engine: Engine, model: str, blocks_override: int | None = None) -> None:
        self.engine = engine
        self._blocks_override = blocks_override
        self.labels = {"engine": "0", "model_name": model}
        tokens = one_two_five(engine.config.max_model_len)
        self.ttft, self.itl, self.tpot = Histogram(_TTFT), Histogram(_PER_TOKEN), Histogram(_PER_TOKEN)
        self.e2e, self.queue, self.inference = Histogram(_LATENCY), Histogram(_LATENCY), Histogram(_LATENCY)
        self.prefill, self.decode = Histogram(_LATENCY), Histogram(_LATENCY)
        self.prompt_tokens, self.generation_tokens = Histogram(tokens), Histogram(tokens)
        self.computed_tokens, self.max_tokens = Histogram(tokens), Histogram(tokens)
        self.longest = Histogram(tokens)
        self.choices = Histogram((1, 2, 5, 10, 20))
        self.preemptions = Histogram((1, 2, 3, 4, 5, 10, 20))
        self.iteration = Histogram(_ITERATION)
        self.lateness = Histogram(_LATENESS)
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)

    def observe_step(self, outputs: Sequence[Output]) -> None:
        """Count a step that gave tokens: those, and each prompt's uncached part with its first token."""
        total = 0
        for output in outputs:
            total += output.tokens
            if output.first:
                total += output.request.prompt_tokens - output.request.cached_tokens
        self.iteration.observe(total)

    def observe(self, output: Output, limit: int) -> None:
        """Count one output of a step, of a request that may have up to ``limit`` tokens."""
        request = output.request
        if output.first:
            assert request.first_token_at is not None
            self.ttft.observe(request.first_token_at - request.arrival)
        else:
            self.itl.observe(output.gap)
        if not output.finished:
            return
        first, last, scheduled = request.first_token_at, request.last_token_at, request.scheduled_at
        if first is None or last is None or scheduled is None:
            return
        self.finished[request.finish_reason] += 1
        self.e2e.observe(last - request.arrival)
        self.queue.observe(scheduled - request.ready)
        self.prefill.observe(first - scheduled)
        self.inference.observe(last - scheduled)
        self.decode.observe(last - first)
        self.tpot.observe((last - first) / (request.generated - 1) if request.generated > 1 else 0.0)
        self.prompt_tokens.observe(request.prompt_tokens)
        self.generation_tokens.observe(request.generated)
        self.computed_tokens.observe(request.prompt_tokens - request.cached_tokens)
        self.max_tokens.observe(limit)
        self.longest.observe(request.generated)
        self.choices.observe(1)
        self.preemptions.observe(request.preemptions)

    def page(self, clock_scale: float) -> bytes:
        """The whole page."""
        lines: list[str] = []
        engine, counters, pool = self.engine, self.engine.counters, self.engine.memory.pool
        waiting = len(engine.waiting)

        def add(kind: str, name: str, help_text: str, *series: tuple[Mapping[str, str], float]) -> None:
            lines.append(f"# HELP {name} {help_text}")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(
                f"{name}{_labels({**self.labels, **extra})} {float(value)}" for extra, value in series
            )

        def gauge(name: str, help_text: str, *series: tuple[Mapping[str, str], float]) -> None:
            add("gauge", f"vllm:{name}", help_text, *series)

        def counter(name: str, help_text: str, *series: tuple[Mapping[str, str], float]) -> None:
            add("counter", f"vllm:{name}_total", help_text, *series)

        gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            ({}, len(engine.running)),
        )
        gauge("num_requests_waiting", "Number of requests waiting to be processed.", ({}, waiting))
        gauge(
            "num_requests_waiting_by_reason",
            "Number of requests waiting, by reason.",
            ({"reason": "capacity"}, waiting),
            ({"reason": "deferred"}, 0),
        )
        gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 1 means engine is awake.",
            ({"sleep_state": "awake"}, 1),
            ({"sleep_state": "weights_offloaded"}, 0),
            ({"sleep_state": "discard_all"}, 0),
        )
        gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", ({}, pool.usage))
        counter("prefix_cache_queries", "Prefix cache queries, in tokens.", ({}, counters.prefix_queries))
        counter("prefix_cache_hits", "Prefix cache hits, in tokens.", ({}, counters.prefix_hits))
        for name, what in (
            ("external_prefix_cache_queries", "External prefix cache queries, in tokens."),
            ("external_prefix_cache_hits", "External prefix cache hits, in tokens."),
            ("mm_cache_queries", "Multi-modal cache queries, in items."),
            ("mm_cache_hits", "Multi-modal cache hits, in items."),
            ("estimated_flops_per_gpu", "Estimated floating point operations (not estimated here)."),
            ("estimated_read_bytes_per_gpu", "Estimated bytes read from memory (not estimated here)."),
            ("estimated_write_bytes_per_gpu", "Estimated bytes written to memory (not estimated here)."),
        ):
            counter(name, what, ({}, 0))
        counter("num_preemptions", "Cumulative number of preemptions.", ({}, counters.preemptions))
        counter("prompt_tokens", "Number of prefill tokens processed.", ({}, counters.prompt_tokens))
        counter(
            "prompt_tokens_cached", "Number of cached prompt tokens.", ({}, counters.prompt_tokens_cached)
        )
        counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens, by source.",
            ({"source": "local_compute"}, counters.prompt_tokens - counters.prompt_tokens_cached),
            ({"source": "local_cache_hit"}, counters.prompt_tokens_cached),
            ({"source": "external_kv_transfer"}, 0),
        )
        counter(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens, by the cache tier that supplied them.",
            ({"source": "device"}, counters.prefix_hits),
            *(({"source": tier}, 0) for tier in ("host", "p2p", "disk", "external_unspecified")),
        )
        counter(
            "generation_tokens", "Number of generation tokens processed.", ({}, counters.generated_tokens)
        )
        counter(
            "request_success",
            "Count of successfully processed requests.",
            *(({"finished_reason": reason}, count) for reason, count in self.finished.items()),
        )
        # The frontend's, which knows no engine; requests are refused by number only where a flag says so.
        model = {"model_name": self.labels["model_name"]}
        lines.append("# HELP vllm:admission_rejections_total Admission attempts rejected by a queue limit.")
        lines.append("# TYPE vllm:admission_rejections_total counter")
        lines.extend(
            f"vllm:admission_rejections_total{_labels({**model, 'reason': reason})} 0.0"
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        )
        if engine.config.drafts:
            counter("spec_decode_num_drafts", "Number of spec decoding drafts.", ({}, counters.drafts))
            counter("spec_decode_num_draft_tokens", "Number of draft tokens.", ({}, counters.draft_tokens))
            counter(
                "spec_decode_num_accepted_tokens",
                "Number of accepted tokens.",
                ({}, counters.accepted_tokens),
            )
            counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens per draft position.",
                *(({"position": str(i)}, n) for i, n in enumerate(counters.accepted_per_position)),
            )
        lines += self._histograms()
        lines += self._cache_config()
        add("gauge", "faceoff_sim:clock_scale", "Model seconds per wall second.", ({}, clock_scale))
        lines += self.lateness.lines(
            "faceoff_sim:lateness_seconds",
            "Wall time from the instant at which a chunk was due to the instant at which it was written.",
            self.labels,
        )
        return ("\n".join(lines) + "\n").encode()

    def _histograms(self) -> list[str]:
        lines: list[str] = []
        for name, histogram, help_text in (
            ("time_to_first_token_seconds", self.ttft, "Time to first token in seconds."),
            ("inter_token_latency_seconds", self.itl, "Inter-token latency in seconds."),
            ("request_time_per_output_token_seconds", self.tpot, "Time per output token of a request."),
            ("e2e_request_latency_seconds", self.e2e, "End-to-end request latency in seconds."),
            ("request_queue_time_seconds", self.queue, "Time spent in WAITING phase."),
            ("request_inference_time_seconds", self.inference, "Time spent in RUNNING phase."),
            ("request_prefill_time_seconds", self.prefill, "Time spent in PREFILL phase."),
            ("request_decode_time_seconds", self.decode, "Time spent in DECODE phase."),
            ("request_prompt_tokens", self.prompt_tokens, "Number of prefill tokens processed."),
            ("request_generation_tokens", self.generation_tokens, "Number of generation tokens processed."),
            (
                "request_prefill_kv_computed_tokens",
                self.computed_tokens,
                "Prompt tokens computed, not cached.",
            ),
            (
                "request_max_num_generation_tokens",
                self.longest,
                "Generation tokens of the longest choice.",
            ),
            ("request_params_n", self.choices, "The n request parameter."),
            ("request_params_max_tokens", self.max_tokens, "The max_tokens request parameter."),
            ("request_num_preemptions", self.preemptions, "Preemptions of a request."),
            ("iteration_tokens_total", self.iteration, "Number of tokens per engine step."),
        ):
            lines += histogram.lines(f"vllm:{name}", f"Histogram: {help_text}", self.labels)
        return lines

    def _cache_config(self) -> list[str]:
        config = self.engine.config
        labels = {
            "block_size": str(config.block_size),
            "cache_dtype": "fp8",
            "enable_prefix_caching": str(config.caching),
            "engine": "0",
            "gpu_memory_utilization": "0.92",
            "is_attention_free": "False",
            "mamba_cache_mode": "align" if config.caching and config.state_groups else "none",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(config.blocks),
            "num_gpu_blocks_override": str(self._blocks_override),
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": str(config.match_unit),
            "sliding_window": "None",
        }
        return [
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{_labels(labels)} 1.0",
        ]
