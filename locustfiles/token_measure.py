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
from locustfiles.corpus import BREAK, OWN, Corpus, Line, Topic, load_corpus
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

#: Prompts counted between two progress messages.
BATCH = 100

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
        self._told = 0
        head = self.whole(HEAD)
        self.open = self.whole(HEAD + OPEN) - head
        self.head = self.words([" " + HEAD])[0].tokens
        self.user_overhead = head - self.head

    def whole(self, text: str) -> int:
        """Tokens of a single-message prompt."""
        return self.counter.count_messages([user_message(text)])

    def frame(self, before: str, texts: Sequence[str], after: str = "") -> list[Counted]:
        """Texts between two others, counted there: what they add to ``before + after``."""
        empty = self.whole(before + after)
        counts = self._each([[user_message(before + text + after)] for text in texts])
        return [Counted(text, count - empty) for text, count in zip(texts, counts, strict=True)]

    def sentences(self, texts: Sequence[str]) -> list[Counted]:
        """Sentences (with their leading space) between sentences."""
        return self.frame(HEAD + OPEN, texts, CLOSE)

    def last(self, texts: Sequence[str]) -> list[Counted]:
        """Sentences at the end of a message."""
        return self.frame(HEAD + OPEN, texts)

    def words(self, texts: Sequence[str]) -> list[Counted]:
        """Words (with their leading space) between words."""
        return self.frame(HEAD + " wrote about", texts, " this morning.")

    def lines(
        self, lines: Sequence[Line], slots: dict[str, list[Counted]], before: str = HEAD + OPEN
    ) -> list[Line]:
        """Lines with the tokens of their literals, counted with the first value in each slot."""
        values = [[slots[name][0] for name in line.slots] for line in lines]
        filled = [line.fill([item.text for item in items]) for line, items in zip(lines, values, strict=True)]
        return [
            Line(line.literals, line.slots, counted.tokens - sum(item.tokens for item in items))
            for line, items, counted in zip(lines, values, self.frame(before, filled), strict=True)
        ]

    def _each(self, prompts: Sequence[list[Message]]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(prompts), BATCH):
            counts += self.counter.count_each(prompts[start : start + BATCH])
            if self._progress and self.counter.requests >= self._told + BATCH // 2:
                self._told = self.counter.requests
                self._progress(f"counting tokens: {self._told} requests so far")
        return counts

    def overhead(self, place: Place) -> int:
        """Tokens of a place's prompt besides the text put there."""
        return self.counter.count_messages(place(HEAD + OPEN)) - self.head - self.open

    def heads(self, texts: Sequence[str], place: Place, alike: Sequence[Counted] = ()) -> list[Counted]:
        """Texts that stand at the head of a message, counted there.

        ``alike`` are the same texts counted elsewhere: taken over if some samples have the same counts here.
        """
        overhead = self.overhead(place) + self.open

        def counted(some: Sequence[str]) -> list[Counted]:
            counts = self._each([place(text + OPEN) for text in some])
            return [Counted(text, count - overhead) for text, count in zip(some, counts, strict=True)]

        if alike:
            samples = SAMPLES_USAGE if self.counter.source == "usage" else SAMPLES
            some = list(alike[:: max(1, len(alike) // samples)][:samples])
            if counted([item.text for item in some]) == some:
                return list(alike)
        return counted(texts)


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
    slots = {name: measurer.words(_spaced(values)) for name, values in texts.slots.items()}
    words = measurer.words(_spaced(texts.words))
    nonce_head, nonce_rest = _nonce_words(measurer, words)
    nonce = nonce_head[0] + "".join(nonce_rest[: NONCE_WORDS - 1]) + "\n"
    shared = _Shared(measurer, nonce)
    names = measurer.heads(texts.names, _alone)
    if shared.system:
        suffix_names = measurer.heads(texts.names, shared.place, names)
    else:
        suffix_names = measurer.words(_spaced(texts.names))
    # "I see." counts as " I see." between sentences does: its "I" is one token in both places.
    answer_tokens = measurer.sentences([" " + ANSWER])[0].tokens

    def after_nonce(text: str) -> list[Message]:
        return [user_message(nonce + text)]

    def second_turn(text: str) -> list[Message]:
        return [user_message(HEAD + OPEN), {"role": "assistant", "content": ANSWER}, user_message(text)]

    def third_turn(text: str) -> list[Message]:
        return [*second_turn(HEAD + OPEN), {"role": "assistant", "content": ANSWER}, user_message(text)]

    turns = [measurer.overhead(place) for place in (_alone, second_turn, third_turn)]
    text_tokens = measurer.head + measurer.open
    return TokenTable(
        model=counter.model,
        source=counter.source,
        corpus=texts.name,
        user_overhead=measurer.user_overhead,
        prefix_overhead=shared.prefix,
        suffix_overhead=shared.suffix,
        system=shared.system,
        open_tokens=measurer.open,
        answer_tokens=answer_tokens,
        turn_overheads=[after - before - answer_tokens - text_tokens for before, after in pairwise(turns)],
        names=names,
        line_names=measurer.heads(texts.names, after_nonce, names),
        suffix_names=suffix_names,
        slots=slots,
        openings=measurer.lines(texts.openings, slots, HEAD),
        topics=_topics(measurer, texts.topics, slots),
        follow_ups=measurer.heads(texts.follow_ups, second_turn),
        closers=measurer.sentences(_spaced(texts.closers)),
        questions=measurer.last(_spaced(texts.questions)),
        follow_up_questions=measurer.last(_spaced(texts.follow_up_questions)),
        words=words,
        nonce_head=nonce_head,
        nonce_rest=nonce_rest,
        nonce_tokens=measurer.overhead(after_nonce) - measurer.user_overhead,
        prefix_nonce_tokens=shared.nonce,
    )


def _spaced(texts: Sequence[str]) -> list[str]:
    return [" " + text for text in texts]


def _topics(measurer: Measurer, topics: Sequence[Topic], slots: dict[str, list[Counted]]) -> list[Topic]:
    """The topics with all their lines counted."""
    lines = [line for topic in topics for line in (*topic.headings, *topic.sentences)]
    counted = iter(measurer.lines(lines, slots))
    found = []
    for topic in topics:
        headings = tuple(next(counted) for _ in topic.headings)
        sentences = [next(counted) for _ in topic.sentences]
        if topic.name == OWN and measurer.counter.source == "tokenize":
            # Somebody's own text may end and begin with anything.
            headings = tuple(_that_add_up(measurer, headings))
            sentences = _that_add_up(measurer, sentences) or sentences
        found.append(Topic(topic.name, headings, tuple(sentences)))
    return found


def _that_add_up(measurer: Measurer, lines: Sequence[Line]) -> list[Line]:
    """Lines without slots that count the same next to themselves and before a new paragraph."""
    texts = [line.literals[0] for line in lines]
    twice = measurer.sentences([text + text for text in texts])
    ended = measurer.sentences([text + BREAK + CLOSE.strip() for text in texts])
    ending = measurer.sentences([BREAK + CLOSE.strip()])[0].tokens
    return [
        line
        for line, pair, end in zip(lines, twice, ended, strict=True)
        if pair.tokens == 2 * line.tokens and end.tokens == line.tokens + ending
    ]


def smaller(corpus: Corpus) -> Corpus:
    """What can be counted with at most 150 requests: sentences without slots, no headings, few phrases."""
    topics = []
    budget = 32
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
        names=_spread(corpus.names, 16),
        openings=openings,
        follow_ups=corpus.follow_ups[:4],
        closers=corpus.closers[:11],
        questions=corpus.questions[:4],
        follow_up_questions=corpus.follow_up_questions[:3],
        words=corpus.words[:8],
    )


def _spread(items: tuple[str, ...], count: int) -> tuple[str, ...]:
    """``count`` of the items, evenly."""
    return tuple(items[index * len(items) // count] for index in range(min(count, len(items))))


def _alone(text: str) -> list[Message]:
    return [user_message(text)]


class _Shared:
    """The template around a shared text: see ``TokenTable`` for ``prefix``, ``suffix`` and ``system``."""

    def __init__(self, measurer: Measurer, nonce: str) -> None:
        #: Tokens of a nonce line before the shared text.
        self.nonce = 0
        try:
            whole = measurer.overhead(self.place)
            self.nonce = measurer.overhead(lambda text: self.place(text, nonce)) - whole
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
