"""The rules of the house: who may import whom, names that break Locust's import path, sizes."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("servers", "locustfiles", "reports")


def modules(room):
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Absolute names of the project's modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.split(".")[0] in ROOMS}


@pytest.mark.parametrize(
    "path", [p for room in ROOMS for p in modules(room)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_data_flows_down_and_never_back(path):
    room = path.relative_to(ROOT).parts[0]
    others = {name for name in imports(path) if name.split(".")[0] != room}
    if room == "reports":
        others = {n for n in others if n != "locustfiles" and not n.startswith("locustfiles.records")}
    assert not others


def test_no_locustfile_shadows_the_standard_library():
    names = {path.stem for path in (ROOT / "locustfiles").glob("*.py")} - {"__init__"}
    assert not names & sys.stdlib_module_names


def test_scenarios_read_like_scenarios():
    for name in ("single_turn", "shared_prefix", "multi_turn"):
        assert len((ROOT / "locustfiles" / f"{name}.py").read_text().splitlines()) < 80


@pytest.mark.parametrize(
    "path", [p for room in ROOMS for p in modules(room)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 420
