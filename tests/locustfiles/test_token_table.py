"""Tables measured with tokenizers whose counts can be made by hand."""

import msgspec
import pytest

from locustfiles.prompts import measure_table
from locustfiles.token_counter import TokenCounter
from locustfiles.token_table import TokenTable, common_prefix
from tests.locustfiles.token_server import LocalCounter, TokenServer, greedy, serving, words


def test_a_template_of_words_is_counted_as_by_hand():
    table = measure_table(LocalCounter(words))
    assert table.additive
    # <bos> <user> … <end> <assistant>
    assert table.user_overhead == 4
    # <bos> <system> "You answer questions about these notes." <end> <user> | … <end> <assistant>
    assert table.prefix_overhead == 2 + 6 + 2
    assert table.suffix_overhead == 2
    # … <assistant> answer <end> <user> text <end> <assistant>: four more tokens per turn
    assert table.turn_overheads == [4, 4]
    assert table.answer_tokens == 2  # "I see."
    assert table.nonce_tokens == table.prefix_nonce_tokens == 5
    assert table.minimum == 5
    assert table.system
    assert {name.tokens for name in table.names} == {1}


def test_pieces_of_a_corpus_are_counted_as_by_hand(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("One two three. Four five.")
    table = measure_table(LocalCounter(words), path)
    (topic,) = table.topics
    assert [(line.literals[0], line.tokens) for line in topic.sentences] == [
        (" One two three.", 3),
        (" Four five.", 2),
    ]
    # "from {group} wrote to me {when} about {thing} and I promised to find an answer."
    assert table.openings[0].tokens == 1 + 3 + 1 + 7
    assert table.corpus == "mine.txt"


def test_without_ids_the_prefix_ends_with_the_system_message():
    table = measure_table(LocalCounter(words, ids=False))
    assert table.additive
    # <system> 6 words <end> came in; <user> can no longer be told from what follows the text
    assert (table.prefix_overhead, table.suffix_overhead) == (8, 4)


def test_a_template_without_system_messages_shares_the_user_message():
    table = measure_table(LocalCounter(words, system=False))
    assert not table.system
    assert table.additive
    assert (table.prefix_overhead, table.suffix_overhead) == (2 + 6, 2)
    assert table.suffix_names[0].text.startswith(" ")


def test_sentences_of_an_own_corpus_that_do_not_add_up_are_left_out(tmp_path):
    def merging(messages):
        """A sentence that ends with "!" swallows a "This" behind it, and nothing else."""
        out = words(messages)
        return [
            token
            for before, token in zip(["", *out], out, strict=False)
            if not (before.endswith("!") and token == "This")
        ]

    path = tmp_path / "mine.txt"
    path.write_text("This one swallows! This one does not. Nor does this.")
    table = measure_table(LocalCounter(merging), path)
    assert [line.literals[0] for line in table.topics[0].sentences] == [
        " This one does not.",
        " Nor does this.",
    ]
    assert table.additive


def test_a_template_that_ignores_system_messages_is_noticed():
    def deaf(messages):
        return words([message for message in messages if message["role"] != "system"])

    table = measure_table(LocalCounter(deaf))
    assert not table.system
    assert table.additive


def test_a_tokenizer_that_merges_across_sentences_is_found_out():
    table = measure_table(LocalCounter(greedy))
    assert not table.additive
    assert table.deviation > 0


def test_first_words_are_counted_anew_where_the_place_makes_a_difference():
    def glued(messages):
        """The first word after a system message is glued to its marker: it costs nothing."""
        out = words(messages)
        if messages[0]["role"] == "system":
            del out[out.index("<user>")]
        return out[:-1] if messages[-1]["content"].split()[0][0] in "AB" and len(messages) > 1 else out

    table = measure_table(LocalCounter(glued))
    assert table.suffix_names != table.names
    assert table.line_names == table.names
    assert table.additive


def test_usage_takes_at_most_150_requests():
    counter = LocalCounter(words, source="usage")
    table = measure_table(counter)
    assert table.additive
    assert table.source == "usage"
    assert table.requests == counter.requests <= 150
    assert table.user_overhead == 4


def test_an_own_corpus_by_usage_takes_at_most_150_requests(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(" ".join(f"Sentence number {number} is here." for number in range(900)))
    counter = LocalCounter(words, source="usage")
    assert measure_table(counter, path).additive
    assert counter.requests <= 150


def test_a_table_survives_json():
    table = measure_table(LocalCounter(words))
    assert msgspec.json.decode(msgspec.json.encode(table), type=TokenTable) == table


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2]) == 2


@pytest.mark.parametrize("tokenize", [True, 404])
def test_measured_over_http_it_is_the_same(tokenize):
    server = TokenServer()
    server.tokenize = tokenize
    told = []
    with serving(server):
        counter = TokenCounter(server.url, "m")
        table = measure_table(counter, progress=told.append)
        counter.close()
    assert table.model == "m"
    assert table.source == ("tokenize" if tokenize is True else "usage")
    assert table.additive
    assert (table.user_overhead, table.suffix_overhead) == ((4, 2) if tokenize is True else (4, 4))
    assert table.requests == len(server.seen)
    if tokenize is True:
        assert any("requests" in line for line in told)
        assert server.connections <= 9  # kept open
    else:
        assert len(server.seen) <= 150
        salts = [body["cache_salt"] for body in server.bodies("/v1/chat/completions")]
        assert len(set(salts)) == len(salts)
