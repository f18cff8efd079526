"""Calibrations: files, the shipped one against its targets, and fitting points whose truth is known."""

import re

import pytest

from servers.sim import corner, fit
from servers.sim.calibration import CalibrationError, load
from servers.sim.options import CALIBRATION
from servers.sim.replay import Load, replay
from servers.sim.search import pattern_search
from servers.sim.targets import (
    CONCURRENT,
    FLAGS,
    Results,
    article_targets,
    configuration,
    shared_load,
    turns_load,
)


def test_the_shipped_calibration_meets_the_reference_case_within_its_tolerances():
    results = Results(load(CALIBRATION))
    for target in article_targets():
        if target.fitted:
            value = target.simulate(results)
            off = value / min(max(value, target.low), target.high) - 1
            limit = 0.40 if target.tolerance == CONCURRENT else 0.10
            assert abs(off) <= limit, f"{target.name}: {value:.3g}, {off:+.0%}"
    (hits,) = [t.simulate(results) for t in article_targets() if "hit rate" in t.name]
    assert 0.60 <= hits <= 0.70


def test_winners_and_order_are_as_published():
    calibration = load(CALIBRATION)
    results = Results(calibration)

    def ttft(server, given, turn=None):
        return results.get(FLAGS[server], given).ttft_p50(turn)

    assert ttft("mtp", shared_load(4096, 1)) < ttft("cache", shared_load(4096, 1))
    for prefix, users in ((4096, 32), (16384, 1), (16384, 16)):
        assert ttft("cache", shared_load(prefix, users)) < ttft("mtp", shared_load(prefix, users))
    ratio = {
        (context, users): ttft("mtp", turns_load(context, users), 2)
        / ttft("cache", turns_load(context, users), 2)
        for context in (8192, 32768, 65536)
        for users in (4, 8)
    }
    assert all(value > 1 for value in ratio.values())
    assert 10 <= ratio[65536, 4] <= 25
    # The wall: the larger the context, the larger the advantage.
    assert ratio[8192, 8] < ratio[32768, 8] < ratio[65536, 8]


def test_drafts_and_caching_together_keep_both_effects():
    calibration = load(CALIBRATION)
    given = turns_load(32768, 4)
    ttft = {
        name: replay(configuration(flags, calibration), calibration, given).ttft_p50(2)
        for name, flags in FLAGS.items()
    }
    assert ttft["both"] < ttft["mtp"] / 2
    assert ttft["cache"] < ttft["plain"] / 2
    alone = Load(users=1, prompt=1024, output=512)
    rate = {
        name: replay(configuration(flags, calibration), calibration, alone).decode_rate()
        for name, flags in FLAGS.items()
    }
    assert rate["both"] == pytest.approx(rate["mtp"], rel=0.01)
    assert rate["cache"] == pytest.approx(rate["plain"], rel=0.01)


def test_pattern_search_finds_a_minimum_off_the_grid():
    point, cost = pattern_search(
        lambda p: (p[0] - 1.234) ** 2 + (p[1] + 0.5) ** 2, [0.0, 0.0], smallest=0.001
    )
    assert point == pytest.approx([1.234, -0.5], abs=0.002)
    assert cost < 10


POINTS = """
source = "a server whose truth is known"
acceptance = [0.8, 0.6]
[model]
name = "mine"
max_model_len = 32768
kv_cache_tokens = 200000
"""


def test_points_of_a_known_server_give_its_constants_back(tmp_path, capsys):
    truth = load(CALIBRATION)
    truth.model = type(truth.model)("mine", max_model_len=32768, kv_cache_tokens=200_000)
    truth.request.fixed_s, truth.prefill.token_s, truth.decode.step_s = 0.1, 5e-4, 0.04
    truth.draft.acceptance = [0.8, 0.6]
    text = POINTS
    for users, prompt, drafts in ((1, 256, 0), (1, 4096, 0), (1, 1024, 2)):
        flags = ["--no-enable-prefix-caching", *(["--spec-tokens", str(drafts)] if drafts else [])]
        found = replay(configuration(flags, truth), truth, Load(users=users, prompt=prompt, output=64))
        text += f"""
        [[points]]
        users = {users}
        prompt = {prompt}
        output = 64
        drafts = {drafts}
        ttft_s = {found.ttft_p50():.6f}
        tpot_s = {1 / found.decode_rate():.6f}
        """
    (tmp_path / "points.toml").write_text(text)
    output = tmp_path / "mine.toml"
    command = ["points", str(tmp_path / "points.toml"), "--write", str(output), "--precision", "0.05"]
    assert fit.main(command) == 0
    assert "| TTFT, 1 users, 4096 in, 64 out |" in capsys.readouterr().out
    mine = load(output)
    assert mine.model.name == "mine"
    # What the points did not measure cannot be told apart; what they did is met.
    for users, prompt, drafts in ((1, 2048, 0), (1, 512, 2)):
        flags = ["--no-enable-prefix-caching", *(["--spec-tokens", str(drafts)] if drafts else [])]
        given = Load(users=users, prompt=prompt, output=64)
        one, other = (replay(configuration(flags, c), c, given) for c in (truth, mine))
        assert other.ttft_p50() == pytest.approx(one.ttft_p50(), rel=0.15)
        assert other.decode_rate() == pytest.approx(one.decode_rate(), rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `points`"),
        ("points = []", r"no \[\[points\]\]"),
        ("[[points]]\nusers=1\nprompt=10\noutput=5", "point 1 gives neither"),
        ("[[points]]\nusers=1\nprompt=10\noutput=1\nttft_s=1.0", "output at least 2"),
        ("[[points]]\nusers=1\nprompt=10\noutput=5\nttft_s=1.0\ndrafts=3", "give acceptance"),
        ("[[points]]\nuser=1", "user"),
        ("not toml", "points.toml"),
    ],
)
def test_points_that_cannot_be_used_are_named(tmp_path, capsys, text, words):
    path = tmp_path / "points.toml"
    path.write_text(text)
    assert fit.main(["points", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[decode]\nstep_s = 0.0", "[decode]\nstep_s = 0.0 #"), "must be above 0"),
        (("token_s = ", "token_s = -"), "must not be negative"),
        (("acceptance = [", "acceptance = [7, "), "between 0 and 1"),
        (("[decode]", "[decode]\nspeed = 3"), "speed"),
        (("[model]", "[model"), "h.toml"),
    ],
)
def test_calibrations_that_cannot_be_are_refused(tmp_path, change, words):
    text = CALIBRATION.read_text()
    assert change[0] in text
    path = tmp_path / "h.toml"
    path.write_text(text.replace(*change, 1))
    with pytest.raises(CalibrationError, match=words):
        load(path)


def test_a_written_calibration_reads_back_the_same(tmp_path):
    path = tmp_path / "copy.toml"
    path.write_text(fit.to_toml(load(CALIBRATION)))
    assert load(path) == load(CALIBRATION)


def test_the_page_shows_what_its_commands_print(capsys):
    page = (CALIBRATION.parents[2] / "docs" / "simulator.md").read_text()
    assert fit.main(["table"]) == 0
    assert corner.main([]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert line in page
