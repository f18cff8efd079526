import pytest

from locustfiles.corpus import BREAK, MAX_OWN_SENTENCES, Line, load_corpus, parse_line, split_sentences


def test_a_line_is_cut_at_its_slots():
    assert parse_line("On {day} {friend} wrote.") == Line((" On", "", " wrote."), ("day", "friend"))
    assert parse_line("{friend} wrote.") == Line(("", " wrote."), ("friend",))
    assert parse_line("Notes.", BREAK) == Line(("\n\nNotes.",))


def test_a_line_is_filled_with_values_that_bring_their_space():
    line = parse_line("On {day} we met {friend} again.")
    assert line.fill([" Monday", " Anna"]) == " On Monday we met Anna again."


@pytest.mark.parametrize("text", ["Meet me in {city}.", "a{day} b.", "({day} ) b."])
def test_a_slot_stands_between_spaces(text):
    with pytest.raises(ValueError, match="between spaces"):
        parse_line(text)


def test_the_built_in_corpus_is_consistent():
    corpus = load_corpus()
    lines = [line for topic in corpus.topics for line in (*topic.headings, *topic.sentences)]
    assert len(lines) >= 300
    assert len(corpus.topics) >= 20
    texts = [line.fill([f" {{{slot}}}" for slot in line.slots]) for line in lines]
    assert len(set(texts)) == len(texts)
    for line, text in zip(lines, texts, strict=True):
        assert text.endswith(".")
        assert text == text.rstrip()
        assert "  " not in text
        assert set(line.slots) <= set(corpus.slots)
    for topic in corpus.topics:
        assert topic.headings
        assert len(topic.sentences) >= 10
    for opening in corpus.openings:
        assert sorted(opening.slots) == ["group", "thing", "when"]


def test_first_words_differ_and_questions_ask():
    corpus = load_corpus()
    assert len(set(corpus.names)) == len(corpus.names) >= 128
    assert all(" " not in name for name in corpus.names)
    assert all(text.endswith("?") for text in corpus.questions + corpus.follow_up_questions)
    assert all(text.endswith(".") for text in corpus.closers + corpus.follow_ups)
    for values in (*corpus.slots.values(), corpus.words, corpus.closers, corpus.questions):
        assert len(set(values)) == len(values)


def test_plain_text_is_cut_into_sentences():
    text = 'First one.  Second\none! "Third?" Fourth.\n\nA heading\n\nCut 3.5 not.\x00\x1b[1m End。次。'
    assert split_sentences(text) == [
        "First one.",
        "Second one!",
        '"Third?"',
        "Fourth.",
        "A heading",
        "Cut 3.5 not. [1m End。",
        "次。",
    ]


def test_an_own_corpus_takes_the_place_of_the_sentences(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("﻿Braces {stay} here. Braces {stay} here. Another one.", encoding="utf-8")
    corpus = load_corpus(path)
    assert corpus.name == "mine.txt"
    (topic,) = corpus.topics
    assert topic.sentences == (Line((" Braces {stay} here.",)), Line((" Another one.",)))
    assert topic.headings[0] == Line(("\n\nBraces {stay} here.",))
    assert corpus.questions == load_corpus().questions


def test_a_large_own_corpus_is_sampled_from_end_to_end(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(" ".join(f"Sentence {number}." for number in range(6000)))
    (topic,) = load_corpus(path).topics
    assert len(topic.sentences) == MAX_OWN_SENTENCES
    assert topic.sentences[0] == Line((" Sentence 0.",))
    assert topic.sentences[-1] == Line((" Sentence 5990.",))


def test_a_corpus_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.txt: cannot be read: No such file"):
        load_corpus(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_corpus(tmp_path)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 3\)"):
        load_corpus(binary)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n ")
    with pytest.raises(ValueError, match="no sentence"):
        load_corpus(empty)
