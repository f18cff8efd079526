from __future__ import annotations

from pathlib import Path

import pytest

from locustfiles.arm_http import usable_name
from locustfiles.arms import Arm, ArmError, parse_arm
from locustfiles.fingerprint import declared_notes, difference_notes, server_arguments
from locustfiles.probe import choose_model, probe_arm, words
from locustfiles.records import ArmProbe, ArmRecord
from tests.locustfiles.sweep_standin import StandIn, serving


def arm_of(standin: StandIn, more: str = "") -> Arm:
    return parse_arm(f"a={standin.url}{more}")


def record(name: str, declared: dict[str, str], **probe: object) -> ArmRecord:
    return ArmRecord(name=name, url="http://h", declared=declared, probe=ArmProbe(**probe))  # type: ignore[arg-type]


def test_a_caching_arm_is_seen_as_one() -> None:
    with serving(StandIn(block=4096, config={"cache_dtype": "fp8"})) as standin:
        probe, notes = probe_arm(arm_of(standin))
    assert notes == []
    assert (probe.model, probe.version, probe.max_model_len) == ("m", "0.32.0", 100_000)
    assert probe.prefix_caching is True
    assert probe.block_size == 4096
    assert probe.cache_config["cache_dtype"] == "fp8"
    # 2.25 blocks and some: the second and third time two full blocks are hit
    assert probe.prefill_tokens is not None
    assert 2 * 4096 < probe.prefill_tokens < 3 * 4096
    assert probe.cached_tokens_probe == [0, 8192, 8192]
    assert probe.speculative is False
    assert probe.acceptance_length is None
    assert probe.cache_salt is True
    assert probe.tokenize is False
    assert probe.decode_tokens_per_second is not None
    assert probe.decode_tokens_per_second > 0


def test_a_speculating_arm_without_caching_is_seen_as_one() -> None:
    with serving(StandIn(caching=False, drafts=3)) as standin:
        probe, notes = probe_arm(arm_of(standin))
    assert notes == []
    assert probe.prefix_caching is False
    assert probe.cached_tokens_probe == [0, 0, 0]
    assert probe.speculative is True
    # the stand-in accepts all three drafts of every step
    assert probe.acceptance_length == 4.0


def test_without_usage_details_the_counters_tell() -> None:
    for caching in (True, False):
        with serving(StandIn(caching=caching, details=False)) as standin:
            probe, _ = probe_arm(arm_of(standin))
        assert probe.cached_tokens_probe == [None, None, None]
        assert probe.prefix_caching is caching


def test_without_details_and_metrics_nothing_is_claimed() -> None:
    with serving(StandIn(details=False, metrics=False, version=None)) as standin:
        probe, notes = probe_arm(arm_of(standin))
    assert probe.prefix_caching is None
    assert probe.speculative is None
    assert probe.block_size is None
    assert probe.version is None
    assert any("no /metrics" in note for note in notes)
    # block size unknown: long enough for the largest known one
    assert (probe.prefill_tokens or 0) > 2 * 1600


def test_prompts_stay_below_the_models_length_and_the_answer_is_then_open() -> None:
    with serving(StandIn(block=1568, max_model_len=2048, caching=False)) as standin:
        probe, notes = probe_arm(arm_of(standin))
    assert (probe.prefill_tokens or 0) <= 2048
    assert probe.prefix_caching is None
    assert any("could not be probed" in note for note in notes)


def test_durations_are_model_time() -> None:
    version = {"version": "0.32.0+sim", "simulated": True, "clock_scale": 10.0}
    with serving(StandIn(version=version, prefill_s=0.1)) as standin:
        probe, _ = probe_arm(arm_of(standin))
    assert probe.simulated
    assert probe.clock_scale == 10.0
    # at least 0.1 s of wall time is at least 1 s of model time
    assert (probe.prefill_seconds or 0) >= 1.0
    # a token takes at least 1 ms of wall time, 10 ms of model time
    assert 0 < (probe.decode_tokens_per_second or 0) <= 100


