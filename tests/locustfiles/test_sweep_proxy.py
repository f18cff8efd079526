"""A proxy among the arms: what the sweep asks of the servers behind it, and what happens when one dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from locustfiles import sweep
from locustfiles.arms import parse_arm
from locustfiles.probe import probe_arm
from locustfiles.records import Manifest, read_json
from tests.locustfiles.sweep_standin import StandIn, fake_command, fake_tables, serving

PLAN = """
repeats = 2
users = [1]
sessions = 1
[[workloads]]
workload = "single_turn"
points = ["prompt=64,output=8"]
"""


def run(arms: str, *argv: str, mode: str = "ok") -> int:
    given = ["--plan", "plan.toml", "--arms", arms, "--out", "run", *argv]
    return sweep.main(given, command=fake_command(mode), measure=fake_tables)


def simulator(**more: object) -> StandIn:
    version = {"version": "0.32.0+sim", "simulated": True, "clock_scale": 10.0}
    return StandIn(version=version, **more)  # type: ignore[arg-type]


def proxy() -> StandIn:
    return StandIn(version=None, metrics=False, details=False)


def specs(one: StandIn, two: StandIn, front: StandIn) -> str:
    return f"cache={one.url};caching=on mtp={two.url};drafts=3 proxy={front.url};metrics={one.url},{two.url}"


def test_a_pool_has_the_version_that_its_servers_agree_in_and_no_caching_of_its_own() -> None:
    with serving(simulator()) as one, serving(simulator()) as two, serving(proxy()) as front:
        two.version = {"version": "0.33.0+sim", "simulated": True, "clock_scale": 10.0}
        arm = parse_arm(f"proxy={front.url};metrics={one.url},{two.url}")
        probe, _ = probe_arm(arm)
    assert (probe.version, probe.simulated, probe.clock_scale) == (None, True, 10.0)
    assert probe.prefix_caching is None


def test_with_a_real_proxy_simulated_servers_run_in_real_time(place: Path) -> None:
    with serving(simulator()) as one, serving(simulator(drafts=3)) as two, serving(proxy()) as front:
        assert run(specs(one, two, front)) == 0
        manifest = read_json(Path("run/manifest.json"), Manifest)
        assert {cell.clock_scale for cell in manifest.cells} == {1.0}
        assert any("wall time" in note for note in manifest.notes)
        assert not any("differ beyond" in note for note in manifest.notes)
        assert manifest.arms[2].is_proxy
        assert not manifest.arms[0].is_proxy
        # Two cells of its own, two through the proxy.
        assert one.scales == two.scales == [1.0] * 4
        assert front.scales == []


def test_another_scale_is_what_the_user_says(place: Path) -> None:
    with serving(simulator()) as one, serving(simulator()) as two, serving(proxy()) as front:
        assert run(specs(one, two, front), "--clock-scale", "5") == 0
    assert {cell.clock_scale for cell in read_json(Path("run/manifest.json"), Manifest).cells} == {5.0}


class Dying(StandIn):
    """Healthy until the cells begin, and again after ``revived`` exists."""

    looks = 0
    revived = Path("revived")

    def ill(self) -> int:
        self.looks += 1
        return 200 if self.looks == 1 or self.revived.exists() else 503


def test_a_server_that_died_behind_the_proxy_is_started_anew_by_its_own_launcher(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FACEOFF_RESTART", "sh -c 'echo $0 > revived'")
    monkeypatch.setenv("FACEOFF_RESTART_PROXY", "sh -c 'echo $0 > wrong'")
    with serving(StandIn()) as one, serving(Dying()) as two, serving(proxy()) as front:
        # The proxy's cell comes first, and finds what is behind it dead.
        arms = f"proxy={front.url};metrics={one.url},{two.url} cache={one.url} mtp={two.url}"
        assert run(arms) == 0
    assert Path("revived").read_text().split() == ["mtp"]
    assert not Path("wrong").exists()
    assert "starting arm mtp anew" in capsys.readouterr().err


def test_a_proxy_over_a_dead_server_is_not_loaded(place: Path) -> None:
    with serving(StandIn()) as one, serving(Dying()) as two, serving(proxy()) as front:
        assert run(specs(one, two, front)) == 1
    notes = read_json(Path("run/manifest.json"), Manifest).notes
    skipped = [note for note in notes if ".proxy skipped" in note]
    assert len(skipped) == 2
    assert "behind proxy: arm mtp is gone" in skipped[0]
    assert not [note for note in notes if ".cache skipped" in note]
