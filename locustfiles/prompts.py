"""Prompts of an exact number of tokens that read like what a person could send.

A ``PromptWriter`` composes them from a ``TokenTable`` (the corpus, counted once per model) without asking any
server. What it writes follows from (seed, workload, point, users, repeat, user, session, turn) and never from
the arm: every arm gets the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TypeVar

import msgspec

from locustfiles.body import Message
from locustfiles.composer import Composer, Dice, pick, settle, shuffled
from locustfiles.token_counter import TokenCounter, TokenCountError
from locustfiles.token_measure import count_corpus
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

__all__ = [
    "Prompt",
    "PromptWriter",
    "TokenCountError",
    "TokenCounter",
    "TokenTable",
    "measure_table",
]

T = TypeVar("T")

#: Rounds of prompts that additivity is tried on; with ``usage`` each prompt costs a prefill.
TRIALS = 8
TRIALS_USAGE = 2
#: Openings are told apart for this many users and turns; beyond that only the text after them differs.
MAX_USERS = 1024
MAX_TURNS = 4


class Prompt(msgspec.Struct):
    """A request's messages and what is known of them.

    ``tokens`` is the length asked for, template included. ``digest`` identifies the text that the user side
    wrote (system and user messages, without a nonce line and without the server's answers).
    """

    messages: list[Message]
    tokens: int
    digest: str


class PromptWriter:
    """Writes the prompts of one cell.

    ``nonce`` (for servers without ``cache_salt``) heads every prompt with a line of fixed token length that
    follows from it; it is part of the tokens asked for, and of no digest. ``counter`` is needed only for a
    tokenizer whose counts do not add up (``table.additive`` false): each prompt is then counted and mended.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        seed: int,
        workload: str,
        point: str,
        users: int,
        repeat: int,
        nonce: str | None = None,
        counter: Counter | None = None,
    ) -> None:
        if not table.additive and counter is None:
            raise ValueError(
                f"the tokens of {table.model!r} do not add up sentence by sentence (off by up to "
                f"{table.deviation}): prompts need a TokenCounter to be corrected with"
            )
        self._table = table
        self._counter = None if table.additive else counter
        self._cell = (seed, workload, point, users, repeat)
        self._composer = Composer(table)
        self._nonce = "" if nonce is None else nonce_line(table, nonce)
        self._stand_in: int | None = None
        self._prefixes: dict[int, str] = {}
        # Shuffled once per cell: the order in which users take first words and openings take values.
        rng = self._rng("heads")
        self._names = shuffled(rng, range(len(table.names)))
        self._values = {name: shuffled(rng, values) for name, values in table.slots.items()}

    def single(self, user: int, session: int, tokens: int) -> Prompt:
        """One user message; ``tokens`` in all. Its first word differs between users, its opening sentence
        between any two (user, session).

        Raises:
            ValueError: if ``tokens`` cannot hold the template and a word; it says the minimum.
        """
        table = self._table
        names = table.line_names if self._nonce else table.names
        overhead = table.user_overhead + (table.nonce_tokens if self._nonce else 0)
        self._check(tokens, overhead, names, "a prompt")

        def write(budget: int, variant: int) -> list[Message]:
            return [user_message(self._nonce + self._opened(user, session, 1, variant, budget, names))]

        messages = self._settled(write, self._count, tokens - overhead, tokens)
        return self._prompt(messages, tokens)

    def shared(self, user: int, session: int, turn: int, prefix: int, suffix: int) -> Prompt:
        """A system message that all prompts of the cell share, and a user message of their own; ``prefix`` +
        ``suffix`` tokens in all.

        ``prefix`` counts what any two of these prompts have in common: template header, system message, and
        the template up to the first token of the user's text (where the server did not tell token ids: up to
        the end of the system message). Where the template takes no system message, both share a user message.

        Raises:
            ValueError: if ``prefix`` or ``suffix`` is too small; it says the minimum.
        """
        table = self._table
        names = table.suffix_names
        self._check(suffix, table.suffix_overhead, names, "a suffix")
        head = self._prefix(prefix)

        def write(budget: int, variant: int) -> list[Message]:
            return self._after(head, self._opened(user, session, turn, variant, budget, names))

        messages = self._settled(write, self._count, suffix - table.suffix_overhead, prefix + suffix)
        return self._prompt(messages, prefix + suffix)

    def follow_up(
        self,
        prompt: Prompt,
        answer: str,
        answer_tokens: int | None,
        user: int,
        session: int,
        turn: int,
        growth_user: int,
    ) -> Prompt:
        """The next turn: the earlier messages, the real ``answer``, and new user text that refers to it.

        New text and the template around both are ``growth_user`` tokens. ``answer_tokens`` is what the server
        said that it generated; None = unknown, then estimated from the answer's length.

        Raises:
            ValueError: if ``growth_user`` is too small; it says the minimum.
        """
        table = self._table
        overhead = table.turn_overheads[max(0, min(turn - 2, len(table.turn_overheads) - 1))]
        heads = table.follow_ups
        self._check(growth_user, overhead, heads, "a later turn")
        if answer_tokens is None:
            answer_tokens = self._composer.estimate(answer)

        def write(budget: int, variant: int) -> list[Message]:
            dice = self._dice(user, session, turn, variant)
            opening = pick(dice.body, heads)
            shorter = sorted(heads, key=lambda head: head.tokens)
            questions = table.follow_up_questions
            return [user_message(self._composer.asking(dice, budget, opening, questions, shorter))]

        # Corrected as the second turn of a stand-in conversation: the real one may be long, and its answer's
        # tokens are the server's business.
        text = self._settled(write, self._count_turn, growth_user - overhead, growth_user)
        messages = [*prompt.messages, {"role": "assistant", "content": answer}, *text]
        return self._prompt(messages, prompt.tokens + answer_tokens + growth_user)

    # -- parts ------------------------------------------------------------------------------------------

    def _opened(
        self, user: int, session: int, turn: int, variant: int, budget: int, names: Sequence[Counted]
    ) -> str:
        """User text of ``budget`` tokens that begins with an opening of its own."""
        table = self._table
        name = names[self._names[(user + 37 * session) % len(names)]]
        # Mixed radix: (user beyond the names, turn, session) -> a combination of opening and values.
        rank = user // len(names)
        rank += (MAX_USERS // len(names) + 1) * ((turn - 1) % MAX_TURNS + MAX_TURNS * session)
        rank, which = divmod(rank, len(table.openings))
        line = table.openings[which]
        values = []
        for slot in line.slots:
            rank, index = divmod(rank, len(self._values[slot]))
            values.append(self._values[slot][index])
        opening = Counted(
            name.text + line.fill([value.text for value in values]),
            name.tokens + line.tokens + sum(value.tokens for value in values),
        )
        shorter = sorted(names, key=lambda other: other.tokens)[:4]
        dice = self._dice(user, session, turn, variant)
        return self._composer.asking(dice, budget, opening, table.questions, [name, *shorter])

    def _prefix(self, prefix: int) -> str:
        """The shared text, the same for the whole cell."""
        if prefix not in self._prefixes:
            overhead = self._table.prefix_overhead + (self._table.prefix_nonce_tokens if self._nonce else 0)
            if prefix < overhead:
                raise ValueError(f"a prefix of {prefix} tokens is too short: the minimum is {overhead}")

            def write(budget: int, variant: int) -> str:
                return self._nonce + SYSTEM_HEAD + self._composer.notes(self._dice("prefix", variant), budget)

            self._prefixes[prefix] = self._settled(write, self._count_prefix, prefix - overhead, prefix)
        return self._prefixes[prefix]

    def _after(self, head: str, text: str) -> list[Message]:
        """A shared head and what follows it."""
        if self._table.system:
            return [{"role": "system", "content": head}, user_message(text)]
        return [user_message(head + text)]

    def _check(self, tokens: int, overhead: int, names: Sequence[Counted], what: str) -> None:
        least = overhead + min(name.tokens for name in names)
        if tokens < least:
            raise ValueError(
                f"{what} of {tokens} tokens cannot hold the template and a word: the minimum is {least}"
            )

    def _prompt(self, messages: list[Message], tokens: int) -> Prompt:
        digest = blake2b(digest_size=8)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                continue
            text = message["content"]
            # Only the first message can begin with the nonce line.
            digest.update((text.removeprefix(self._nonce) if index == 0 else text).encode())
            digest.update(b"\0")
        return Prompt(messages, tokens, digest.hexdigest())

    def _rng(self, *place: object) -> Random:
        key = msgspec.json.encode([*self._cell, *place])
        return Random(int.from_bytes(blake2b(key, digest_size=16).digest(), "big"))

    def _dice(self, *place: object) -> Dice:
        """``place`` ends with the variant."""
        return Dice(self._rng(*place[:-1]), self._rng(*place, "end"))

    # -- correction, for tokenizers whose counts do not add up --------------------------------------------

    def _settled(
        self, write: Callable[[int, int], T], count: Callable[[Counter, T], int], budget: int, target: int
    ) -> T:
        """``write(budget, 0)``; where counts do not add up, corrected to ``target`` tokens by counting."""
        counter = self._counter
        if counter is None:
            return write(budget, 0)
        return settle(write, lambda text: count(counter, text), budget, target)

    def _count(self, counter: Counter, messages: list[Message]) -> int:
        return counter.count_messages(messages)

    def _count_turn(self, counter: Counter, text: list[Message]) -> int:
        """What a turn adds besides its answer's tokens."""
        first = user_message(HEAD + OPEN)
        if self._stand_in is None:
            self._stand_in = counter.count_messages([first]) + self._table.answer_tokens
        answer = {"role": "assistant", "content": ANSWER}
        return counter.count_messages([first, answer, *text]) - self._stand_in

    def _count_prefix(self, counter: Counter, head: str) -> int:
        """Tokens that prompts with this shared text have in common."""
        names = [name.text for name in self._table.suffix_names]
        other = next((text for text in names if text.strip()[0] != names[0].strip()[0]), names[-1])
        one, two = (self._after(head, text + OPEN) for text in (names[0], other))
        ids = counter.count_ids(one), counter.count_ids(two)
        if ids[0] and ids[1]:
            return common_prefix(ids[0], ids[1])
        tail = self._table.suffix_overhead + self._table.suffix_names[0].tokens + self._table.open_tokens
        return counter.count_messages(one) - tail


def measure_table(
    counter: Counter, corpus: Path | None = None, progress: Callable[[str], None] | None = None
) -> TokenTable:
    """Count the corpus with ``counter``, and try on composed prompts whether the counts add up.

    About 1200 short requests to ``/tokenize``; where counts come from ``usage``, at most 150 chat
    requests for a smaller corpus. ``corpus`` is a plain UTF-8 text file to use instead of the built-in
    sentences. ``progress`` is told now and then how far it is.

    Raises:
        TokenCountError: if the server cannot be asked.
        ValueError: if the corpus file cannot be used, or the counts are such that no prompt can be composed.
    """
    before = counter.requests
    table = count_corpus(counter, corpus, progress)
    table.deviation = max(abs(difference) for difference in _trial(table, counter))
    table.additive = table.deviation == 0
    table.requests = counter.requests - before
    return table


def _trial(table: TokenTable, counter: Counter) -> list[int]:
    """Counted - predicted tokens of prompts of every kind."""
    prompts: list[Prompt] = []
    expected: list[int] = []
    shared: list[tuple[Prompt, Prompt, int]] = []
    for trial in range(TRIALS_USAGE if table.source == "usage" else TRIALS):
        nonce = f"trial {trial}" if trial % 2 else None
        writer = PromptWriter(
            table, seed=trial, workload="trial", point="trial", users=1, repeat=1, nonce=nonce
        )
        least = table.minimum + table.nonce_tokens
        first = writer.single(trial, trial, least + 300 + 97 * trial)
        short = writer.single(trial, 0, least + 8 + trial)
        prefix = table.prefix_overhead + table.prefix_nonce_tokens + 200 + 31 * trial
        suffix = table.suffix_overhead + 120
        one, two = (writer.shared(user, trial, 1, prefix, suffix) for user in (0, 1))
        # The real answer counts as if it had the tokens of the stand-in.
        second = writer.follow_up(first, ANSWER, table.answer_tokens, trial, trial, 2, 150 + 13 * trial)
        third = writer.follow_up(second, ANSWER, table.answer_tokens, trial, trial, 3, 150 + 13 * trial)
        prompts += [first, short, one, second, third]
        expected += [prompt.tokens for prompt in (first, short, one, second, third)]
        shared.append((one, two, prefix))
    counts = counter.count_each([prompt.messages for prompt in prompts])
    found = [count - tokens for count, tokens in zip(counts, expected, strict=True)]
    for one, two, prefix in shared:
        ids = counter.count_ids(one.messages), counter.count_ids(two.messages)
        if ids[0] and ids[1]:
            # Two first words may begin with the same token; they never part a token earlier.
            found.append(min(0, common_prefix(ids[0], ids[1]) - prefix))
    return found


def nonce_line(table: TokenTable, nonce: str) -> str:
    """A line of ``table.nonce_tokens`` tokens that follows from ``nonce``."""
    rng = Random(int.from_bytes(blake2b(nonce.encode(), digest_size=16).digest(), "big"))
    words = [pick(rng, table.nonce_rest) for _ in range(NONCE_WORDS - 1)]
    return pick(rng, table.nonce_head) + "".join(words) + "\n"
