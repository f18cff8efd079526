"""Stands in for `vllm serve`: parses the command line with vLLM's own parser and says what it found.

Called by servers/check.sh with the Python of a vLLM; needs neither a GPU nor the model. Each line that counts
starts with `check: `. Exit code 1 when vLLM would refuse a flag.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import sys
from typing import Any, get_args

PLACES = (  # newest first; vLLM moves these about
    ("vllm.entrypoints.launchers.cli_args", "vllm.utils.argparse_utils"),
    ("vllm.entrypoints.openai.cli_args", "vllm.utils.argparse_utils"),
    ("vllm.entrypoints.openai.cli_args", "vllm.utils"),
)


def find_parser() -> tuple[Any, Any]:
    """The serve parser of the vLLM that is installed, and its validator. Raises ImportError without one."""
    for cli_args, argparse_utils in PLACES:
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(cli_args)
            parser_class = importlib.import_module(argparse_utils).FlexibleArgumentParser
            return module.make_arg_parser(parser_class(prog="vllm serve")), module.validate_parsed_serve_args
    raise ImportError("this vLLM keeps its argument parser in none of the known places")


def speculation_problems(config: dict[str, Any]) -> list[str]:
    """What vLLM would not understand in --speculative-config; it is parsed as JSON and read only later."""
    from vllm.config import SpeculativeConfig  # type: ignore[import-not-found,unused-ignore]
    from vllm.config import speculative as module

    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    problems = [f"--speculative-config: unknown key {key!r}" for key in sorted(config.keys() - known)]
    methods = literals(getattr(module, "SpeculativeMethod", None))
    method = config.get("method")
    if methods and method is not None and method not in methods:
        problems.append(f"--speculative-config: unknown method {method!r}")
    return problems


def literals(kind: Any) -> set[str]:
    """All strings of a Literal, or of a union of them."""
    found: set[str] = set()
    for part in get_args(kind):
        found |= {part} if isinstance(part, str) else literals(part)
    return found


def check(arguments: list[str]) -> list[str]:
    """What vLLM would refuse in this command line; empty when nothing."""
    parser, validate = find_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(arguments)
            validate(parsed)
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if "error:" in line]
        return [line.partition("error:")[2].strip() for line in lines] or ["refused by vLLM's parser"]
    except (TypeError, ValueError) as problem:
        return [str(problem)]
    config = parsed.speculative_config
    return speculation_problems(config) if isinstance(config, dict) else []


def main() -> None:
    """Checks the command line that a launch.sh would run."""
    import vllm  # type: ignore[import-not-found,unused-ignore]

    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    problems = check(arguments)
    for problem in problems:
        print(f"check: vLLM {vllm.__version__} refuses: {problem}")
    if not problems:
        flags = sum(argument.startswith("-") for argument in arguments)
        print(f"check: {flags} flags, all known to vLLM {vllm.__version__}")
    sys.stdout.flush()
    # Importing vLLM starts threads that may take their time to end.
    os._exit(1 if problems else 0)


if __name__ == "__main__":
    main()
