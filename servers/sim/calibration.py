"""What one machine and model cost: the step-time model and its TOML file.

All times are seconds of model time. The duration of one engine step is

    step_s + seq_s·n + context_s·(tokens of context read by the n decoding requests)
    + drafts·(draft.step_s + draft.seq_s·n)                     with speculative decoding
    + sum over prefill chunks of (chunk_s + token_s·t + pair_s·t·(first position + t/2))

where n is the number of decoding requests and t the number of tokens of a chunk. A request reaches the
scheduler ``request.fixed_s`` (with prefix caching ``+ request.caching_s``) after it arrived.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class CalibrationError(Exception):
    """A calibration file that cannot be used; the message names file, key and remedy."""


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """The served model as the scheduler sees it."""

    name: str
    max_model_len: int = 262_144
    #: Tokens per KV block; a hybrid model has coarse ones, and other ones with drafts.
    block_size: int = 16
    block_size_drafts: int | None = None
    #: Recurrent-state groups of a hybrid model: each running request holds this many blocks x (1 + drafts).
    state_groups: int = 0
    kv_cache_tokens: int = 1_000_000


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Latency of a request before the scheduler sees it."""

    fixed_s: float = 0.0
    caching_s: float = 0.0


class Prefill(msgspec.Struct, forbid_unknown_fields=True):
    """Cost of computing prompt tokens."""

    token_s: float
    pair_s: float = 0.0
    chunk_s: float = 0.0


class Decode(msgspec.Struct, forbid_unknown_fields=True):
    """Cost of one decode step."""

    step_s: float
    seq_s: float = 0.0
    context_s: float = 0.0


class Draft(msgspec.Struct, forbid_unknown_fields=True):
    """Speculative decoding: cost per draft token of a step, and chance that each position is accepted.

    ``acceptance[i]`` is the chance that draft i is accepted given that all before it were.
    """

    step_s: float = 0.0
    seq_s: float = 0.0
    acceptance: list[float] = []


class Calibration(msgspec.Struct, forbid_unknown_fields=True):
    """One machine and model."""

    model: Model
    prefill: Prefill
    decode: Decode
    request: Request = msgspec.field(default_factory=Request)
    draft: Draft = msgspec.field(default_factory=Draft)
    #: Where the numbers come from, for people.
    source: str = ""

    def check(self, origin: str) -> None:
        """Raise CalibrationError for numbers that no machine can have."""
        for section in ("request", "prefill", "decode", "draft"):
            part = getattr(self, section)
            for key in part.__struct_fields__:
                value = getattr(part, key)
                for number in value if isinstance(value, list) else [value]:
                    if not 0 <= number < 1e6:
                        raise CalibrationError(
                            f"{origin}: {section}.{key} is {number}; it must not be negative"
                        )
        if any(chance > 1 for chance in self.draft.acceptance):
            raise CalibrationError(f"{origin}: draft.acceptance holds chances, each between 0 and 1")
        if self.decode.step_s <= 0 or self.prefill.token_s <= 0:
            raise CalibrationError(f"{origin}: decode.step_s and prefill.token_s must be above 0")
        model = self.model
        if (
            min(model.block_size, model.block_size_drafts or 1, model.max_model_len, model.kv_cache_tokens)
            < 1
        ):
            raise CalibrationError(f"{origin}: sizes in [model] must be at least 1")


def load(path: Path) -> Calibration:
    """Read and check a calibration file. Raises CalibrationError with file, key and remedy."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror}); give --calibration FILE"
        ) from None
    try:
        calibration = msgspec.toml.decode(data, type=Calibration)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise CalibrationError(f"{path}: {error}; see servers/calibrations/ for an example") from None
    calibration.check(str(path))
    return calibration
