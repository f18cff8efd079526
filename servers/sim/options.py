"""Command line of the simulator: vLLM's flags where they matter here, and a few of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .calibration import Calibration, CalibrationError, load
from .clock import FASTEST, SLOWEST
from .faults import Faults
from .request import EngineConfig

CALIBRATION = Path(__file__).parent.parent / "calibrations" / "h100-qwen3.8-27b.toml"


class OptionError(Exception):
    """Flags that do not fit together; the message says what to do."""


class Options(msgspec.Struct, kw_only=True):
    """Everything that one simulator process is told."""

    host: str
    port: int
    model: str
    calibration: Calibration
    engine: EngineConfig
    #: ``--num-gpu-blocks-override`` as given.
    blocks_override: int | None
    clock_scale: float
    seed: int
    release: str
    faults: Faults


class _Speculative(msgspec.Struct):
    num_speculative_tokens: int
    method: str = "mtp"
    disable_eagle_block_drop: bool = False


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; defaults as vLLM's on a large GPU unless the help says otherwise."""
    parser = argparse.ArgumentParser(prog="python -m servers.sim", description=__doc__, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=8000, help="0 picks a free one; the first line printed says which"
    )
    parser.add_argument("--model", help="ignored: the calibration is the model")
    parser.add_argument("--served-model-name", help="default: the calibration's model name")
    parser.add_argument("--max-model-len", type=int, help="default: the calibration's")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="token budget of a step")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="running requests at most (vLLM: 1024)")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--block-size", type=int, help="default: the calibration's")
    parser.add_argument(
        "--prefix-match-unit", type=int, help="granularity of hits in tokens; default: a block"
    )
    parser.add_argument("--speculative-config", help='JSON, e.g. {"method":"mtp","num_speculative_tokens":3}')
    parser.add_argument("--spec-tokens", type=int, help="short form: number of drafts")
    parser.add_argument("--spec-method", help="accepted; every method drafts as the calibration says")
    parser.add_argument("--num-gpu-blocks-override", type=int, help="default: the calibration's KV tokens")
    own = parser.add_argument_group("simulator")
    own.add_argument("--calibration", type=Path, default=CALIBRATION, help="TOML file: what steps cost")
    own.add_argument("--clock-scale", type=float, default=1.0, help="model seconds per wall second")
    own.add_argument("--seed", type=int, default=0, help="which drafts are accepted")
    own.add_argument(
        "--release", choices=("0.32", "0.33"), default="0.32", help="whose block rules under drafts"
    )
    own.add_argument("--faults", default="", help="kind=rate,… ; see docs/simulator.md")
    return parser


def _drafts(arguments: argparse.Namespace) -> tuple[int, bool]:
    """Number of drafts, and whether hits lose their last block to them."""
    text = arguments.speculative_config
    if text:
        try:
            config = msgspec.json.decode(text, type=_Speculative)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise OptionError(
                f"--speculative-config: {error}; it is JSON with num_speculative_tokens"
            ) from None
    elif arguments.spec_tokens is not None:
        config = _Speculative(arguments.spec_tokens)
    else:
        return 0, False
    if not 1 <= config.num_speculative_tokens <= 16:
        raise OptionError(
            f"num_speculative_tokens is {config.num_speculative_tokens}; give 1 to 16, "
            "or leave the flag out for no drafts"
        )
    return (
        config.num_speculative_tokens,
        arguments.release == "0.32" and not config.disable_eagle_block_drop,
    )


def engine_config(arguments: argparse.Namespace, calibration: Calibration) -> EngineConfig:
    """The scheduler's sizes. Raises OptionError for what vLLM would refuse to start with."""
    model = calibration.model
    drafts, drop = _drafts(arguments)
    block = arguments.block_size or ((model.block_size_drafts if drafts else None) or model.block_size)
    unit = arguments.prefix_match_unit or block
    max_model_len = arguments.max_model_len or model.max_model_len
    for flag, value in (
        ("--block-size", block),
        ("--prefix-match-unit", unit),
        ("--max-model-len", max_model_len),
        ("--max-num-batched-tokens", arguments.max_num_batched_tokens),
        ("--max-num-seqs", arguments.max_num_seqs),
    ):
        if value < 1:
            raise OptionError(f"{flag} is {value}; it must be at least 1")
    if block % unit:
        raise OptionError(f"--prefix-match-unit {unit} must divide the block size {block}")
    if arguments.enable_prefix_caching and model.state_groups and block > arguments.max_num_batched_tokens:
        raise OptionError(
            f"block size {block} is larger than --max-num-batched-tokens {arguments.max_num_batched_tokens}: "
            "a hybrid model with prefix caching needs whole blocks per step; raise the budget"
        )
    blocks = arguments.num_gpu_blocks_override or model.kv_cache_tokens // block
    needed = -(-max_model_len // block) + model.state_groups * (2 + drafts)
    # One block of the pool is the null block: a request that needs them all would wait for ever.
    if needed > blocks - 1:
        raise OptionError(
            f"one request of --max-model-len {max_model_len} needs {needed} KV blocks, the pool has "
            f"{blocks - 1} to give; lower --max-model-len"
        )
    if model.state_groups and arguments.max_num_seqs > blocks:
        raise OptionError(
            f"max_num_seqs ({arguments.max_num_seqs}) exceeds available Mamba cache blocks ({blocks}); "
            "lower --max-num-seqs"
        )
    return EngineConfig(
        max_model_len=max_model_len,
        max_batched_tokens=arguments.max_num_batched_tokens,
        max_seqs=arguments.max_num_seqs,
        block_size=block,
        blocks=blocks,
        caching=arguments.enable_prefix_caching,
        drafts=drafts,
        state_groups=model.state_groups,
        match_unit=unit,
        drop_unit=drop,
    )


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line; vLLM flags without effect here are named and ignored.

    Raises OptionError or CalibrationError.
    """
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        print(f"servers.sim: no effect here: {' '.join(unknown)}", file=sys.stderr)
    calibration = load(arguments.calibration)
    try:
        faults = Faults.parse(arguments.faults, arguments.seed)
    except ValueError as error:
        raise OptionError(f"--faults: {error}") from None
    if not SLOWEST <= arguments.clock_scale <= FASTEST:
        raise OptionError(f"--clock-scale is {arguments.clock_scale}; give {SLOWEST} to {FASTEST:g}")
    if not 0 <= arguments.port <= 65535:
        raise OptionError(f"--port is {arguments.port}; give 0 to 65535")
    return Options(
        host=arguments.host,
        port=arguments.port,
        model=arguments.served_model_name or calibration.model.name,
        calibration=calibration,
        engine=engine_config(arguments, calibration),
        blocks_override=arguments.num_gpu_blocks_override,
        clock_scale=arguments.clock_scale,
        seed=arguments.seed,
        release=arguments.release,
        faults=faults,
    )


__all__ = ["CalibrationError", "OptionError", "Options", "engine_config", "parse"]
