"""Counting the corpus with a server's tokenizer, once per model.

Every piece of text is counted where it will stand, as a difference of two whole prompts that the server
counted: the chat template, a special first token and the way a tokenizer treats leading spaces are then right
by construction. That counts of neighbouring pieces add up is not assumed but tried afterwards on composed
prompts (``prompts.measure_table``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from locustfiles.body import Message
from locustfiles.corpus import Corpus, Line, Topic, load_corpus
from locustfiles.token_counter import TokenCountError
from locustfiles.token_table import (
    ANSWER,
    HEAD,
    NONCE_WORDS,
    OPEN,
    SYSTEM_HEAD,
    Counted,
    Counter,
    TokenTable,
    common_prefix,
    user_message,
)

CLOSE = " More follows."
#: Differs from ``HEAD`` from its first letter on.
OTHER_HEAD = "Walter"
#: Texts at the head of a message are counted anew in each place only if this many samples differ there.
SAMPLES = 6
SAMPLES_USAGE = 2

#: Text at the head of the user's message -> the messages of a prompt.
Place = Callable[[str], list[Message]]


class Measurer:
    """Counts pieces in their places.

    ``head`` and ``open`` are the tokens of ``HEAD`` and ``OPEN``; ``user_overhead`` those of the template
    around a single user message.
    """

    def __init__(self, counter: Counter, progress: Callable[[str], None] | None) -> None:
        self.counter = counter
        self._progress = progress
        self._known: dict[str, int] = {}
        head = self.whole(HEAD)
        self._base = self.whole(HEAD + OPEN)
        self.open = self._base - head
        self.head = self.inner(" " + HEAD)
        self.user_overhead = head - self.head
        self._close = self.whole(HEAD + OPEN + CLOSE) - self._base

    def count(self, messages: list[Message]) -> int:
        """Tokens of a prompt."""
        if self._progress and self.counter.requests % 100 == 0:
            self._progress(
                f"counting tokens of {self.counter.model}: {self.counter.requests} requests so far"
            )
        return self.counter.count_messages(messages)

    def whole(self, text: str) -> int:
        """Tokens of a single-message prompt, asked once."""
        if text not in self._known:
            self._known[text] = self.count([user_message(text)])
        return self._known[text]

    def sentence(self, text: str) -> int:
        """Tokens of a sentence (with its leading space) between sentences."""
        return self.whole(HEAD + OPEN + text + CLOSE) - self._base - self._close

    def last(self, text: str) -> int:
        """Tokens of a sentence at the end of a message."""
        return self.whole(HEAD + OPEN + text) - self._base

    def inner(self, text: str) -> int:
        """Tokens of words (with their leading space) between words."""
        before, after = HEAD + " wrote about", " this morning."
        return self.whole(before + text + after) - self.whole(before + after)

    def line(self, line: Line, slots: dict[str, list[Counted]]) -> Line:
        """The line with the tokens of its literals, counted with the first value in each slot."""
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

    def overhead(self, place: Place) -> int:
        """Tokens of a place's prompt besides the text put there."""
        return self.count(place(HEAD + OPEN)) - self.head - self.open

    def heads(self, texts: Sequence[str], place: Place, alike: Sequence[Counted] = ()) -> list[Counted]:
        """Texts that stand at the head of a message, counted there.

        ``alike`` are the same texts counted elsewhere: taken over if some samples have the same counts here.
        """
        overhead = self.overhead(place) + self.open

        def counted(text: str) -> Counted:
            return Counted(text, self.count(place(text + OPEN)) - overhead)

        if alike:
            samples = SAMPLES_USAGE if self.counter.source == "usage" else SAMPLES
            step = max(1, len(alike) // samples)
            if all(counted(known.text) == known for known in alike[::step][:samples]):
                return list(alike)
        return [counted(text) for text in texts]


def count_corpus(
    counter: Counter, corpus: Path | None = None, progress: Callable[[str], None] | None = None
) -> TokenTable:
    """Count the pieces of a corpus: ``prompts.measure_table`` without its trial.

    Raises:
        TokenCountError: if the server cannot be asked.
        ValueError: if the corpus file cannot be used.
    """
    texts = load_corpus(corpus)
    measurer = Measurer(counter, progress)
    if counter.source == "usage":
        texts = smaller(texts)
    slots = {
        name: [Counted(" " + value, measurer.inner(" " + value)) for value in values]
        for name, values in texts.slots.items()
    }
    words = [Counted(" " + word, measurer.inner(" " + word)) for word in texts.words]
    nonce_head, nonce_rest = _nonce_words(measurer, words)
    line = nonce_head[0] + "".join(nonce_rest[: NONCE_WORDS - 1]) + "\n"
    shared = _Shared(measurer, line)
    names = measurer.heads(texts.names, _alone)

    def after_line(text: str) -> list[Message]:
        return [user_message(line + text)]

    def second_turn(text: str) -> list[Message]:
        answer = {"role": "assistant", "content": ANSWER}
        return [user_message(HEAD + OPEN), answer, user_message(text)]

    return TokenTable(
        model=counter.model,
        source=counter.source,
        corpus=texts.name,
        user_overhead=measurer.user_overhead,
        prefix_overhead=shared.prefix,
        suffix_overhead=shared.suffix,
        system=shared.system,
        open_tokens=measurer.open,
        answer_tokens=measurer.sentence(" " + ANSWER),
        turn_overheads=_turn_overheads(measurer),
        names=names,
        line_names=measurer.heads(texts.names, after_line, names),
        suffix_names=measurer.heads(texts.names, shared.place, names)
        if shared.system
        else [Counted(" " + name, measurer.inner(" " + name)) for name in texts.names],
        slots=slots,
        openings=[measurer.opening(opening, slots) for opening in texts.openings],
        topics=[
            Topic(
                topic.name,
                tuple(measurer.line(item, slots) for item in topic.headings),
                tuple(measurer.line(item, slots) for item in topic.sentences),
            )
            for topic in texts.topics
        ],
        follow_ups=measurer.heads(texts.follow_ups, second_turn),
        closers=[Counted(" " + text, measurer.sentence(" " + text)) for text in texts.closers],
        questions=[Counted(" " + text, measurer.last(" " + text)) for text in texts.questions],
        follow_up_questions=[
            Counted(" " + text, measurer.last(" " + text)) for text in texts.follow_up_questions
        ],
        words=words,
        nonce_head=nonce_head,
        nonce_rest=nonce_rest,
        nonce_tokens=measurer.overhead(after_line) - measurer.user_overhead,
        prefix_nonce_tokens=shared.nonce,
    )


def smaller(corpus: Corpus) -> Corpus:
    """What can be counted with at most 150 requests: sentences without slots, no headings, few phrases."""
    topics = []
    budget = 40
    each = max(1, budget // len(corpus.topics))
    for topic in corpus.topics:
        plain = tuple(line for line in topic.sentences if not line.slots)[:each]
        topics.append(Topic(topic.name, (), plain))
    openings = corpus.openings[:2]
    used = {name for line in openings for name in line.slots}
    return Corpus(
        name=corpus.name,
        topics=tuple(topic for topic in topics if topic.sentences),
        slots={name: values[:5] for name, values in corpus.slots.items() if name in used},
        names=_spread(corpus.names, 18),
        openings=openings,
        follow_ups=corpus.follow_ups[:4],
        closers=corpus.closers[:12],
        questions=corpus.questions[:4],
        follow_up_questions=corpus.follow_up_questions[:3],
        words=corpus.words[:8],
    )


def _spread(items: tuple[str, ...], count: int) -> tuple[str, ...]:
    """``count`` of the items, evenly."""
    return tuple(items[index * len(items) // count] for index in range(min(count, len(items))))


def _alone(text: str) -> list[Message]:
    return [user_message(text)]


def _turn_overheads(measurer: Measurer) -> list[int]:
    """What turns 2 and 3 add to the prompt besides the tokens of answer and user text."""
    text = HEAD + OPEN
    # "I see." counts as " I see." between sentences does: its "I" is one token in both places.
    answer = measurer.sentence(" " + ANSWER)
    messages = [user_message(text)]
    totals = [measurer.count(messages)]
    for _ in range(2):
        messages += [{"role": "assistant", "content": ANSWER}, user_message(text)]
        totals.append(measurer.count(messages))
    return [after - before - answer - measurer.head - measurer.open for before, after in pairwise(totals)]


class _Shared:
    """The template around a shared text: see ``TokenTable`` for ``prefix``, ``suffix`` and ``system``."""

    def __init__(self, measurer: Measurer, nonce: str) -> None:
        #: Tokens of a nonce line before the shared text.
        self.nonce = 0
        try:
            whole = measurer.overhead(self.place)
            self.nonce = measurer.count(self.place(HEAD + OPEN, nonce)) - measurer.count(
                self.place(HEAD + OPEN)
            )
        except TokenCountError as error:
            # That is how a template without system messages answers.
            if error.status not in (400, 422, 500):
                raise
        self.system = self.nonce > 0  # else refused, or ignored
        if not self.system:
            shared = measurer.whole(SYSTEM_HEAD + CLOSE) - measurer.whole(HEAD + CLOSE) + measurer.head
            whole = measurer.user_overhead + shared
            self.nonce = measurer.whole(nonce + SYSTEM_HEAD + CLOSE) - measurer.whole(SYSTEM_HEAD + CLOSE)
        place = self.place if self.system else _alone
        one, two = (measurer.counter.count_ids(place(head + OPEN)) for head in (HEAD, OTHER_HEAD))
        if one and two:
            before = common_prefix(one, two) + (0 if self.system else whole - measurer.user_overhead)
        else:
            # All but the template of a user message is due to the shared text.
            before = max(0, whole - measurer.user_overhead)
        self.prefix, self.suffix = before, whole - before

    def place(self, text: str, nonce: str = "") -> list[Message]:
        """``text`` as the user's message after a system message."""
        return [{"role": "system", "content": nonce + SYSTEM_HEAD}, user_message(text)]


def _nonce_words(measurer: Measurer, words: list[Counted]) -> tuple[list[str], list[str]]:
    """Words that can head a nonce line, and words that can continue it; of one token count each.

    Only single-token words of the same kind make lines of one length, whatever the nonce.
    """
    rest = _commonest(words)
    candidates = measurer.heads([word.text.strip() for word in rest[:48]], _alone)
    return [word.text for word in _commonest(candidates)], [word.text for word in rest]


def _commonest(items: list[Counted]) -> list[Counted]:
    """Those of the most frequent token count (the least such count)."""
    counts = [item.tokens for item in items]
    usual = max(sorted(set(counts)), key=counts.count)
    return [item for item in items if item.tokens == usual]
