"""A server behind TLS with a CA of one's own: a whole cell against the simulator through a TLS relay."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading

import pytest

from locustfiles.records import Attempt, Done, Manifest, ServerSample, read_csv, read_json
from tests.locustfiles.cells import ROOT, run_cell, simulator


def pump(source, sink):
    """Copy bytes until either end closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def relay(listener, context, port):
    """Accept TLS connections and hand them on to a plain port, until the listener is closed."""

    def serve(plain):
        try:
            front = context.wrap_socket(plain, server_side=True)
        except OSError:  # a client that does not trust us says so and hangs up
            return
        back = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(front, back), daemon=True).start()
        pump(back, front)

    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(plain,), daemon=True).start()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=faceoff test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def https(certificate):
    """URL of a simulator behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with simulator("--enable-prefix-caching") as (url, _), socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(url.rpartition(":")[2])
        threading.Thread(target=relay, args=(listener, context, port), daemon=True).start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


def test_a_cell_runs_over_https_with_a_ca_of_ones_own(https, certificate, tmp_path):
    environment = os.environ | {"SSL_CERT_FILE": str(certificate[0])}
    point = ("--point", "context=2048,growth=256,output=32", "--sessions", "1")
    result = run_cell("multi_turn", https, tmp_path, *point, users=2, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_json(tmp_path / "done.json", Done).complete
    rows = [row for row in read_csv(tmp_path / "requests.csv", Attempt) if row.status != "censored"]
    assert {row.status for row in rows} == {"ok"}
    # TLS hides the kernel's arrival stamps, and every row says so.
    assert {row.stamp for row in rows} == {"user"}
    assert all(row.ttft_ms > 0 and row.tpot_ms > 0 for row in rows)
    assert all(row.prompt_tokens == row.prompt_tokens_asked for row in rows if row.turn == 1)
    assert list(read_csv(tmp_path / "server.csv", ServerSample))


def test_an_unknown_ca_is_said_in_one_line(https, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")}
    command = [sys.executable, "-m", "locustfiles.sweep", "--plan", "smoke", "--out", str(tmp_path / "run")]
    swept = subprocess.run(
        [*command, "--arms", f"own={https}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert swept.returncode == 2
    assert "a private CA goes into SSL_CERT_FILE" in swept.stderr
    assert "Traceback" not in swept.stderr


def test_a_sweep_measures_an_https_server_of_ones_own(https, certificate, tmp_path):
    plan = tmp_path / "tiny.toml"
    plan.write_text(
        'repeats = 1\nusers = [1]\nsessions = 1\n[[workloads]]\nworkload = "single_turn"\n'
        'points = ["prompt=256,output=32"]\n'
    )
    out = tmp_path / "run"
    swept = subprocess.run(
        [sys.executable, "-m", "locustfiles.sweep", "--plan", str(plan), "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"SSL_CERT_FILE": str(certificate[0]), "FACEOFF_ARMS": f"own={https}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert swept.returncode == 0, swept.stderr
    manifest = read_json(out / "manifest.json", Manifest)
    assert manifest.arms[0].probe.prefix_caching is True
    assert manifest.arms[0].probe.tokenize is True
    assert read_json(out / "cells" / manifest.cells[0].id / "done.json", Done).complete
