"""Token numbers for ``/tokenize`` and ``/detokenize``: given in the order in which pieces are first seen."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from .words import WORDS

#: Numbers given at most; pieces beyond get numbers that cannot be turned back.
LIMIT = 1_000_000


class Vocabulary:
    """A bounded two-way table of pieces and numbers."""

    def __init__(self) -> None:
        self._pieces: list[str] = ["<|im_start|>", "<|im_end|>", "<nl>", *WORDS]
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}

    def encode(self, text: bytes) -> tuple[list[int], list[str]]:
        """Numbers and pieces of a text's tokens (pieces end at ASCII white space)."""
        pieces = [piece.decode("utf-8", "replace") for piece in text.translate(_CONTROLS).split()]
        numbers = []
        for piece in pieces:
            number = self._numbers.get(piece)
            if number is None:
                number = self._add(piece)
            numbers.append(number)
        return numbers, pieces

    def _add(self, piece: str) -> int:
        if len(self._pieces) >= LIMIT:
            return LIMIT + crc32(piece.encode("utf-8", "replace")) % LIMIT
        self._numbers[piece] = len(self._pieces)
        self._pieces.append(piece)
        return len(self._pieces) - 1

    def decode(self, numbers: Iterable[int]) -> str:
        """Text of token numbers; an unknown number becomes a piece of its own."""
        known = len(self._pieces)
        return " ".join(
            self._pieces[number] if 0 <= number < known else f"<|{number}|>" for number in numbers
        )


#: Every control byte is white space to the tokenizer.
_CONTROLS = bytes(32 if byte < 32 else byte for byte in range(256))
