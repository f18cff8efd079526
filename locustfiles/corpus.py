"""The corpus: sentences that prompts are made of, read from the text files beside this module.

A sentence may hold slots, ``{name}``, that take one of several values. A slot stands between spaces, because
that is where the token counts of neighbouring pieces add up in the tokenizers in use.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent

#: An own corpus is cut to this many sentences, taken evenly from the whole file (each costs a count).
MAX_OWN_SENTENCES = 600
#: Longer "sentences" (tables, minified code) are left out: prompts are filled sentence by sentence.
MAX_SENTENCE_CHARS = 400

#: Between paragraphs.
BREAK = "\n\n"
#: Name of the only topic of an own corpus.
OWN = "own"
#: Sentences of an own corpus that are also used to open paragraphs.
OWN_HEADINGS = 20

_SLOT = re.compile(r"\{([a-z_]+)\}")
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[.!?…][\"')\]])\s+|(?<=[。！？])|\n\s*\n")


class Line(msgspec.Struct, array_like=True, frozen=True):
    """A sentence with what parts it from the one before (a space, or a blank line for headings):
    ``literals[0] slot[0] literals[1] …``, literals one more than slots.

    ``tokens`` counts the literals only; 0 until measured.
    """

    literals: tuple[str, ...]
    slots: tuple[str, ...] = ()
    tokens: int = 0

    def fill(self, values: list[str]) -> str:
        """The text with ``values`` (each with its leading space) in the slots."""
        parts = [self.literals[0]]
        for value, literal in zip(values, self.literals[1:], strict=True):
            parts += (value, literal)
        return "".join(parts)


class Topic(msgspec.Struct, array_like=True, frozen=True):
    """Sentences that go together. A paragraph is one of ``headings`` and some of ``sentences``."""

    name: str
    headings: tuple[Line, ...]
    sentences: tuple[Line, ...]


class Corpus(msgspec.Struct, frozen=True):
    """Everything prompts are made of. Texts carry no leading space, except inside ``Line``."""

    name: str
    topics: tuple[Topic, ...]
    slots: dict[str, tuple[str, ...]]
    names: tuple[str, ...]
    openings: tuple[Line, ...]
    follow_ups: tuple[str, ...]
    closers: tuple[str, ...]
    questions: tuple[str, ...]
    follow_up_questions: tuple[str, ...]
    words: tuple[str, ...]


def parse_line(text: str, lead: str = " ") -> Line:
    """``"On {day} it rained."`` -> literals ``(" On", " it rained.")``, slots ``("day",)``.

    Raises:
        ValueError: if a slot does not stand between spaces (or at the beginning).
    """
    pieces = _SLOT.split(lead + text)
    literals, slots = pieces[::2], pieces[1::2]
    for index in range(len(slots)):
        if not literals[index].endswith(" ") or not literals[index + 1].startswith(" "):
            raise ValueError(f"{{{slots[index]}}} must stand between spaces: {text!r}")
        literals[index] = literals[index][:-1]
    return Line(tuple(literals), tuple(slots))


def _sections(name: str) -> dict[str, list[str]]:
    """``[section]`` -> its lines, of one of our own files."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for raw in (HERE / name).read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            lines = found.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def _values(lines: list[str]) -> tuple[str, ...]:
    return tuple(value.strip() for line in lines for value in line.split(" | "))


def _topic(name: str, lines: list[str]) -> Topic:
    headings = tuple(parse_line(line[2:], BREAK) for line in lines if line.startswith("> "))
    return Topic(name, headings, tuple(parse_line(line) for line in lines if not line.startswith("> ")))


def split_sentences(text: str) -> list[str]:
    """Sentences of plain text, white space collapsed, control characters dropped, over-long ones left out."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text):
        clean = "".join(c if c.isspace() or unicodedata.category(c)[0] != "C" else " " for c in piece)
        sentence = " ".join(clean.split())
        if sentence and len(sentence) <= MAX_SENTENCE_CHARS:
            found.append(sentence)
    return found


def _own_topics(path: Path) -> tuple[Topic, ...]:
    """One topic of the sentences in ``path``, without repetitions."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"corpus {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    sentences = list(dict.fromkeys(split_sentences(text)))
    if not sentences:
        raise ValueError(
            f"corpus {path}: no sentence of at most {MAX_SENTENCE_CHARS} characters found; "
            "it should be plain text"
        )
    count = min(len(sentences), MAX_OWN_SENTENCES)
    chosen = [sentences[index * len(sentences) // count] for index in range(count)]
    # No slots here: braces in somebody's text are just braces.
    sentence_lines = tuple(Line((" " + sentence,)) for sentence in chosen)
    return (Topic(OWN, tuple(Line((BREAK + text,)) for text in chosen[:OWN_HEADINGS]), sentence_lines),)


def load_corpus(path: Path | None = None) -> Corpus:
    """The built-in corpus, or with ``path`` (plain UTF-8 text) the user's own sentences between the built-in
    openings and questions.

    Raises:
        ValueError: naming the file, if it cannot be read, is not UTF-8, or holds no usable sentence.
    """
    phrases = _sections("corpus_phrases.txt")
    slots = {name: _values(lines) for name, lines in _sections("corpus_slots.txt").items()}
    slots["when"] = _values(phrases["when"])
    if path is None:
        name = "built-in"
        topics = tuple(_topic(name, lines) for name, lines in _sections("corpus_topics.txt").items())
    else:
        name, topics = path.name, _own_topics(path)
    return Corpus(
        name=name,
        topics=topics,
        slots=slots,
        names=_values(phrases["names"]),
        openings=tuple(parse_line(line) for line in phrases["openings"]),
        follow_ups=tuple(phrases["follow_ups"]),
        closers=tuple(phrases["closers"]),
        questions=tuple(phrases["questions"]),
        follow_up_questions=tuple(phrases["follow_up_questions"]),
        words=_values(phrases["words"]),
    )
