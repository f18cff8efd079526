"""up.sh, down.sh, status.sh and with_arms.sh with real processes on a profile of one's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.launching import SERVERS, OwnProfile, await_that, is_alive, own_profile


@pytest.fixture
def profile(tmp_path: Path) -> Iterator[OwnProfile]:
    yield from own_profile(tmp_path)


def test_arms_come_up_are_listed_and_go_down(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.arm("two")
    up = profile.run("up.sh", "one", "two")
    assert up.returncode == 0, up.stderr
    lines = [f"one {profile.url('one')} up", f"two {profile.url('two')} up"]
    assert up.stdout.splitlines() == lines
    assert profile.run("status.sh").stdout.splitlines() == lines

    pids = [profile.pid("one"), profile.pid("two")]
    assert os.getsid(pids[0]) == pids[0], "a server must not share our terminal's session"
    assert profile.run("down.sh").returncode == 0
    assert not any(is_alive(pid) for pid in pids)
    assert [line.split()[-1] for line in profile.run("status.sh").stdout.splitlines()] == ["down", "down"]


def test_the_default_arms_are_those_of_default_arms(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.arm("two")
    (profile.folder / "default.arms").write_text("# one line\ntwo\n")
    assert profile.run("up.sh").stdout == f"two {profile.url('two')} up\n"


def test_an_arm_that_is_up_is_left_alone(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.run("up.sh", "one")
    before = profile.pid("one")
    again = profile.run("up.sh", "one")
    assert again.returncode == 0
    assert "already up" in again.stderr
    assert "warning" not in again.stderr
    assert profile.pid("one") == before
    assert is_alive(before)


def test_settings_changed_since_the_start_are_pointed_out(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.run("up.sh", "one")
    with (profile.folder / "one.env").open("a") as file:
        file.write("FLAGS=new\n")
    assert "runs with other settings than" in profile.run("up.sh", "one").stderr


def test_a_checkpoint_named_since_the_start_is_pointed_out(profile: OwnProfile) -> None:
    """It is no file of the profile's, but it is what would be served."""
    profile.arm("one")
    profile.run("up.sh", "one")
    profile.env["FACEOFF_CHECKPOINT"] = "/models/another"
    assert "runs with other settings than" in profile.run("up.sh", "one").stderr


