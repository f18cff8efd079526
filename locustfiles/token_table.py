"""Token counts of the corpus for one model: what prompts of exact length are composed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from locustfiles.body import Message
from locustfiles.corpus import Line, Topic

SCHEMA = 1

# The frame that pieces are measured in. "I" is one token at the head of a text and after a space in every
# tokenizer we know, which is what lets the template's own tokens be told from the text's.
HEAD = "I"
OPEN = " wrote this down."
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

    def count_each(self, prompts: Sequence[Sequence[Message]]) -> list[int]:
        """The same for many prompts."""

    def count_ids(self, messages: Sequence[Message]) -> list[int] | None:
        """Token ids, where they can be had."""


class Counted(msgspec.Struct, array_like=True, frozen=True):
    """A text and its tokens where it stands in prompts."""

    text: str
    tokens: int


class TokenTable(msgspec.Struct, kw_only=True):
    """Everything needed to build prompts of exact length for one model. Counts are tokens.

    Texts of ``slots``, ``closers``, ``questions``, ``follow_up_questions`` and ``words`` have a leading
    space; names and ``follow_ups`` stand at the head of a message and have none.
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
    open_tokens: int
    """Tokens of ``OPEN``."""
    turn_overheads: list[int]
    """What a later turn adds besides the tokens of answer and new text: turn 2, and those after it."""
    names: list[Counted]
    line_names: list[Counted]
    """The same after a nonce line."""
    suffix_names: list[Counted]
    """The same after a system message, or (with a leading space) after a shared text."""
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
    """Of a nonce line before user text, line end included."""
    prefix_nonce_tokens: int
    """The same before a shared text."""

    @property
    def minimum(self) -> int:
        """Tokens of the shortest single-message prompt: the template and one word."""
        return self.user_overhead + min(name.tokens for name in self.names)


def user_message(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def common_prefix(one: Sequence[int], two: Sequence[int]) -> int:
    """Number of leading items that two sequences share."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count
