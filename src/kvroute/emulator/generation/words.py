"""Vocabulary of the output: words, and pieces of given texts; and the text of any token id."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvroute.emulator.prompt import OUTPUT_ID, TOKEN_BYTES

_MASK = (1 << 64) - 1
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407
"""Constants of the linear congruential generator in Knuth's MMIX."""
WORDS = tuple(
    f" {first}{vowel}{last}".encode() for first in "bdfgklmnprstvwzh" for vowel in "aeio" for last in "bdfgklmnprstvwzh"
)
"""1,024 words that need no escaping in JSON."""
PIECE_BYTES = 3
"""Bytes of a given text in one output token."""


def generated_tokens(seed: int, choice: int, generated: int = 0) -> Iterator[bytes]:
    """Yield the tokens of answer `choice` to a prompt with this seed, without end. `generated` is the number of output
    tokens at the end of the prompt: the tokens are then the rest of the answer to the prompt without them."""
    return map(WORDS.__getitem__, _places(seed, choice, generated))


def generated_ids(seed: int, choice: int, generated: int = 0) -> Iterator[int]:
    """Yield the ids of these tokens."""
    return map(OUTPUT_ID.__add__, _places(seed, choice, generated))


def _places(seed: int, choice: int, generated: int) -> Iterator[int]:
    """Yield places in WORDS."""
    state = (seed + choice * _MULTIPLIER) & _MASK
    for place in count():
        state = (state * _MULTIPLIER + _INCREMENT) & _MASK
        if place >= generated:
            yield state >> 54


@dataclass(slots=True)
class Draws:
    """Numbers that follow from a seed."""

    state: int

    @classmethod
    def of(cls, seed: int, choice: int) -> Draws:
        """Return those of answer `choice` to a prompt with this seed."""
        return cls((seed + choice * _MULTIPLIER) & _MASK)

    def below(self, limit: int) -> int:
        """Return a number in [0, limit)."""
        self.state = (self.state * _MULTIPLIER + _INCREMENT) & _MASK
        return (self.state >> 33) % limit

    def word(self) -> str:
        """Return a word."""
        return WORDS[self.below(len(WORDS))].decode().strip()


def pieces(text: bytes) -> list[tuple[bytes, int]]:
    """Split a given UTF-8 text into output tokens: the text that each completes, and its id."""
    decoder, found = codecs.getincrementaldecoder("utf-8")(), list[tuple[bytes, int]]()
    for start in range(0, len(text), PIECE_BYTES):
        piece = text[start : start + PIECE_BYTES]
        found.append((decoder.decode(piece).encode(), OUTPUT_ID + int.from_bytes(piece.ljust(PIECE_BYTES, b"\0"))))
    return found


def token_bytes(token: int) -> bytes:
    """Return the bytes of a token of a prompt or of an output; none for an id that no text has."""
    if OUTPUT_ID <= token < OUTPUT_ID + len(WORDS):
        return WORDS[token - OUTPUT_ID]
    if OUTPUT_ID <= token < OUTPUT_ID + (1 << 8 * PIECE_BYTES):
        return (token - OUTPUT_ID).to_bytes(PIECE_BYTES).rstrip(b"\0")
    if 0 <= token < 1 << 8 * TOKEN_BYTES:
        return token.to_bytes(TOKEN_BYTES, "little").rstrip(b"\0")
    return b""


def token_text(token: int) -> str:
    """Return the text of one token; bytes of incomplete characters are replaced."""
    return token_bytes(token).decode("utf-8", "replace")
