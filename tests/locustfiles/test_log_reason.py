"""The line of a log that is quoted as the reason of a death, on logs as vLLM writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from locustfiles.log_reason import log_reason

FRONT = "(APIServer pid=12) ERROR 11-30 22:21:54 [async_llm.py:906] "
ENGINE = "(EngineCore pid=34) ERROR 11-30 22:21:54 [core.py:1001] "
POINTED = f"""{FRONT}Traceback (most recent call last):
{FRONT}  File "/v/vllm/v1/engine/async_llm.py", line 849, in output_handler
{FRONT}    raise self._format_exception(outputs) from None
{FRONT}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) \
for the root cause.
"""
RAISED = f"""{ENGINE}EngineCore encountered a fatal error.
{ENGINE}Traceback (most recent call last):
{ENGINE}  File "/v/vllm/v1/engine/core.py", line 990, in run_engine_core
{ENGINE}    raise ValueError("error in a source line")
{ENGINE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
GONE = (
    "(APIServer pid=12) WARNING 11-30 22:21:54 [core_client.py:817] MPClient: engine core exited unexpectedly"
)
STALE = "(APIServer pid=12) ERROR 11-30 20:00:00 [serving.py:1] ValueError: a request that nobody can serve\n"
QUIET = "(APIServer pid=12) INFO 11-30 22:00:00 [loggers.py:1] Avg prompt throughput: 1 tokens/s\n"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        # The engine's own exception, not what the front end says of it, however often.
        (RAISED + POINTED * 50, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (RAISED + GONE + "\n" + POINTED, "torch.OutOfMemoryError: CUDA out of memory."),
        # Killed from outside: the notice is all there is, and an exception of long ago is not its cause.
        (QUIET + GONE + "\n" + POINTED, "MPClient: engine core exited unexpectedly"),
        (STALE + QUIET * 300 + GONE + "\n" + POINTED, "MPClient: engine core exited unexpectedly"),
        ("\x1b[31mValueError: red\x1b[0m\nerror in passing\n", "ValueError: red"),
        ("loading\nValueError: no such model\n", "ValueError: no such model"),
        ("vllm: error: unrecognized arguments: --nope\n", "vllm: error: unrecognized arguments: --nope"),
        ("bash: line 1: 7 Killed                  python server.py\nbye\n", "bash: line 1: 7 Killed"),
        (FRONT + "AsyncLLM output_handler failed.\n" + POINTED, "vllm.v1.engine.exceptions.EngineDeadError"),
        ("one\n\n  two  \n", "two"),
        ("", ""),
    ],
)
def test_the_reason_is_the_cause_not_what_points_to_it(tmp_path: Path, log: str, reason: str) -> None:
    path = tmp_path / "arm.log"
    path.write_text(log, encoding="utf-8")
    found = log_reason(path)
    assert found.startswith(reason) if reason else found == ""
    assert "\n" not in found


def test_the_cause_is_found_before_many_tracebacks(tmp_path: Path) -> None:
    """Every broken stream writes a traceback of some kilobytes after the engine's own."""
    path = tmp_path / "arm.log"
    path.write_text(RAISED + POINTED * 1000, encoding="utf-8")
    assert path.stat().st_size > 300_000
    assert log_reason(path).startswith("torch.OutOfMemoryError")


def test_no_log_no_reason(tmp_path: Path) -> None:
    assert log_reason(tmp_path / "none.log") == ""
