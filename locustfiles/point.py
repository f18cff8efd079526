"""Points: a workload's parameters, from the string that names them in cells, plans and reports."""

from __future__ import annotations

import msgspec

from locustfiles.records import parse_point


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one workload at one point; all sizes in tokens of the server's tokenizer.

    ``prompt`` is the first request's whole length, chat template included. A ``shared_prefix`` prompt is
    ``prefix`` + ``suffix``; in ``multi_turn`` each later turn's prompt is ``growth`` longer: the answer
    (``output``) and new user text.
    """

    text: str
    prompt: int
    output: int
    prefix: int = 0
    suffix: int = 0
    turns: int = 1
    growth: int = 0
    lockstep: bool = False
    rate: float = 0.0
    """Sessions that arrive per (model) second, whatever the server does; 0 = closed loop. The users are then
    the most sessions that can be under way at once."""
    poisson: bool = True
    """Arrivals with exponential gaps; else evenly spaced."""
    pause: float | None = None
    """Mean (model) seconds that a user reads and types before a follow-up; None = chosen for the run."""

    def prompt_tokens(self, turn: int) -> int:
        """Prompt length of a turn (from 1) when the answers have the length asked for."""
        return self.prompt + self.growth * (turn - 1)

    @property
    def session_tokens(self) -> tuple[int, int]:
        """(prompt, output) tokens of one session over all turns."""
        return sum(self.prompt_tokens(turn) for turn in range(1, self.turns + 1)), self.output * self.turns


#: workload -> (name of its size, the size of an ad-hoc run, other items with their defaults)
_GRAMMAR: dict[str, tuple[str, int, dict[str, int]]] = {
    "single_turn": ("prompt", 1024, {"output": 512}),
    "shared_prefix": ("prefix", 8192, {"suffix": 512, "output": 256}),
    "multi_turn": ("context", 8192, {"turns": 3, "growth": 1024, "output": 256}),
}

WORKLOADS: tuple[str, ...] = tuple(_GRAMMAR)


def default_point(workload: str) -> str:
    """The point of a run by hand that names none."""
    size, default, _ = _GRAMMAR[workload]
    return f"{size}={default}"


def read_point(workload: str, text: str) -> Point:
    """``("multi_turn", "context=8192,pace=lockstep")`` -> its parameters.

    Raises:
        ValueError: unknown workload or item, a size that is not a whole number above 0, or a growth that
            leaves no room for user text beside the answer.
    """
    if workload not in _GRAMMAR:
        raise ValueError(f"unknown workload {workload!r}: one of {', '.join(WORKLOADS)}")
    size_name, _, defaults = _GRAMMAR[workload]
    items = parse_point(text)
    pace = items.pop("pace", "independent")
    if pace not in ("independent", "lockstep"):
        raise ValueError(f"point {text!r}: pace is independent or lockstep, not {pace!r}")
    rate = _rate(text, items.pop("rate", ""))
    arrivals = items.pop("arrivals", "poisson")
    pause = _seconds(text, items.pop("pause", ""))
    if arrivals not in ("poisson", "constant"):
        raise ValueError(f"point {text!r}: arrivals is poisson or constant, not {arrivals!r}")
    if rate and pace == "lockstep":
        raise ValueError(f"point {text!r}: a rate leaves no room for lockstep")
    if size_name not in items:
        raise ValueError(f"point {text!r}: {workload} needs {size_name}=<tokens>")
    unknown = set(items) - {size_name, *defaults}
    if unknown:
        raise ValueError(
            f"point {text!r}: {workload} has no {', '.join(sorted(unknown))}; "
            f"it takes {', '.join([size_name, *defaults, 'pace', 'rate', 'arrivals', 'pause'])}"
        )
    values = dict(defaults)
    for name, value in items.items():
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"point {text!r}: {name} must be a whole number above 0, not {value!r}")
        values[name] = int(value)
    size = values.pop(size_name)
    if workload == "shared_prefix":
        values |= {"prefix": size, "prompt": size + values["suffix"]}
    else:
        values["prompt"] = size
    if workload == "multi_turn" and values["growth"] <= values["output"]:
        raise ValueError(
            f"point {text!r}: growth must exceed output, else no room is left for the user's text"
        )
    lockstep = pace == "lockstep"
    return Point(
        text=text, lockstep=lockstep, rate=rate, poisson=arrivals == "poisson", pause=pause, **values
    )


def _seconds(text: str, value: str) -> float | None:
    if not value:
        return None
    try:
        pause = float(value)
    except ValueError:
        pause = -1.0
    if not 0 <= pause < 1e6:
        raise ValueError(f"point {text!r}: pause is seconds, 0 or more, not {value!r}")
    return pause


def _rate(text: str, value: str) -> float:
    if not value:
        return 0.0
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise ValueError(f"point {text!r}: rate is sessions per second, a number above 0, not {value!r}")
    return rate
