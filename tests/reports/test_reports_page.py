import re
from html.parser import HTMLParser

import msgspec
import pytest
from run_builder import CACHE, MTP, RunBuilder, flat, probe

from reports.judge import Options, judge
from reports.page import environment, to_html
from reports.read import read_run

EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>'\"&$\\frac{{{x}}}--><b>"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def page(folder, **options):
    html = to_html(judge(read_run(folder), Options(**options)))
    return html, Page(html)


def levels():
    return [
        ("single_turn", "prompt=1024", 1),
        ("shared_prefix", "prefix=4096", 1),
        ("multi_turn", "context=8192", 2),
    ]


def test_verdict_first_then_why(tmp_path):
    folder = RunBuilder(tmp_path / "run", levels=levels(), times={"mtp": flat(5.0, 0.01)}).write()
    html, found = page(folder)
    marks = ("workload class", "Every primary metric", "A failed check withholds", "one row per attempt")
    order = [found.text.index(mark) for mark in marks]
    assert order == sorted(order)
    assert "multi-turn conversations: 8K context, 2 users cache 5.00×" in found.text
    assert "cache prefilled 1K tokens per follow-up, mtp 9K" in found.text
    assert html.count("<svg") == 6


def test_self_contained(tmp_path):
    html, found = page(RunBuilder(tmp_path / "run", levels=levels()).write())
    assert "script" not in found.tags
    assert "link" not in found.tags
    loads = [
        (t, n, v) for t, n, v in found.attributes if n in ("src", "href", "srcset", "xlink:href", "action")
    ]
    assert all(value.startswith("#") for _, _, value in loads), loads
    policy = [v for t, n, v in found.attributes if t == "meta" and "default-src 'none'" in v]
    assert len(policy) == 1
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html


def test_hostile_text_everywhere_stays_text(tmp_path):
    evil = msgspec.structs.replace(
        CACHE,
        url=EVIL,
        declared={"caching": EVIL, "drafts": EVIL, "device": EVIL},
        probe=probe(
            True, 0, model=EVIL, version=EVIL, dropped_fields=[EVIL], cache_config={"cache_dtype": EVIL}
        ),
    )

    def change(cell, row):
        if row.phase == "measure" and row.turn == 3:
            return msgspec.structs.replace(row, status="http_error", error=EVIL, finish_reason=EVIL)
        return msgspec.structs.replace(row, prompt_digest=EVIL + row.arm, server_id=EVIL)

    folder = RunBuilder(
        tmp_path / "run",
        arms=[evil, MTP],
        change=change,
        skip=lambda cell: cell.repeat == 3,
        samples=lambda cell: [(0.0, EVIL, EVIL, 1.0)],
        manifest_changes={
            "run": EVIL,
            "plan": EVIL,
            "profile": EVIL,
            "plan_toml": {EVIL: EVIL},
            "argv": [EVIL],
            "git_commit": EVIL,
            "host": {EVIL: EVIL},
            "versions": {EVIL: EVIL},
            "sampling": {EVIL: EVIL},
            "notes": [EVIL],
            "started_utc": EVIL,
        },
    ).write()
    html, found = page(folder)
    assert "<script" not in html
    assert "<img" not in html
    assert "onerror" not in [name for _, name, _ in found.attributes]
    assert set(found.tags).isdisjoint({"script", "img", "b", "iframe", "object"})
    assert found.text.count("alert(1)") >= 15  # all there, as text


def test_hostile_arm_and_point_names_reach_figures_as_text(tmp_path):
    evil = msgspec.structs.replace(MTP, name="<b>$x$")
    html, found = page(
        RunBuilder(
            tmp_path / "run",
            arms=[CACHE, evil],
            levels=[("multi_turn", "context=8192,pace=<script>$a_b$", 2)],
        ).write()
    )
    assert set(found.tags).isdisjoint({"script", "b"})
    assert html.count("<svg") >= 4
    assert "<b>$x$" in found.text


def test_simulated_is_on_every_section_and_figure(tmp_path):
    html, _ = page(RunBuilder(tmp_path / "run", levels=levels()).write())
    sections = html.count("<h2")
    assert html.count('<span class="sim simtag">SIMULATED</span>') == sections + 1
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        assert "SIMULATED" in svg
    assert '@top-right { content: "SIMULATED"' in html
    assert "(SIMULATED)</title>" in html


def test_real_runs_do_not_say_simulated(tmp_path):
    arms = [
        msgspec.structs.replace(arm, probe=msgspec.structs.replace(arm.probe, simulated=False))
        for arm in (CACHE, MTP)
    ]
    html, _ = page(RunBuilder(tmp_path / "run", arms=arms, manifest_changes={"simulated": False}).write())
    assert "SIMULATED" not in html


def test_an_arm_that_is_not_what_it_claims_cannot_be_missed(tmp_path):
    odd = msgspec.structs.replace(MTP, probe=probe(True, 3))
    html, found = page(RunBuilder(tmp_path / "run", arms=[CACHE, odd]).write())
    assert found.text.index("Arm mtp is not what it claims to be.") < found.text.index("workload class")
    assert html.count('class="badge bad">differs<') == 1


def test_failures_and_censored_rows_are_counted(tmp_path):
    def change(cell, row):
        if cell.arm == "mtp" and (cell.repeat, row.user, row.session, row.turn) == (1, 0, 1, 1):
            return msgspec.structs.replace(row, status="timeout", error="no answer in 1800 s")
        if row.session == 2 and row.user == 1 and row.turn == 3:
            return msgspec.structs.replace(row, phase="drain", status="censored")
        return row

    _, found = page(RunBuilder(tmp_path / "run", change=change).write())
    # 3 repeats x 2 users x 2 sessions x 3 turns = 36, of which 3 became drain rows.
    assert "2 users mtp 33 32 1 timeout 1 × no answer in 1800 s 18 3 3 0" in found.text


def test_incomplete_run_says_so(tmp_path):
    _, found = page(RunBuilder(tmp_path / "run", skip=lambda cell: cell.repeat == 2).write())
    assert "2 of 6 cells did not finish and are not judged" in found.text
    assert "multi_turn.context=8192.u2.r2.mtp did not finish: no done.json" in found.text


def test_slo_shows_goodput_and_capacity(tmp_path):
    folder = RunBuilder(tmp_path / "run", times={"mtp": flat(5.0)}).write()
    assert "goodput" not in page(folder)[1].text
    _, found = page(folder, slo={"ttft": 2.0})
    assert "goodput, turn 2 100 % 0 %" in found.text
    assert "none of the levels tried" in found.text


def test_published_numbers_are_overlaid_where_they_match(tmp_path):
    html, _ = page(
        RunBuilder(
            tmp_path / "run",
            levels=[
                ("single_turn", "prompt=1024", 1),
                ("shared_prefix", "prefix=4096,pace=lockstep", 1),
                ("shared_prefix", "prefix=8192", 1),
            ],
        ).write()
    )
    assert html.count("reference case's published numbers") + html.count("reference case&#39;s") == 2


def test_a_misspelt_name_in_a_template_is_an_error():
    with pytest.raises(Exception, match="undefined"):
        environment().from_string("{{ nope }}").render()


def test_ids_are_unique(tmp_path):
    _, found = page(RunBuilder(tmp_path / "run", levels=levels()).write())
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})[:5]