@pytest.mark.parametrize("kind", ["openai", "pydantic", "words"])
def test_refused_fields_are_found_and_dropped(kind: str) -> None:
    refused = frozenset({"ignore_eos", "chat_template_kwargs"})
    with serving(StandIn(refused=refused, refusal=kind)) as standin:
        probe, notes = probe_arm(arm_of(standin))
        last = standin.bodies[-1]
    assert set(probe.dropped_fields) == refused
    assert not refused & set(last)
    assert "temperature" in last
    assert probe.cache_salt is True
    assert len([note for note in notes if "refuses" in note]) == 2


def test_fields_named_beside_the_culprit_are_kept() -> None:
    with serving(StandIn(refused=frozenset({"stream_options"}), refusal="all")) as standin:
        probe, _ = probe_arm(arm_of(standin))
    assert probe.dropped_fields == ["stream_options"]


def test_fields_dropped_for_another_arm_are_not_sent() -> None:
    with serving(StandIn()) as standin:
        probe, _ = probe_arm(arm_of(standin), dropped=["cache_salt"])
        assert all("cache_salt" not in body for body in standin.bodies)
    assert probe.dropped_fields == []
    assert probe.cache_salt is False


def test_a_salt_that_does_not_separate_is_not_trusted() -> None:
    with serving(StandIn(salted=False)) as standin:
        probe, notes = probe_arm(arm_of(standin))
    assert probe.cache_salt is False
    assert any("nonce line" in note for note in notes)


def test_another_refusal_ends_with_the_servers_words() -> None:
    with (
        serving(StandIn(refused=frozenset({"messages"}))) as standin,
        pytest.raises(ArmError, match=r"arm a: a plain chat request was refused, HTTP 400: Unrecognized"),
    ):
        probe_arm(arm_of(standin))


def test_an_in_band_error_ends_with_the_servers_words() -> None:
    with (
        serving(StandIn(error="EngineDeadError\x1b[31m\nboom")) as standin,
        pytest.raises(ArmError, match=r"EngineDeadError\?\[31m boom"),
    ):
        probe_arm(arm_of(standin))


def test_keys_are_sent_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(StandIn(key="s3cret")) as standin:
        with pytest.raises(ArmError, match=r"HTTP 401; set FACEOFF_API_KEY_A or FACEOFF_API_KEY"):
            probe_arm(arm_of(standin))
        monkeypatch.setenv("FACEOFF_API_KEY_A", "s3cret")
        probe, _ = probe_arm(arm_of(standin))
    assert probe.prefix_caching is True


def test_an_arm_that_is_not_there_or_ill() -> None:
    with serving(StandIn()) as standin:
        gone = arm_of(standin)
    with pytest.raises(ArmError, match=r"arm a: cannot reach .*/health \(connection refused\)"):
        probe_arm(gone)
    with (
        serving(StandIn(health=503)) as standin,
        pytest.raises(ArmError, match=r"arm a: not healthy .* HTTP 503"),
    ):
        probe_arm(arm_of(standin))


def test_a_proxy_is_never_asked_for_its_health() -> None:
    with serving(StandIn()) as backend, serving(StandIn(metrics=False)) as proxy:
        probe, _ = probe_arm(arm_of(proxy, f";metrics={backend.url}"))
        assert "/health" not in proxy.paths
        assert "/metrics" not in proxy.paths
        assert "/metrics" in backend.paths
    assert probe.speculative is False


def test_backends_that_differ_are_told() -> None:
    with serving(StandIn()) as one, serving(StandIn(drafts=2)) as two, serving(StandIn()) as proxy:
        probe, notes = probe_arm(arm_of(proxy, f";metrics={one.url},{two.url}"))
    assert probe.speculative is None
    assert any("backends differ" in note for note in notes)


