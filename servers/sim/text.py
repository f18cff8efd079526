"""Tokens: one per whitespace-separated piece, the chat template, block hash chains, and generated answers.

A token's bytes include the white space before it, as in byte-level BPE vocabularies. So a conversation that
is sent back with the answer it received has exactly the tokens that the server cached for it, and texts that
differ in white space only are different prompts. All passes over the text are vectorised: a prompt of 64K
tokens takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, shake_128
from typing import Any

import numpy as np

from .words import WORDS

EOS = b" <|im_end|>"
_SPACED: tuple[bytes, ...] = tuple(b" " + word.encode() for word in WORDS)
_BATCH = 256


def token_ends(text: bytes) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Offset just behind each token of ``text``; one entry per token."""
    if not text:
        return np.empty(0, dtype=np.intp)
    solid = np.frombuffer(text, dtype=np.uint8) > 32
    ends = np.flatnonzero(solid[:-1] & ~solid[1:]) + 1
    return np.append(ends, len(text)) if solid[-1] else ends


def count_tokens(text: bytes) -> int:
    """Number of tokens of ``text``."""
    return len(token_ends(text))


def render_chat(messages: Iterable[tuple[str, str]], add_generation_prompt: bool = True) -> bytes:
    """The prompt of a conversation: five tokens around each message, three that open the answer.

    The answer's own end marker closes it in the history exactly as it does when generated.
    """
    parts = [f"<|im_start|> {role} <nl> {content} <|im_end|> <nl>" for role, content in messages]
    if add_generation_prompt:
        parts.append("<|im_start|> assistant <nl>")
    return " ".join(parts).encode("utf-8", "surrogatepass")


class Answer:
    """The text that the model gives to one prompt: a function of the prompt's tokens and nothing else.

    Neither the arm nor the batch nor ``cache_salt`` changes it, so outputs can be compared across arms.
    """

    __slots__ = ("_indexes", "digest", "end")

    def __init__(self, digest: bytes, end: int | None = None) -> None:
        self.digest = digest
        #: Index of the end marker, when the answer ends by itself.
        self.end = end
        self._indexes = b""

    def natural_length(self) -> int:
        """Tokens, end marker included, after which the model would stop by itself: 32 to 1055."""
        return (
            32 + int.from_bytes(blake2b(self.digest, digest_size=2, person=b"length").digest(), "big") % 1024
        )

    def pieces(self, start: int, stop: int) -> bytes:
        """Bytes of tokens ``start`` to ``stop`` (excluded) as the tokenizer sees them."""
        end = self.end
        if end is not None and stop > end:
            words = self.pieces(start, end) if start < end else b""
            return words + EOS
        while len(self._indexes) < stop:
            block = len(self._indexes) // _BATCH
            self._indexes += shake_128(self.digest + block.to_bytes(4, "big")).digest(_BATCH)
        if stop - start == 1:
            return _SPACED[self._indexes[start]]
        return b"".join([_SPACED[index] for index in self._indexes[start:stop]])

    def text(self, start: int, stop: int) -> bytes:
        """The same as a client sees it: the end marker is not part of the text."""
        if self.end is not None and stop > self.end:
            stop = self.end
            if start >= stop:
                return b""
        return self.pieces(start, stop)


class Prompt:
    """A tokenised prompt and the hash chain over its full units of ``unit`` tokens.

    ``hashes[i]`` names tokens 0 to (i+1)·unit, ``salt`` included; ``extend`` continues the chain over the
    answer. ``unit`` 0 means that nothing is ever looked up, so nothing is hashed.
    """

    __slots__ = ("_tail", "answer", "digest", "hashes", "tokens", "unit")

    def __init__(self, text: bytes, unit: int, salt: str = "") -> None:
        ends = token_ends(text)
        self.tokens = len(ends)
        self.unit = unit
        # The digest names the tokens alone: white space behind the last one is not a token.
        body = text[: int(ends[-1])] if len(ends) else b""
        self.digest = blake2b(body, digest_size=16).digest()
        self.hashes: list[bytes] = []
        self.answer = Answer(self.digest)
        self._tail = b""
        if unit:
            self._hash(body, ends[unit - 1 :: unit].tolist(), salt)

    def _hash(self, body: bytes, cuts: list[int], salt: str) -> None:
        link = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        view, start = memoryview(body), 0
        for cut in cuts:
            state = blake2b(link, digest_size=16)
            state.update(view[start:cut])
            link = state.digest()
            self.hashes.append(link)
            start = cut
        # An empty chain still has to carry the salt into the first unit.
        self._tail = (b"" if self.hashes else link) + body[start:]

    def extend(self, total: int) -> None:
        """Continue ``hashes`` so that it covers the full units among the first ``total`` tokens."""
        unit = self.unit
        if not unit:
            return
        while (len(self.hashes) + 1) * unit <= total:
            taken = max(0, len(self.hashes) * unit - self.tokens)
            stop = (len(self.hashes) + 1) * unit - self.tokens
            link = self.hashes[-1] if self.hashes else b""
            self.hashes.append(
                blake2b(link + self._tail + self.answer.pieces(taken, stop), digest_size=16).digest()
            )
            self._tail = b""
