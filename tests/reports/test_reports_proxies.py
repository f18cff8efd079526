"""A proxy as an arm: what is not held against it, who served its requests, and what it cost."""

import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, flat, probe

from locustfiles.records import ArmRecord
from reports.certificate import certify
from reports.judge import Options, judge
from reports.page import to_html
from reports.proxies import counts_text, serving
from reports.read import read_run

replace = msgspec.structs.replace

DIRECT = [
    replace(CACHE, url="http://127.0.0.1:8101", metrics_urls=["http://127.0.0.1:8101/metrics"]),
    replace(MTP, url="http://127.0.0.1:8102", metrics_urls=["http://127.0.0.1:8102/metrics"]),
]
PROXY = ArmRecord(
    name="proxy",
    url="http://127.0.0.1:4000",
    metrics_urls=["http://127.0.0.1:8101/metrics", "http://127.0.0.1:8102/metrics"],
    probe=probe(True, 3, prefix_caching=None, speculative=None, tokenize=False, max_model_len=None),
)


def balanced(cell, row):
    """User 0 is served by cache, user 1 by mtp; no follow-up of mtp's hits."""
    if row.arm != "proxy":
        return row
    if row.user == 0:
        return replace(row, server_id="cache")
    return replace(row, server_id="mtp", cached_tokens=0)


def built(tmp_path, **changes):
    defaults = {
        "arms": [*DIRECT, PROXY],
        "change": balanced,
        "times": {"cache": flat(1.0, 0.02), "mtp": flat(2.0, 0.01), "proxy": flat(1.5, 0.02)},
    }
    return read_run(RunBuilder(tmp_path / "run", **{**defaults, **changes}).write())


def test_a_proxy_is_held_to_nothing_that_only_its_servers_have(tmp_path):
    run = built(tmp_path)
    found = {check.check: check for check in certify(run) if check.arm == "proxy"}
    assert [name for name, check in found.items() if check.failed] == []
    for name in ("declared features on, and only those", "follow-ups hit"):
        assert found[name].ok is None
        assert found[name].value.startswith("not checked: a pool of cache and mtp")
    assert found["arms alike"].ok is True
    page = to_html(judge(run, Options()))
    assert "a pool of cache and mtp" in page
    assert "is not what it claims to be" not in page


def test_who_served_and_what_the_detour_cost(tmp_path):
    run = built(tmp_path)
    lines = {line.server: line for line in serving(run)}
    assert set(lines) == {"cache", "mtp"}
    # 3 repeats of 2 sessions of 3 turns for each user.
    assert [line.requests for line in lines.values()] == [18, 18]
    assert lines["cache"].share == pytest.approx(0.5)
    assert (lines["cache"].ttft, lines["cache"].tpot) == pytest.approx((1.5, 1.0))
    assert (lines["mtp"].ttft, lines["mtp"].tpot) == pytest.approx((0.75, 2.0))
    # Turn 2: 8192 of 9216 tokens; turn 3: 9216 of 10240.
    assert lines["cache"].hit_rate == pytest.approx((8192 + 9216) / (9216 + 10240))
    assert lines["mtp"].hit_rate == 0
    assert counts_text(run) == ["proxy: served by cache 18, mtp 18"]


def test_over_servers_that_are_no_arms_there_is_nothing_to_compare_with(tmp_path):
    run = built(tmp_path, arms=[DIRECT[0], PROXY])
    lines = {line.server: line for line in serving(run)}
    assert lines["cache"].ttft == pytest.approx(1.5)
    assert (lines["mtp"].ttft, lines["mtp"].tpot) == (None, None)


def test_without_a_proxy_there_is_no_such_section(tmp_path):
    run = built(tmp_path, arms=DIRECT, change=lambda cell, row: row)
    assert serving(run) == []
    assert 'id="proxies"' not in to_html(judge(run, Options()))


def test_a_proxy_that_does_not_say_who_served_has_no_lines(tmp_path):
    run = built(tmp_path, change=lambda cell, row: row)
    assert serving(run) == []