def test_each_server_asks_for_the_key_that_the_load_will_send_to_it(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.arm("two-b")
    profile.env |= {"FACEOFF_API_KEY": "common", "FACEOFF_API_KEY_TWO_B": "own"}
    assert profile.run("up.sh", "one", "two-b").returncode == 0
    for name, key in (("one", "common"), ("two-b", "own")):
        environment = Path(f"/proc/{profile.pid(name)}/environ").read_bytes().split(b"\0")
        assert f"FACEOFF_API_KEY={key}".encode() in environment


def test_a_port_taken_by_something_else(profile: OwnProfile) -> None:
    port = profile.arm("one")
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        up = profile.run("up.sh", "one")
    assert up.returncode == 1
    assert up.stdout == ""
    assert f"port {port} is taken" in up.stderr
    assert not (profile.notes / "one").exists()


def test_a_server_that_dies_at_start_shows_why_and_leaves_nothing(profile: OwnProfile) -> None:
    profile.arm("before")
    profile.arm("one")
    profile.arm("bad", MODE="broken", FLAGS="\x1b[31mnone")
    profile.run("up.sh", "before")
    up = profile.run("up.sh", "before", "one", "bad")
    assert up.returncode == 1
    assert up.stdout == ""
    assert "bad died while starting" in up.stderr
    assert "reason: ValueError: no such model none" in up.stderr
    assert "\x1b" not in up.stderr, "a log may hold anything; a terminal must not obey it"
    assert is_alive(profile.pid("before")), "it was up before and is none of this call's business"
    states = [line.split()[-1] for line in profile.run("status.sh").stdout.splitlines()]
    assert states == ["down", "up", "down"]  # bad, before, one
    if (profile.notes / "one").exists():
        assert not is_alive(profile.pid("one"))


def test_a_server_that_never_answers_is_stopped_at_the_limit(profile: OwnProfile) -> None:
    profile.arm("one", MODE="never", START_LIMIT="1")
    up = profile.run("up.sh", "one")
    assert up.returncode == 1
    assert "did not answer /health within 1 s" in up.stderr
    assert profile.run("status.sh").stdout.split()[-1] == "down"
    assert not list(profile.state_folder().glob("*.pid"))


def test_ctrl_c_while_starting_leaves_no_orphans(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.arm("slow", MODE="never")
    up = profile.start("up.sh", "one", "slow")
    pids = [profile.pid("one"), profile.pid("slow")]
    os.killpg(up.pid, signal.SIGINT)
    out, _ = up.communicate(timeout=30)
    assert up.returncode == 130
    assert out == ""
    assert not any(is_alive(pid) for pid in pids)


def test_a_failing_prepare_starts_nothing(profile: OwnProfile) -> None:
    profile.arm("one")
    (profile.folder / "prepare.sh").write_text("echo 'error: nothing to serve on' >&2\nexit 1\n")
    up = profile.run("up.sh", "one")
    assert up.returncode == 1
    assert "nothing to serve on" in up.stderr
    assert not (profile.notes / "one").exists()


def test_a_server_deaf_to_term_is_killed(profile: OwnProfile) -> None:
    profile.arm("one", MODE="deaf")
    profile.run("up.sh", "one")
    pid = profile.pid("one")
    assert profile.run("down.sh", "one").returncode == 0
    assert not is_alive(pid)


def test_the_workers_of_a_dead_server_are_stopped_too(profile: OwnProfile) -> None:
    profile.arm("one", MODE="worker")
    profile.run("up.sh", "one")
    worker = profile.pid("worker")
    os.kill(profile.pid("one"), signal.SIGKILL)
    await_that(lambda: not is_alive(profile.pid("one")), "the server outlived SIGKILL")
    assert profile.run("status.sh").stdout.split()[-1] == "dead"
    assert is_alive(worker)
    profile.run("down.sh")
    assert not is_alive(worker)


def test_down_does_not_touch_a_process_that_got_the_same_pid(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.run("up.sh", "one")
    profile.run("down.sh")
    stranger = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        pid_file = profile.state_folder() / "one.pid"
        pid_file.write_text(f"{stranger.pid} 12345 some.token 0\n")
        assert profile.run("status.sh").stdout.split()[-1] == "dead"
        assert profile.run("down.sh").returncode == 0
        assert stranger.poll() is None
        assert not pid_file.exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_dead_or_sick_arm_is_started_again(profile: OwnProfile) -> None:
    profile.arm("one")
    profile.run("up.sh", "one")
    first = profile.pid("one")
    (profile.notes / "sick").touch()  # /health answers 503, as vLLM does when its engine has died
    assert profile.run("status.sh").stdout.split()[-1] == "dead"
    (profile.notes / "sick").unlink()
    os.kill(first, signal.SIGKILL)
    await_that(lambda: not is_alive(first), "the server outlived SIGKILL")
    up = profile.run("up.sh", "one")
    assert up.returncode == 0
    assert "has died; starting it again" in up.stderr
    assert profile.pid("one") != first
    assert (profile.state_folder() / "one.log.previous").exists()


@pytest.mark.parametrize("script", ["up.sh", "with_arms.sh"])
def test_an_unknown_arm_is_named_with_those_there_are(profile: OwnProfile, script: str) -> None:
    profile.arm("one")
    arguments = ["oen"] if script == "up.sh" else ["oen", "--", "true"]
    answer = profile.run(script, *arguments)
    assert answer.returncode == 2
    assert answer.stderr == f"error: profile {answer.stderr.split()[2]} has no arm 'oen'; there are: one\n"


@pytest.mark.parametrize("script", ["up.sh", "with_arms.sh"])
def test_an_arm_named_twice_is_refused_before_anything_starts(profile: OwnProfile, script: str) -> None:
    profile.arm("one")
    arguments = ["one", "one"] if script == "up.sh" else ["one one", "--", "true"]
    answer = profile.run(script, *arguments)
    assert answer.returncode == 2
    assert "arm 'one' is named twice" in answer.stderr
    assert profile.run("status.sh").stdout.split()[-1] == "down"


@pytest.mark.parametrize("script", ["up.sh", "down.sh", "status.sh"])
def test_an_unknown_profile_is_named_with_those_there_are(script: str) -> None:
    answer = subprocess.run(
        ["bash", str(SERVERS / script), "nonesuch"], capture_output=True, text=True, timeout=30
    )
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: no profile 'nonesuch'; there are: ")
    assert "cpu" in answer.stderr


def test_with_arms_hands_over_specs_and_the_exit_code(profile: OwnProfile) -> None:
    profile.arm("one", CACHING="on", DRAFTS="0", DEVICE="gpu0", METRICS="http://a/metrics,http://b/metrics")
    profile.arm("two")
    profile.run("up.sh", "two")
    answer = profile.run(
        "with_arms.sh", "one two", "--", "bash", "-c", 'echo "$FACEOFF_ARMS|$FACEOFF_PROFILE"; exit 7'
    )
    assert answer.returncode == 7
    specs, _, name = answer.stdout.rstrip("\n").partition("|")
    assert name == str(profile.folder)
    logs = profile.state_folder()
    assert specs.split(" ") == [
        f"one={profile.url('one')};metrics=http://a/metrics,http://b/metrics;caching=on;drafts=0;device=gpu0"
        f";log={logs}/one.log",
        f"two={profile.url('two')};log={logs}/two.log",
    ]
    assert not is_alive(profile.pid("one")), "started by with_arms.sh, so stopped by it"
    assert is_alive(profile.pid("two")), "was up before"


def test_with_arms_says_2_when_an_arm_does_not_come_up(profile: OwnProfile) -> None:
    profile.arm("bad", MODE="broken")
    answer = profile.run("with_arms.sh", "bad", "--", "touch", str(profile.notes / "ran"))
    assert answer.returncode == 2
    assert not (profile.notes / "ran").exists()


def test_with_arms_lets_the_command_end_by_itself_after_ctrl_c(profile: OwnProfile) -> None:
    profile.arm("one")
    # The command needs the server once more after the signal, as a sweep does to write its last rows.
    script = (
        "import signal, sys, urllib.request, pathlib\n"
        "notes = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    (notes / 'command').write_text('0')\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    code = urllib.request.urlopen(sys.argv[2]).status\n"
        "    print('after the signal the server still answers', code)\n"
        "    sys.exit(5)\n"
    )
    command = ["one", "--", "python3", "-c", script, str(profile.notes), profile.url("one") + "/health"]
    running = profile.start("with_arms.sh", *command)
    await_that((profile.notes / "command").exists, "the command never started")
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert out == "after the signal the server still answers 200\n"
    assert not is_alive(profile.pid("one"))


def test_with_arms_passes_term_on_to_the_command(profile: OwnProfile) -> None:
    profile.arm("one")
    command = ["one", "--", "bash", "-c", f"echo $$ > {profile.notes}/command; exec sleep 600"]
    running = profile.start("with_arms.sh", *command)
    command_pid = profile.pid("command")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=30)
    assert running.returncode == 143
    assert not is_alive(command_pid)
    assert not is_alive(profile.pid("one"))


def test_with_arms_names_a_command_that_is_not_there(profile: OwnProfile) -> None:
    profile.arm("one")
    answer = profile.run("with_arms.sh", "one", "--", "no-such-command")
    assert answer.returncode == 1
    assert "error: cannot run no-such-command: No such file or directory" in answer.stderr
    assert not is_alive(profile.pid("one"))


def test_two_arms_that_want_one_device_for_themselves(profile: OwnProfile) -> None:
    profile.arm("one", DEVICE="gpu0", EXCLUSIVE_DEVICE="yes")
    profile.arm("two", DEVICE="gpu0", EXCLUSIVE_DEVICE="yes")
    refused = profile.run("up.sh", "one", "two")
    assert refused.returncode == 1
    assert "two and one both want gpu0 for themselves" in refused.stderr
    assert not (profile.notes / "one").exists()

    profile.env["FACEOFF_DEVICE_TWO"] = "gpu1"
    assert profile.run("up.sh", "one", "two").returncode == 0
    # A running arm is where it was started, whatever the environment says by now.
    del profile.env["FACEOFF_DEVICE_TWO"]
    specs = profile.run("with_arms.sh", "two", "--", "bash", "-c", 'echo "$FACEOFF_ARMS"').stdout
    assert ";device=gpu1;" in specs


def test_an_arm_that_is_gone_holds_no_device(profile: OwnProfile) -> None:
    """After a crash of the machine its pid file is still there."""
    profile.arm("one", DEVICE="gpu0", EXCLUSIVE_DEVICE="yes")
    profile.arm("two", DEVICE="gpu0", EXCLUSIVE_DEVICE="yes")
    assert profile.run("up.sh", "one").returncode == 0
    os.kill(profile.pid("one"), signal.SIGKILL)
    await_that(lambda: "dead" in profile.run("status.sh").stdout, "one still alive")
    up = profile.run("up.sh", "two")
    assert up.returncode == 0, up.stderr


def h100(folder: Path, smi: str, *arms: str, **more: str) -> subprocess.CompletedProcess[str]:
    """up.sh h100 with an nvidia-smi that does as the shell command ``smi`` says."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FACEOFF_STATE": str(folder / "state")}
    return subprocess.run(
        ["bash", str(SERVERS / "up.sh"), "h100", *arms],
        env=env | more,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_h100_without_a_gpu_says_so_at_once(tmp_path: Path) -> None:
    up = h100(tmp_path, "exit 9")
    assert up.returncode == 1
    assert up.stdout == ""
    assert up.stderr.startswith("error: profile h100 needs an NVIDIA GPU")


TWO_GPUS = "echo 'GPU 0: H100'; echo 'GPU 1: H100'"


@pytest.mark.parametrize(
    ("arms", "more", "says"),
    [
        (["cache"], {"FACEOFF_CHECKPOINT": "/nowhere/model"}, "the checkpoint /nowhere/model is not there"),
        (["cache"], {"FACEOFF_VLLM": "no-such-vllm"}, "no vllm command; install the extra"),
        (["cache"], {"FACEOFF_DEVICE_CACHE": "gpu2"}, "wants gpu2, but there are only 2 GPUs"),
        (["cache"], {"FACEOFF_DEVICE_CACHE": "0"}, "DEVICE=0 is not of the form gpu0"),
        (["cache", "plain"], {}, "both want gpu0 for themselves"),
    ],
)
def test_h100_that_cannot_start_says_why(
    tmp_path: Path, arms: list[str], more: dict[str, str], says: str
) -> None:
    up = h100(tmp_path, TWO_GPUS, *arms, **more)
    assert up.returncode == 1, up.stderr
    assert up.stdout == ""
    assert says in up.stderr
    assert "Traceback" not in up.stderr
