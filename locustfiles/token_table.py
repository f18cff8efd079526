"""Token counts of the corpus for one model: measured once, then prompts of exact length need no server.

Every piece of text is counted where it will stand, as a difference of two whole prompts that the server
counted: the chat template, a special first token and the way a tokenizer treats leading spaces are then right
by construction. That counts of neighbouring pieces add up is not assumed but tried on composed prompts; where
they do not, ``additive`` is false and each prompt has to be corrected by counting it (see ``prompts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from locustfiles.body import Message
from locustfiles.corpus import Corpus, Line, Topic, load_corpus
from locustfiles.token_counter import TokenCountError

SCHEMA = 1

# The frame that pieces are measured in. "I" is one token at the head of a text and after a space in every
# tokenizer we know, which is what lets the template's own tokens be told from the text's.
HEAD = "I"
OPEN = " wrote this down."
CLOSE = " More follows."
#: The system message begins with this; it is short because prompts of a cell share it anyway.
SYSTEM_HEAD = "You answer questions about these notes."
ANSWER = "I see."
NONCE_WORDS = 5


class Counter(Protocol):
    """What is needed of ``TokenCounter``."""

    model: str
    requests: int

    @property
    def source(self) -> Literal["tokenize", "usage"]:
        """How counts are had."""

    def count_messages(self, messages: Sequence[Message]) -> int:
        """Prompt tokens, template and generation prompt included."""

    def count_ids(self, messages: Sequence[Message]) -> list[int] | None:
        """Token ids, where they can be had."""


class Counted(msgspec.Struct, array_like=True, frozen=True):
    """A text and its tokens where it stands in prompts."""

    text: str
    tokens: int


class TokenTable(msgspec.Struct, kw_only=True):
    """Everything needed to build prompts of exact length for one model. Counts are tokens.

    Texts of ``slots``, ``closers``, ``questions``, ``follow_up_questions`` and ``words`` have a leading
    space; ``names`` and ``follow_ups`` stand at the head of a message and have none.
    """

    schema: int = SCHEMA
    model: str
    source: Literal["tokenize", "usage"]
    corpus: str
    requests: int = 0
    """Requests that measuring took."""
    additive: bool = True
    """Counts of pieces add up: composed prompts had exactly the predicted number of tokens."""
    deviation: int = 0
    """Largest difference found between a composed prompt's predicted and counted tokens."""
    user_overhead: int
    """Template around a single user message, generation prompt included."""
    prefix_overhead: int = 0
    """Template and fixed head of a system message; up to the first token of the user's text where the server
    told the ids, else up to the end of the system message."""
    suffix_overhead: int = 0
    """The rest of the template of a system + user prompt."""
    system: bool = True
    """The template takes system messages; else the shared prefix is put at the head of the user message."""
    answer_tokens: int
    """Tokens of ``ANSWER``, the stand-in for a server's answer."""
    turn_overheads: list[int]
    """What a later turn adds besides the tokens of answer and new text: turn 2, and those after it."""
    names: list[Counted]
    inner_names: list[Counted] = []
    """The same within a text (with a leading space): only where the template takes no system message."""
    slots: dict[str, list[Counted]]
    openings: list[Line]
    topics: list[Topic]
    follow_ups: list[Counted]
    closers: list[Counted]
    questions: list[Counted]
    follow_up_questions: list[Counted]
    words: list[Counted]
    nonce_head: list[str]
    """Words of one length that can head a nonce line, and words of one length that continue it."""
    nonce_rest: list[str]
    nonce_tokens: int

    @property
    def minimum(self) -> int:
        """Tokens of the shortest single-message prompt: the template and one word."""
        return self.user_overhead + min(name.tokens for name in self.names)