def test_choosing_a_model() -> None:
    assert choose_model("a", ["m"], None) == "m"
    assert choose_model("a", ["m", "n"], "n") == "n"
    with pytest.raises(ArmError, match=r"lists 2 models \(m, n\): set MODEL"):
        choose_model("a", ["m", "n"], None)
    with pytest.raises(ArmError, match=r"no model 'x'; it lists m: set MODEL"):
        choose_model("a", ["m"], "x")
    with pytest.raises(ArmError, match=r"lists 0 models \(none\)"):
        choose_model("a", [], None)


def test_probe_texts_are_new_every_time() -> None:
    assert words(50) != words(50)
    assert len(words(50).split()) == 50


def test_declared_and_observed() -> None:
    lied = record("mtp", {"caching": "off", "drafts": "3"}, prefix_caching=True, speculative=True)
    (note,) = declared_notes(lied)
    assert note.startswith("ARM mtp IS NOT WHAT IT SAYS: declared prefix caching off, observed on")
    no_drafts = record("mtp", {"drafts": "3"}, speculative=False)
    assert "declared 3 draft tokens, observed no speculative decoding" in declared_notes(no_drafts)[0]
    drafts = record("cache", {"drafts": "0"}, speculative=True)
    assert "declared no drafts, observed speculative decoding on" in declared_notes(drafts)[0]
    unknown = record("x", {"caching": "on"}, prefix_caching=None)
    assert "could not tell whether prefix caching is on" in declared_notes(unknown)[0]
    assert declared_notes(record("x", {}, prefix_caching=True, speculative=True)) == []
    named = record("mtp", {}, prefix_caching=True, speculative=True)
    (note,) = declared_notes(named)
    assert note.startswith("ARM mtp IS NOT WHAT IT SAYS: its name says prefix caching off, observed on")
    named = record("plain", {}, prefix_caching=None, speculative=True)
    assert "its name says no drafts, observed speculative decoding on" in declared_notes(named)[0]
    assert "could not tell whether prefix caching is on (as its name says)" in declared_notes(named)[1]
    fewer = record(
        "mtp", {"caching": "off", "drafts": "3"}, prefix_caching=False, speculative=True, drafts=1.0
    )
    (note,) = declared_notes(fewer)
    assert note == "ARM mtp IS NOT WHAT IT SAYS: declared 3 draft tokens, observed 1.0 a step"
    honest = record("both", {"caching": "on", "drafts": "3"}, prefix_caching=True, speculative=True)
    assert declared_notes(honest) == []


def test_differences_beyond_the_declared_factors() -> None:
    one = record(
        "cache",
        {"caching": "on", "drafts": "0"},
        model="m",
        version="0.32.0",
        cache_config={"enable_prefix_caching": "True", "block_size": "1568", "cache_dtype": "fp8"},
    )
    two = record(
        "mtp",
        {"caching": "off", "drafts": "3"},
        model="m",
        version="0.32.0",
        cache_config={"enable_prefix_caching": "False", "block_size": "1600", "cache_dtype": "fp8"},
    )
    assert difference_notes([one, two]) == []
    two.probe.version = "0.33.0"
    two.probe.cache_config["cache_dtype"] = "auto"
    (note,) = difference_notes([one, two])
    assert note == (
        "arms cache / mtp differ beyond what is declared: version 0.32.0 / 0.33.0; cache_dtype fp8 / auto"
    )
    two.probe.version, two.probe.cache_config["cache_dtype"] = "0.32.0", "fp8"
    one.probe.root, two.probe.root = "/models/a", "/models/b"
    assert "differ beyond what is declared: root /models/a / /models/b" in difference_notes([one, two])[0]
    undeclared = [record(arm.name, {}, cache_config=arm.probe.cache_config) for arm in (one, two)]
    (note,) = difference_notes(undeclared)
    assert "enable_prefix_caching True / False" in note


ARGUMENTS = (
    "(APIServer pid=12) INFO 12-01 00:28:17 [api_utils.py:286] non-default args: {'host': '127.0.0.1', "
    "'port': 8203, 'api_key': ['sk-secret'], 'hf_token': 'hf_x', 'max_num_batched_tokens': 2048, "
    "'enable_prefix_caching': False, 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}\n"
)


