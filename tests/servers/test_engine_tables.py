"""What is found in the prefix cache, to the token: closed forms and tables of vLLM 0.32 and 0.33."""

import pytest

from servers.sim.engine import Engine
from servers.sim.options import CALIBRATION, build_parser, engine_config, load
from servers.sim.request import Request
from servers.sim.text import Prompt

PROMPTS = (7800, 9600, 11400, 13200, 15000)
DRAFTS = ["--spec-tokens", "3"]
UNIT = ["--prefix-match-unit", "32"]


def engine(flags, calibration=None):
    calibration = calibration or load(CALIBRATION)
    return Engine(engine_config(build_parser().parse_args(flags), calibration), calibration)


def plain_attention():
    calibration = load(CALIBRATION)
    calibration.model.block_size, calibration.model.block_size_drafts = 16, None
    calibration.model.state_groups = 0
    return calibration


def run(engine, text, output=1, salt="", now=None):
    """One request to its end; the request."""
    now = engine.step_end if now is None and hasattr(engine, "step_end") else now or 0.0
    prompt = Prompt(text, engine.config.match_unit, salt)
    request = Request("r", prompt, prompt.tokens, output)
    engine.submit(request, now)
    now = engine.next_ready()
    while engine.in_flight:
        end = engine.begin(now)
        engine.finish()
        now = end
    engine.step_end = now
    return request


def growing_chat(engine, first, growth, output, turns):
    """Cached tokens of each follow-up of one conversation."""
    text, cached = words("w", first), []
    for turn in range(turns + 1):
        request = run(engine, text, output)
        cached.append(request.cached_tokens)
        text += request.content.answer.pieces(0, output) + words(f"u{turn}.", growth)
    return cached[1:]


def words(stem, count):
    return b"".join(b" %s%d" % (stem.encode(), index) for index in range(count))


@pytest.mark.parametrize(
    ("flags", "hits"),
    [
        ([], (4704, 6272, 9408, 10976, 12544)),
        (DRAFTS, (3200, 4800, 8000, 9600, 11200)),
        ([*DRAFTS, "--release", "0.33"], (4800, 6400, 8000, 11200, 12800)),
        (UNIT, (5984, 7776, 9568, 11392, 13184)),
        ([*DRAFTS, *UNIT], (5952, 7744, 9568, 11360, 13152)),
    ],
)
def test_growing_chat_hits_what_vllm_hits(flags, hits):
    server = engine(flags)
    assert growing_chat(server, 6000, 1500, 300, 5) == list(hits)
    counters = server.counters
    assert counters.prefix_hits == sum(hits)
    assert counters.prefix_queries == 6000 + sum(PROMPTS)
    assert server.memory.pool.usage == 0


@pytest.mark.parametrize(("flags", "hits"), [([], (6288, 8096, 9888)), (DRAFTS, (6272, 8080, 9872))])
def test_plain_attention_also_hits_answers_and_drafts_cost_one_block(flags, hits):
    assert growing_chat(engine(flags, plain_attention()), 6000, 1500, 300, 3) == list(hits)


@pytest.mark.parametrize(("flags", "hit"), [([], 0), (DRAFTS, 0), (UNIT, 1184), ([*DRAFTS, *UNIT], 1152)])
def test_a_prompt_shorter_than_a_block_hits_by_match_unit_only(flags, hit):
    server = engine(flags)
    run(server, words("w", 1200), 10)
    assert run(server, words("w", 1200) + words("more", 50), 10).cached_tokens == hit


@pytest.mark.parametrize(("flags", "hit"), [([], 4704), (DRAFTS, 3200)])
def test_a_shared_system_prompt_hits_from_the_third_sibling_on(flags, hit):
    # 5,000 shared tokens, 3,000 of one's own: the first sibling keeps its state behind the shared part, the
    # second sees that it shares a prefix and keeps the state there, the third finds it.
    server = engine(flags)
    cached = [
        run(server, words("shared", 5000) + words(f"own{index}.", 3000)).cached_tokens for index in range(4)
    ]
    assert cached == [0, 0, hit, hit]


def test_the_last_token_is_always_computed():
    server = engine([], plain_attention())
    run(server, words("w", 64))
    assert run(server, words("w", 64)).cached_tokens == 48
    assert run(server, words("w", 64) + b" more").cached_tokens == 64


def test_salt_separates_and_its_absence_shares():
    server = engine([], plain_attention())
    run(server, words("w", 64), salt="a")
    assert run(server, words("w", 80), salt="b").cached_tokens == 0
    assert run(server, words("w", 80)).cached_tokens == 0
    assert run(server, words("w", 80), salt="a").cached_tokens == 64


def test_caching_off_neither_hits_nor_counts():
    server = engine(["--no-enable-prefix-caching"])
    run(server, words("w", 5000))
    assert run(server, words("w", 5000) + b" more").cached_tokens == 0
    assert server.counters.prefix_queries == 0


def test_least_recently_used_prompts_are_evicted_first():
    calibration = plain_attention()
    calibration.model.kv_cache_tokens = 11 * 16  # ten blocks, and the one that vLLM never gives away
    server = engine(["--max-model-len", "160"], calibration)
    run(server, words("a", 49))
    run(server, words("b", 49))
    assert run(server, words("a", 49) + b" again").cached_tokens == 48
    run(server, words("c", 97))
    # c needed 7 blocks: the two unnamed free ones, then those of b, which was used before a's second use.
    assert run(server, words("a", 49) + b" again").cached_tokens == 48
    assert run(server, words("b", 49)).cached_tokens == 0


@pytest.mark.parametrize(("flags", "held"), [([], 5 + 3), (DRAFTS, 4 + 12)])
def test_state_blocks_of_a_running_request(flags, held):
    # 6,300 tokens: 5 attention blocks of 1,568 (4 of 1,600), 3 state blocks for each of 1 + drafts tokens.
    server = engine(flags)
    prompt = Prompt(words("w", 6300), server.config.match_unit)
    server.submit(Request("r", prompt, prompt.tokens, 100), 0.0)
    now = server.next_ready()
    while server.counters.generated_tokens < 2:
        now = server.begin(now)
        server.finish()
    assert server.memory.pool.usable - server.memory.pool.free == held