def user_message(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


class _Measurer:
    """Counts pieces in their places. ``few`` asks for as few requests as will do."""

    def __init__(self, counter: Counter, progress: Callable[[str], None] | None) -> None:
        self._counter = counter
        self._progress = progress
        self._known: dict[str, int] = {}
        head = self.whole(HEAD)
        self.base = self.whole(HEAD + OPEN)
        self.open = self.base - head
        self.head = self.whole(HEAD + " wrote about I this morning.") - self.whole(
            HEAD + " wrote about this morning."
        )
        self.user_overhead = head - self.head
        self.close = self.whole(HEAD + OPEN + CLOSE) - self.base

    def whole(self, text: str) -> int:
        """Tokens of a single-message prompt."""
        if text not in self._known:
            self._known[text] = self._counter.count_messages([user_message(text)])
            if self._progress and self._counter.requests % 50 == 0:
                self._progress(f"counting tokens of {self._counter.model}: {self._counter.requests} requests")
        return self._known[text]

    def sentence(self, text: str) -> int:
        """Tokens of a sentence (with its leading space) between sentences."""
        return self.whole(HEAD + OPEN + text + CLOSE) - self.base - self.close

    def last(self, text: str) -> int:
        """Tokens of a sentence at the end of a message."""
        return self.whole(HEAD + OPEN + text) - self.base

    def inner(self, text: str) -> int:
        """Tokens of words (with their leading space) between words."""
        return self.whole(HEAD + " wrote about" + text + " this morning.") - self.whole(
            HEAD + " wrote about this morning."
        )

    def first_word(self, text: str) -> int:
        """Tokens of a word at the head of a message."""
        return self.whole(text + OPEN) - self.open - self.user_overhead

    def first_sentence(self, text: str) -> int:
        """Tokens of a sentence at the head of a message."""
        return self.whole(text + CLOSE) - self.close - self.user_overhead

    def line(self, line: Line, slots: dict[str, list[Counted]]) -> Line:
        """The line with the tokens of its literals, measured with the first value in each slot."""
        values = [slots[name][0] for name in line.slots]
        tokens = self.sentence(line.fill([value.text for value in values]))
        return Line(line.literals, line.slots, tokens - sum(value.tokens for value in values))

    def opening(self, line: Line, slots: dict[str, list[Counted]]) -> Line:
        """The same for an opening, which continues a first word."""
        values = [slots[name][0] for name in line.slots]
        tokens = (
            self.whole(HEAD + line.fill([value.text for value in values])) - self.head - self.user_overhead
        )
        return Line(line.literals, line.slots, tokens - sum(value.tokens for value in values))


def count_corpus(
    counter: Counter, corpus: Path | None = None, progress: Callable[[str], None] | None = None
) -> TokenTable:
    """Count the pieces of a corpus: ``prompts.measure_table`` without its trial.

    Raises:
        TokenCountError: if the server cannot be asked.
        ValueError: if the corpus file cannot be used, or the counts are such that no prompt can be composed.
    """
    texts = load_corpus(corpus)
    measurer = _Measurer(counter, progress)
    if counter.source == "usage":
        texts = _smaller(texts)
    slots = {
        name: [Counted(" " + value, measurer.inner(" " + value)) for value in values]
        for name, values in texts.slots.items()
    }
    words = [Counted(" " + word, measurer.inner(" " + word)) for word in texts.words]
    nonce_head, nonce_rest, nonce_tokens = _nonce(measurer, words)
    prefix_overhead, suffix_overhead, system = _shared_overheads(counter, measurer)
    inner_names = [] if system else [Counted(" " + name, measurer.inner(" " + name)) for name in texts.names]
    return TokenTable(
        model=counter.model,
        source=counter.source,
        corpus=texts.name,
        user_overhead=measurer.user_overhead,
        prefix_overhead=prefix_overhead,
        suffix_overhead=suffix_overhead,
        system=system,
        answer_tokens=measurer.sentence(" " + ANSWER),
        turn_overheads=_turn_overheads(counter, measurer),
        names=[Counted(name, measurer.first_word(name)) for name in texts.names],
        slots=slots,
        inner_names=inner_names,
        openings=[measurer.opening(line, slots) for line in texts.openings],
        topics=[
            Topic(
                topic.name,
                tuple(measurer.line(line, slots) for line in topic.headings),
                tuple(measurer.line(line, slots) for line in topic.sentences),
            )
            for topic in texts.topics
        ],
        follow_ups=[Counted(text, measurer.first_sentence(text)) for text in texts.follow_ups],
        closers=[Counted(" " + text, measurer.sentence(" " + text)) for text in texts.closers],
        questions=[Counted(" " + text, measurer.last(" " + text)) for text in texts.questions],
        follow_up_questions=[
            Counted(" " + text, measurer.last(" " + text)) for text in texts.follow_up_questions
        ],
        words=words,
        nonce_head=nonce_head,
        nonce_rest=nonce_rest,
        nonce_tokens=nonce_tokens,
    )


def _smaller(corpus: Corpus) -> Corpus:
    """What can be counted with at most 150 requests."""
    plain = [[line for line in topic.sentences if not line.slots] for topic in corpus.topics]
    per_topic = 50 // len(corpus.topics) or 1
    openings_slots = {name for line in corpus.openings[:2] for name in line.slots}
    return Corpus(
        name=corpus.name,
        topics=tuple(
            Topic(topic.name, (), tuple(lines[: max(per_topic, 2)]))
            for topic, lines in list(zip(corpus.topics, plain, strict=True))[:25]
        ),
        slots={name: values[:5] for name, values in corpus.slots.items() if name in openings_slots},
        names=corpus.names[:: max(1, len(corpus.names) // 24)][:24],
        openings=corpus.openings[:2],
        follow_ups=corpus.follow_ups[:4],
        closers=corpus.closers[:12],
        questions=corpus.questions[:4],
        follow_up_questions=corpus.follow_up_questions[:3],
        words=corpus.words[:8],
    )


def _turn_overheads(counter: Counter, measurer: _Measurer) -> list[int]:
    """What turns 2 and 3 add to the prompt besides answer and user text."""
    text = HEAD + OPEN
    tokens = measurer.head + measurer.open
    # "I see." counts as " I see." between words does: its "I" is one token in both places.
    answer = measurer.sentence(" " + ANSWER)
    totals = [measurer.base]
    messages = [user_message(text)]
    for _ in range(2):
        messages += [{"role": "assistant", "content": ANSWER}, user_message(text)]
        totals.append(counter.count_messages(messages))
    return [after - before - answer - tokens for before, after in pairwise(totals)]


def _shared_overheads(counter: Counter, measurer: _Measurer) -> tuple[int, int, bool]:
    """(prefix, suffix, whether system messages are taken): see ``TokenTable``."""
    text_tokens = measurer.head + measurer.open

    def messages(first: str) -> list[Message]:
        return [{"role": "system", "content": SYSTEM_HEAD}, user_message(first + OPEN)]

    try:
        total = counter.count_messages(messages(HEAD))
    except TokenCountError:
        # A template without system messages refuses the request: prefix and suffix share a user message.
        head = measurer.first_sentence(SYSTEM_HEAD)
        one, two = (
            counter.count_ids([user_message(HEAD + OPEN)]),
            counter.count_ids([user_message("Walter" + OPEN)]),
        )
        before = common_prefix(one, two) if one and two else 0
        return before + head, measurer.user_overhead - before, False
    one, two = counter.count_ids(messages(HEAD)), counter.count_ids(messages("Walter"))
    # Without ids: what the system message added.
    before = common_prefix(one, two) if one and two else max(0, total - measurer.base)
    return before, total - text_tokens - before, True


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """Number of leading items that two sequences share."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


def _nonce(measurer: _Measurer, words: list[Counted]) -> tuple[list[str], list[str], int]:
    """Words for nonce lines of one token count, and that count (line end included)."""
    lengths = [word.tokens for word in words]
    rest = [word for word in words if word.tokens == max(sorted(set(lengths)), key=lengths.count)]
    heads = [(word.text.strip(), measurer.first_word(word.text.strip())) for word in rest[:64]]
    usual = max(sorted({tokens for _, tokens in heads}), key=[tokens for _, tokens in heads].count)
    head = [text for text, tokens in heads if tokens == usual]
    line = head[0] + "".join(word.text for word in rest[1:NONCE_WORDS]) + "\n"
    tokens = measurer.whole(line + HEAD + OPEN) - measurer.base
    return head, [word.text for word in rest], tokens
