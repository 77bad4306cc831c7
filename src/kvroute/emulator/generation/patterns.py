"""Texts that match a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kvroute.emulator.errors import ApiError
from kvroute.emulator.generation.words import Draws

TRIES = 50
_MORE = 4
"""Most repetitions beyond the smallest number."""
_LENGTH_MAX = 10_000
_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
_PARSER: Any = import_module("re._parser")
"""The standard library's parser of patterns; `re` has no public one."""


def matching_text(pattern: str, draws: Draws, shortest: int = 0, longest: int = _LENGTH_MAX) -> str:
    """Return a text that a pattern matches as a whole, of `shortest` to `longest` characters.

    Raises:
        ApiError: the pattern is not valid, or no such text was found.
    """
    try:
        # JSON schemas use ECMAScript's syntax for named groups.
        pattern = re.sub(r"\(\?<(?![=!])", "(?P<", pattern)
        compiled, tree = re.compile(pattern), _PARSER.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ApiError(f"the pattern {pattern!r} is not a regular expression: {error}", param="pattern") from None
    for attempt in range(TRIES):
        text = _Writer(draws, _MORE + attempt).text(tree)
        if shortest <= len(text) <= longest and compiled.fullmatch(text):
            return text
    raise ApiError(f"no text was found for the pattern {pattern!r}; give a simpler one", param="pattern")


@dataclass(slots=True)
class _Writer:
    """Writes one text; `more` limits its repetitions."""

    draws: Draws
    more: int
    groups: dict[int, str] = field(default_factory=dict)
    length: int = 0

    def text(self, nodes: Sequence[tuple[Any, Any]]) -> str:
        return "".join([self._node(str(kind), value) for kind, value in nodes])

    def _node(self, kind: str, value: Any) -> str:
        match kind:
            case "LITERAL":
                return self._one([chr(value)])
            case "NOT_LITERAL":
                return self._one([character for character in _PRINTABLE if ord(character) != value])
            case "ANY":
                return self._one(_LETTERS)
            case "IN":
                return self._one(_class(value))
            case "BRANCH":
                return self.text(value[1][self.draws.below(len(value[1]))])
            case "SUBPATTERN":
                return self._group(value[0], value[3])
            case "ATOMIC_GROUP":
                return self.text(value)
            case "GROUPREF":
                return self.groups.get(value, "")
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, repeated = value
                number = least + self.draws.below(min(int(most) - least, self.more) + 1)
                return "".join([self.text(repeated) for _ in range(number)])
        return ""  # an anchor, or an assertion: the whole text is matched against the pattern

    def _one(self, characters: Sequence[str]) -> str:
        self.length += 1
        if not characters or self.length > _LENGTH_MAX:
            raise ApiError("the pattern has no short text of ASCII characters; give a simpler one", param="pattern")
        return characters[self.draws.below(len(characters))]

    def _group(self, number: int | None, nodes: Sequence[tuple[Any, Any]]) -> str:
        text = self.text(nodes)
        if number is not None:
            self.groups[number] = text
        return text


def _class(members: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return characters of a class such as [a-z]: printable ASCII, or the first ones of another range."""
    negated, found = False, list[str]()
    for kind, value in members:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                found.append(chr(value))
            case "RANGE":
                first, last = value
                found += [chr(code) for code in range(first, min(last, first + len(_PRINTABLE)) + 1)]
            case "CATEGORY":
                found += [character for character in _PRINTABLE if re.match(_CATEGORIES[str(value)], character)]
    if negated:
        return [character for character in _PRINTABLE if character not in found]
    return found