def test_arguments_come_from_the_log_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "arm.log"
    log.write_text("starting\n" + ARGUMENTS + "(EngineCore pid=3) INFO ready\n")
    assert server_arguments(log) == {
        "host": "127.0.0.1",
        "port": "8203",
        "api_key": "(left out)",
        "hf_token": "(left out)",
        "max_num_batched_tokens": "2048",
        "enable_prefix_caching": "False",
        "speculative_config": "{'method': 'mtp', 'num_speculative_tokens': 3}",
    }
    log.write_text("non-default args: {'loader': <object at 0x7f>, 'port': 8, 'mode': Mode.FAST}\nmore\n")
    assert server_arguments(log) == {"loader": "(object)", "port": "8", "mode": "(object)"}
    for odd in ("{1, 2}", "{[1]: 2}", "{'a'", "{" + "[" * 9000 + "}", "{**{}}"):
        log.write_text(f"non-default args: {odd}\n")
        assert set(server_arguments(log).values()) <= {"2", "{}"}
    assert server_arguments(tmp_path) == {}
    assert server_arguments(tmp_path / "none.log") == {}
    assert server_arguments(None) == {}


@pytest.mark.parametrize(
    "argument",
    [
        "'API_KEY': 'topsecret'",
        "'api-keys': ['topsecret']",
        "'token': 'topsecret'",
        "'auth_token': 'topsecret'",
        "'loader': {'extra': [{'secret_key': 'topsecret'}]}",
        "'headers': {'X': 'topsecret'}",
        "'extra': {'Authorization': 'Bearer topsecret'}",
        "'note': 'Bearer topsecret'",
        "'endpoint': 'https://user:topsecret@host/path'",
        "'speculative_config': {'method': 'mtp', 'hf_token': 'topsecret'}",
        "'plain': 'sk-topsecret'",
    ],
)
def test_no_secret_of_an_arguments_line_is_kept(tmp_path: Path, argument: str) -> None:
    log = tmp_path / "arm.log"
    log.write_text(f"non-default args: {{'port': 8203, {argument}, 'max_num_batched_tokens': 2048}}\n")
    found = server_arguments(log)
    assert "topsecret" not in str(found)
    assert (found["port"], found["max_num_batched_tokens"]) == ("8203", "2048")


def test_arguments_that_differ_beyond_the_declared_factors() -> None:
    shared = {"max_num_seqs": "64", "max_num_batched_tokens": "8192"}
    cache = {**shared, "port": "8001", "enable_prefix_caching": "True"}
    mtp = {
        **shared,
        "port": "8002",
        "enable_prefix_caching": "False",
        "speculative_config": "{'method': 'mtp'}",
    }
    one = record("cache", {"caching": "on", "drafts": "0"}, server_args=cache)
    two = record("mtp", {"caching": "off", "drafts": "3"}, server_args=mtp)
    assert difference_notes([one, two]) == []
    two.probe.server_args["max_num_batched_tokens"] = "2048"
    del two.probe.server_args["max_num_seqs"]
    (note,) = difference_notes([one, two])
    assert note.endswith("declared: max_num_batched_tokens 8192 / 2048; max_num_seqs 64 / default")
    # The log of the other is not known: nothing is said of its arguments.
    two.probe.server_args = {}
    assert difference_notes([one, two]) == []


@pytest.mark.parametrize(("name", "good"), [("m", True), ("a/b-7B", True), ("", False), ("x" * 301, False)])
def test_names_that_can_be_used(name: str, good: bool) -> None:
    assert usable_name(name) is good
    for odd in (f"{name}\ud800", f"{name}\x1b[31m", None, 7):
        assert not usable_name(odd)


def test_a_block_size_that_cannot_be_is_unknown() -> None:
    with serving(StandIn(config={"block_size": "9" * 20})) as server:
        probe, _ = probe_arm(parse_arm(f"a={server.url}"))
    assert probe.block_size is None
