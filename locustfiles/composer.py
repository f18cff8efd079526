"""Text of an exact number of tokens, composed from counted sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import median
from typing import NamedTuple, TypeVar

from locustfiles.corpus import Line, Topic
from locustfiles.token_table import Counted, TokenTable

T = TypeVar("T")

#: Exact remainders are looked up to this many tokens; longer ones are filled with paragraphs first.
REACH = 4096
#: Tries to correct a text where counts do not add up.
TRIES = 60
#: Sentences of a paragraph, besides its heading.
PARAGRAPH = (4, 9)


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of ``items``. (Not ``Random.choice``: its algorithm may change between Python versions.)"""
    return items[int(rng.random() * len(items))]


def shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    """``items`` in random order."""
    deck = list(items)
    for last in range(len(deck) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        deck[last], deck[other] = deck[other], deck[last]
    return deck


class _Lengths:
    """Texts by their tokens, and which totals any number of them can make."""

    def __init__(self, texts: Iterable[Counted]) -> None:
        self.by_length: dict[int, list[str]] = {}
        for text in texts:
            if text.tokens > 0:
                self.by_length.setdefault(text.tokens, []).append(text.text)
        self.lengths = sorted(self.by_length)
        self._reach = bytearray(REACH + 1)
        self._reach[0] = 1
        for total in range(1, REACH + 1):
            self._reach[total] = any(self._reach[total - n] for n in self.lengths if n <= total)
        self._steps: dict[int, list[int]] = {}
        self.safe = self._first_safe()

    def _first_safe(self) -> int | None:
        """The least total from which on every one can be made: a run as long as the shortest text."""
        run = 0
        for total in range(REACH + 1):
            run = run + 1 if self._reach[total] else 0
            if self.lengths and run == self.lengths[0]:
                return total - run + 1
        return None

    def can(self, total: int) -> bool:
        """Whether texts can make exactly ``total`` tokens (at most ``REACH``)."""
        return 0 <= total <= REACH and bool(self._reach[total])

    def fill(self, rng: Random, total: int) -> list[str]:
        """Texts of exactly ``total`` tokens, rather few long ones than many short ones."""
        chosen: list[str] = []
        while total:
            if total not in self._steps:
                usable = [n for n in self.lengths if self.can(total - n)]
                self._steps[total] = usable[len(usable) // 2 :]
            length = pick(rng, self._steps[total])
            chosen.append(pick(rng, self.by_length[length]))
            total -= length
        return chosen


class Dice(NamedTuple):
    """What a text is drawn with: ``end`` draws the question and the last sentences, ``body`` all else.

    So texts that differ in ``end`` or by a few tokens have most of their text in common.
    """

    body: Random
    end: Random


class Composer:
    """Composes texts of exact length from a table's pieces. Holds no state between texts."""

    def __init__(self, table: TokenTable) -> None:
        fixed = [
            Counted(line.literals[0], line.tokens)
            for topic in table.topics
            for line in topic.sentences
            if not line.slots
        ]
        self._table = table
        self._ends = _Lengths([*fixed, *table.closers])
        self._words = _Lengths(table.words)
        if self._ends.safe is None or self._words.safe is None:
            raise ValueError(
                f"the counts for {table.model!r} do not allow every length: closing sentences have "
                f"{self._ends.lengths[:8]}, words {self._words.lengths[:8]} tokens"
            )
        self._safe = self._ends.safe
        characters = sum(len(item.text) for item in [*fixed, *table.closers])
        self._per_token = characters / max(1, sum(item.tokens for item in [*fixed, *table.closers]))

    def estimate(self, text: str) -> int:
        """About how many tokens a text has, judging by the corpus."""
        return round(len(text) / self._per_token)

    def asking(
        self,
        dice: Dice,
        budget: int,
        opening: Counted,
        questions: Sequence[Counted],
        heads: Sequence[Counted],
    ) -> str:
        """User text of ``budget`` tokens: opening, notes, question. Where that does not fit, single words
        after the first of ``heads`` that allows it.

        Raises:
            ValueError: if there is no such text (a few lengths near 0).
        """
        for question in shuffled(dice.end, questions):
            rest = budget - opening.tokens - question.tokens
            if rest > self._safe or self._ends.can(rest):
                return "".join((opening.text, *self._sentences(dice, rest), question.text))
        for head in heads:
            if self._words.can(budget - head.tokens):
                return head.text + self._keywords(dice, budget - head.tokens)
        raise self._no_words(budget)

    def notes(self, dice: Dice, budget: int) -> str:
        """Sentences of ``budget`` tokens, with a space before them, and no question; words if it is tiny.

        Raises:
            ValueError: if no combination of words has that many tokens (a few lengths near 0).
        """
        if budget > self._safe or self._ends.can(budget):
            return "".join(self._sentences(dice, budget))
        return self._keywords(dice, budget)

    def _keywords(self, dice: Dice, budget: int) -> str:
        if not self._words.can(budget):
            raise self._no_words(budget)
        return "".join(self._words.fill(dice.end, budget))

    def _no_words(self, budget: int) -> ValueError:
        return ValueError(
            f"no words of exactly {budget} tokens for {self._table.model!r} (they have "
            f"{self._words.lengths}): ask for a slightly longer text"
        )

    def _sentences(self, dice: Dice, rest: int) -> list[str]:
        """Paragraphs, as long as a remainder is left that sentences can fill exactly; then those."""
        parts: list[str] = []
        rng = dice.body
        slots = self._table.slots
        decks = {topic.name: _Deck(rng, topic) for topic in self._table.topics} if rest > self._safe else {}
        order: list[str] = []
        while rest > self._safe:
            if not order:
                order = shuffled(rng, decks)
            deck = decks[order.pop()]
            for line in deck.paragraph(rng, bool(parts)):
                text, tokens = line.literals[0], line.tokens
                if line.slots:
                    values = [pick(rng, slots[name]) for name in line.slots]
                    tokens += sum(value.tokens for value in values)
                    text = line.fill([value.text for value in values])
                if rest - tokens < self._safe:
                    return parts + self._ends.fill(dice.end, rest)
                parts.append(text)
                rest -= tokens
        return parts + self._ends.fill(dice.end, rest)


class _Deck:
    """A topic's sentences, dealt without repetition until all have been used."""

    def __init__(self, rng: Random, topic: Topic) -> None:
        self._topic = topic
        self._left: list[Line] = []

    def paragraph(self, rng: Random, heading: bool) -> list[Line]:
        """A heading (if wanted and there are any) and some sentences."""
        lines: list[Line] = []
        if heading and self._topic.headings:
            lines.append(pick(rng, self._topic.headings))
        least, most = PARAGRAPH
        for _ in range(least + int(rng.random() * (most - least + 1))):
            if not self._left:
                self._left = shuffled(rng, self._topic.sentences)
            lines.append(self._left.pop())
        return lines


def settle(write: Callable[[int, int], T], count: Callable[[T], int], budget: int, target: int) -> T:
    """``write(budget, variant)`` such that it counts ``target`` tokens, where counts do not add up.

    Each variant ends differently, and each try tells a budget that would have been right for it. The next one
    gets their median: following the last one alone wanders about as far as variants differ, and may miss for
    long.

    Raises:
        ValueError: if none was found.
    """
    problem = ""
    right: list[int] = []
    for variant in range(TRIES):
        try:
            text = write(budget, variant)
        except ValueError as error:
            problem = f" ({error})"
            budget += 1
            continue
        missing = target - count(text)
        if missing == 0:
            return text
        right.append(budget + missing)
        budget = round(median(right))
    raise ValueError(
        f"no text of exactly {target} tokens was found in {TRIES} tries{problem}; ask for a few more"
    )
