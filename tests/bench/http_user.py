"""The plain way of doing it: Locust's HttpUser, ``iter_lines``, stamps taken when Python gets round to it.

The baseline of ``python -m tests.bench``: same prompts' size, same streams, same spread of starts as our own
users. Rows go to the file named by BENCH_ROWS, the process's own CPU and wall time to BENCH_COST.
"""

import json
import os
import time
from itertools import count

import gevent
from locust import HttpUser, events, task

SESSIONS = 3  # one warm-up, two measured
SPREAD_S = float(os.environ.get("BENCH_SPREAD_S", "2.86"))
rows = open(os.environ["BENCH_ROWS"], "w", encoding="utf-8")  # noqa: SIM115
numbers = count()
state = {"left": 0, "chunks": 0}


@events.test_start.add_listener
def start(environment, **_):
    state.update(left=environment.parsed_options.num_users, wall=time.monotonic(), cpu=time.process_time())
    rows.write("request_id,ttft_ms,tpot_ms,chunks\n")


class PlainUser(HttpUser):
    """One stream after another."""

    def on_start(self):
        self.number = next(numbers)
        self.session = 0
        gevent.sleep(SPREAD_S * self.number / self.environment.parsed_options.num_users)

    @task
    def ask(self):
        name = f"bench-{self.number}-{self.session}-1"
        body = {
            "model": "metronome",
            "messages": [{"role": "user", "content": "word " * 1024}],
            "max_tokens": 128,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first = last = None
        chunks = 0
        began = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions",
            json=body,
            stream=True,
            headers={"X-Request-Id": name},
            catch_response=True,
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
                    chunks += 1
            answer.success()
        state["chunks"] += chunks
        if self.session:
            rows.write(f"{name},{(first - began) * 1e3},{(last - first) / (chunks - 1) * 1e3},{chunks}\n")
        self.session += 1
        if self.session == SESSIONS:
            state["left"] -= 1
            if not state["left"]:
                wall, cpu = time.monotonic() - state["wall"], time.process_time() - state["cpu"]
                rows.close()
                with open(os.environ["BENCH_COST"], "w", encoding="utf-8") as file:
                    json.dump({"wall": wall, "cpu": cpu, "chunks": state["chunks"]}, file)
                gevent.spawn(self.environment.runner.quit)
            gevent.sleep(3600)
