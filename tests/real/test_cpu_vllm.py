"""Real vLLM on the CPU, brought up by the launchers: the 2×2 of prefix caching and speculative decoding."""

from __future__ import annotations

import random
import shutil
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from servers.tiny_words import STEMS
from tests.real.conftest import ROOT, Arm, launcher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128  # vLLM's on a CPU


def some_text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(STEMS, k=words))


def fresh_salt() -> str:
    return uuid.uuid4().hex


def own_copy(folder: Path) -> Path:
    """The cpu profile as a user's own folder, its arm plain on a free port."""
    profile = folder / "mine"
    shutil.copytree(ROOT / "servers/profiles/cpu", profile)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = (profile / "plain.env").read_text()
    (profile / "plain.env").write_text(text.replace("PORT=8201", f"PORT={port}"))
    return profile


def test_every_flag_of_the_gpu_profile_is_known_to_vllm() -> None:
    launcher("setup_cpu.sh")
    checked = launcher("check.sh", "h100")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [line.split(":")[0] for line in checked.stdout.splitlines()] == ["both", "cache", "mtp", "plain"]


def test_a_flag_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "servers/profiles/h100", tmp_path / "older")
    path = tmp_path / "older" / "cache.env"
    path.write_text(path.read_text().replace("--enable-prefix-caching", "--enable-prefix-cashing"))
    checked = launcher("check.sh", str(tmp_path / "older"), "cache")
    assert checked.returncode == 1
    assert "refuses: unrecognized arguments: --enable-prefix-cashing" in checked.stdout


def test_arms_are_what_their_files_declare(arms: dict[str, Arm]) -> None:
    for name, arm in arms.items():
        drafting = arm.metric("vllm:spec_decode_num_drafts_total") is not None
        assert drafting == (name in ("mtp", "both")), name
        salt = fresh_salt()
        prompt = [{"role": "user", "content": some_text(500, seed=5)}]
        assert arm.chat(prompt, 4, salt).cached == 0, "a fresh salt must be cold"
        again = arm.chat(prompt, 4, salt).cached
        assert (again > 0) == (name in ("cache", "both")), name


def test_acceptance_is_as_designed(arms: dict[str, Arm], design: dict[str, Any]) -> None:
    for name in ("mtp", "both"):
        arm = arms[name]
        drafts, accepted = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
        before = (arm.metric(drafts) or 0, arm.metric(accepted) or 0)
        answer = arm.chat([{"role": "user", "content": some_text(300, seed=1)}], 512, fresh_salt())
        steps = (arm.metric(drafts) or 0) - before[0]
        length = 1 + ((arm.metric(accepted) or 0) - before[1]) / steps
        assert length == pytest.approx(design["acceptance"]["3"]["mean_length"], rel=0.1)
        assert answer.chunks < 300, "a chunk holds all tokens of a step"


def test_follow_ups_hit_the_cache_where_there_is_one(arms: dict[str, Arm]) -> None:
    for name, arm in arms.items():
        salt = fresh_salt()
        chat = [{"role": "user", "content": some_text(2000, seed=2)}]
        first = arm.chat(chat, 100, salt)
        chat += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": some_text(100, seed=3)},
        ]
        second = arm.chat(chat, 8, salt)
        if name in ("plain", "mtp"):
            assert second.cached == 0
            continue
        # The answer's last token was never fed back, so it is not cached; only full blocks count, and
        # speculation gives up one of them.
        known = first.usage["prompt_tokens"] + 99
        blocks = known // BLOCK - (1 if name == "both" else 0)
        assert second.cached == blocks * BLOCK, name


def test_all_arms_answer_alike(arms: dict[str, Arm]) -> None:
    prompt = [{"role": "user", "content": some_text(200, seed=4)}]
    answers = {name: arm.chat(prompt, 200, fresh_salt()) for name, arm in arms.items()}
    assert len({answer.text for answer in answers.values()}) == 1
    for answer in answers.values():
        assert answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == 200


def test_the_server_counts_tokens_as_it_bills_them(arms: dict[str, Arm]) -> None:
    arm = arms["plain"]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zürich, 8° — why? 🙂"}]
    answer = arm.chat(prompt, 64, fresh_salt())
    assert arm.count(messages=prompt, add_generation_prompt=True) == answer.usage["prompt_tokens"]
    assert arm.count(prompt=answer.text) == 64, "an answer must come back as the same tokens"


def test_speculation_decodes_faster_and_caching_answers_sooner(arms: dict[str, Arm]) -> None:
    """Margins far inside what was measured (1.5 times and a tenth): other work shares the cores."""
    prompt = [{"role": "user", "content": some_text(300, seed=6)}]
    rate = {"plain": 0.0, "mtp": 0.0}
    # The best of many short ones, in turns: what the arm can do when nothing else runs.
    for name in ("plain", "mtp") * 8:
        rate[name] = max(rate[name], arms[name].chat(prompt, 128, fresh_salt()).decode_rate)
    assert rate["mtp"] > 1.1 * rate["plain"]

    long = [{"role": "user", "content": some_text(7000, seed=7)}]
    first_s = {}
    for name in ("plain", "cache"):
        salt = fresh_salt()
        arms[name].chat(long, 1, salt)
        first_s[name] = arms[name].chat(long, 2, salt).first_s
    assert first_s["cache"] < 0.5 * first_s["plain"]


def test_too_little_memory_says_why_and_shows_no_key(tmp_path: Path) -> None:
    profile = own_copy(tmp_path)
    with (profile / "plain.env").open("a") as file:
        file.write("KV_GIB=100000\n")
    key = f"sk-{uuid.uuid4().hex}"
    state = tmp_path / "state"
    up = launcher("up.sh", str(profile), "plain", FACEOFF_API_KEY=key, FACEOFF_STATE=str(state))
    assert up.returncode == 1
    assert "plain died while starting" in up.stderr
    assert "memory" in up.stderr.lower()
    log = next(state.glob("*/plain.log")).read_text()
    assert key not in log + up.stderr + up.stdout


def test_a_checkpoint_that_is_not_there_says_so_at_once(tmp_path: Path) -> None:
    profile = own_copy(tmp_path)
    up = launcher(
        "up.sh",
        str(profile),
        "plain",
        FACEOFF_CHECKPOINT="/nonexistent",
        FACEOFF_STATE=str(tmp_path / "state"),
    )
    assert up.returncode == 1
    assert "reason: error: the checkpoint /nonexistent has no config.json" in up.stderr
