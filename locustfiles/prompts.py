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

import msgspec

from locustfiles.body import Message
from locustfiles.composer import Composer, pick, shuffled
from locustfiles.token_counter import TokenCounter, TokenCountError
from locustfiles.token_table import (
    ANSWER,
    NONCE_WORDS,
    SYSTEM_HEAD,
    Counted,
    Counter,
    TokenTable,
    common_prefix,
    count_corpus,
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

#: Tries to correct a prompt where counts do not add up.
CORRECTIONS = 40
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
        self._nonce_tokens = 0 if nonce is None else table.nonce_tokens
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
        overhead = self._table.user_overhead + self._nonce_tokens

        def write(budget: int) -> list[Message]:
            return [user_message(self._nonce + self._opened(user, session, 1, budget, self._table.names))]

        self._check(tokens, overhead, self._table.names, "a prompt")
        return self._prompt(self._corrected(write, tokens - overhead, tokens), tokens)

    def shared(self, user: int, session: int, turn: int, prefix: int, suffix: int) -> Prompt:
        """A system message that all prompts of the cell share, and a user message of their own; ``prefix`` +
        ``suffix`` tokens in all.

        ``prefix`` counts what any two of these prompts have in common: template header, system message, and
        the template up to the first token of the user's text (where the server did not tell token ids: up to
        the end of the system message).

        Raises:
            ValueError: if ``prefix`` or ``suffix`` is too small; it says the minimum.
        """
        table = self._table
        names = table.names if table.system else table.inner_names
        self._check(suffix, table.suffix_overhead, names, "a suffix")
        head = self._prefix(prefix)

        def write(budget: int) -> list[Message]:
            text = self._opened(user, session, turn, budget, names)
            if not table.system:
                return [user_message(head + text)]
            return [{"role": "system", "content": head}, user_message(text)]

        total = prefix + suffix
        return self._prompt(self._corrected(write, suffix - table.suffix_overhead, total), total)

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
        overheads = self._table.turn_overheads
        overhead = overheads[min(turn - 2, len(overheads) - 1)] if turn >= 2 else overheads[0]
        self._check(growth_user, overhead, self._table.names, "a later turn")
        if answer_tokens is None:
            answer_tokens = self._composer.estimate(answer)
        total = prompt.tokens + answer_tokens + growth_user

        def write(budget: int) -> list[Message]:
            rng = self._rng(user, session, turn)
            return [user_message(self._composer.follow_up(rng, budget, self._name(user, session)))]

        # Corrected as the second turn of a stand-in conversation: the real one may be long, and its answer's
        # tokens are the server's business.
        text = self._corrected(write, growth_user - overhead, growth_user, stand_in=True)
        messages = [*prompt.messages, {"role": "assistant", "content": answer}, *text]
        return self._prompt(messages, total)

    # -- parts ------------------------------------------------------------------------------------------

    def _opened(self, user: int, session: int, turn: int, budget: int, names: Sequence[Counted]) -> str:
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
        return self._composer.text(self._rng(user, session, turn), budget, opening, name)

    def _name(self, user: int, session: int) -> Counted:
        names = self._table.names
        return names[self._names[(user + 37 * session) % len(names)]]

    def _prefix(self, prefix: int) -> str:
        """The shared text, the same for the whole cell."""
        if prefix not in self._prefixes:
            overhead = self._table.prefix_overhead + self._nonce_tokens
            if prefix < overhead:
                raise ValueError(f"a prefix of {prefix} tokens is too short: the minimum is {overhead}")

            def write(budget: int) -> str:
                return self._nonce + SYSTEM_HEAD + self._composer.notes(self._rng("prefix"), budget)

            self._prefixes[prefix] = self._corrected_prefix(write, prefix - overhead, prefix)
        return self._prefixes[prefix]

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

    # -- correction, for tokenizers whose counts do not add up --------------------------------------------

    def _corrected(
        self, write: Callable[[int], list[Message]], budget: int, target: int, stand_in: bool = False
    ) -> list[Message]:
        """``write(budget)``, corrected to ``target`` tokens by counting if need be."""
        if self._counter is None:
            return write(budget)
        counter = self._counter
        before: list[Message] = []
        base = 0
        if stand_in:
            first = [user_message(ANSWER)]
            before = [*first, {"role": "assistant", "content": ANSWER}]
            base = counter.count_messages(first) + self._answer_tokens()

        def count(messages: list[Message]) -> int:
            return counter.count_messages([*before, *messages]) - base

        return _settle(write, count, budget, target, self._table)

    def _answer_tokens(self) -> int:
        assert self._counter is not None
        one = self._counter.count_messages([user_message(ANSWER)])
        return self._counter.count_messages([user_message(f"{ANSWER} {ANSWER}")]) - one

    def _corrected_prefix(self, write: Callable[[int], str], budget: int, target: int) -> str:
        if self._counter is None:
            return write(budget)
        counter, table = self._counter, self._table

        def messages(text: str, first: str) -> list[Message]:
            if not table.system:
                return [user_message(f"{text} {first}")]
            return [{"role": "system", "content": text}, user_message(first)]

        def count(parts: list[Message]) -> int:
            text = parts[0]["content"]
            one = counter.count_ids(messages(text, "I wrote."))
            two = counter.count_ids(messages(text, "Walter wrote."))
            if one and two:
                return common_prefix(one, two)
            alone = counter.count_messages([user_message("I wrote.")])
            return counter.count_messages(messages(text, "I wrote.")) - alone

        settled = _settle(lambda tokens: [user_message(write(tokens))], count, budget, target, table)
        return settled[0]["content"]


def _settle(
    write: Callable[[int], list[Message]],
    count: Callable[[list[Message]], int],
    budget: int,
    target: int,
    table: TokenTable,
) -> list[Message]:
    """Compose for a budget that the counted length shows to be right; the last steps append single words.

    Raises:
        ValueError: if no text of exactly ``target`` tokens was found.
    """
    best: tuple[int, list[Message]] | None = None
    tried: set[int] = set()
    for _ in range(CORRECTIONS // 4):
        if budget in tried:
            break
        tried.add(budget)
        try:
            messages = write(budget)
        except ValueError:
            break
        missing = target - count(messages)
        if missing == 0:
            return messages
        if missing > 0 and (best is None or missing < best[0]):
            best = (missing, messages)
        budget += missing
    # Counts jump over the target: take the longest text that is too short, and feel forward word by word.
    for step in range(CORRECTIONS):
        if best is None:
            budget -= 1 + step
            messages = write(budget)
        else:
            missing, kept = best
            word = table.words[step % len(table.words)].text
            messages = [*kept[:-1], {**kept[-1], "content": kept[-1]["content"] + word}]
        missing = target - count(messages)
        if missing == 0:
            return messages
        if missing > 0 and (best is None or missing < best[0]):
            best = (missing, messages)
    raise ValueError(f"no text of exactly {target} tokens found for {table.model!r} in {CORRECTIONS} tries")


def measure_table(
    counter: Counter, corpus: Path | None = None, progress: Callable[[str], None] | None = None
) -> TokenTable:
    """Count the corpus with ``counter``, and try on composed prompts whether the counts add up.

    About 900 short requests to ``/tokenize``, or, where counts come from ``usage``, at most 150 chat requests
    for a smaller corpus. ``corpus`` is a plain UTF-8 text file to use instead of the built-in sentences.
    ``progress`` is told now and then how far it is.

    Raises:
        TokenCountError: if the server cannot be asked.
        ValueError: if the corpus file cannot be used, or the counts are such that no prompt can be composed.
    """
    table = count_corpus(counter, corpus, progress)
    table.deviation = max(abs(difference) for difference in _trial(table, counter))
    table.additive = table.deviation == 0
    table.requests = counter.requests
    return table


def _trial(table: TokenTable, counter: Counter) -> list[int]:
    """Counted - predicted tokens of prompts of every kind."""
    found: list[int] = []

    def compare(prompt: Prompt, extra: int = 0) -> None:
        found.append(counter.count_messages(prompt.messages) - prompt.tokens - extra)

    rounds = 2 if table.source == "usage" else 8
    for trial in range(rounds):
        nonce = f"trial {trial}" if trial % 2 else None
        writer = PromptWriter(
            table, seed=trial, workload="trial", point="trial", users=1, repeat=1, nonce=nonce
        )
        least = table.minimum + table.nonce_tokens
        first = writer.single(trial, trial, least + 300 + 97 * trial)
        compare(first)
        compare(writer.single(trial, 0, least + 3 + trial))
        prefix = table.prefix_overhead + table.nonce_tokens + 200 + 31 * trial
        one = writer.shared(0, trial, 1, prefix, table.suffix_overhead + 120)
        compare(one)
        two = writer.shared(1, trial, 1, prefix, table.suffix_overhead + 120)
        ids = counter.count_ids(one.messages), counter.count_ids(two.messages)
        if ids[0] and ids[1]:
            # Two first words may begin with the same token, never end a token earlier.
            found.append(min(0, common_prefix(ids[0], ids[1]) - prefix))
        # The answer is an opening of our own: its tokens are known, and the same with a space before them.
        second = writer.follow_up(first, ANSWER, 0, trial, trial, 2, 150 + 13 * trial)
        third = writer.follow_up(second, ANSWER, 0, trial, trial, 3, 150 + 13 * trial)
        compare(second, table.answer_tokens)
        compare(third, 2 * table.answer_tokens)
    return found


def nonce_line(table: TokenTable, nonce: str) -> str:
    """A line of ``table.nonce_tokens`` tokens that follows from ``nonce``."""
    rng = Random(int.from_bytes(blake2b(nonce.encode(), digest_size=16).digest(), "big"))
    words = [pick(rng, table.nonce_rest) for _ in range(NONCE_WORDS - 1)]
    return pick(rng, table.nonce_head) + "".join(words) + "\n"
