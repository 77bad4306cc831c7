"""Checks of a value's form: every fault against a type of the schema, with its place and the fix."""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from kvroute_engine.errors import InputError
from kvroute_engine.files.units import quantity, read_quantity

Key = tuple[str | int, ...]
_SHOWN = 60


class FileError(InputError):
    """A fault of a cluster file with its `line` (0: not read from a text) and its `field`."""

    def __init__(self, what: str, *, source: str, line: int, field: str, hint: str = "") -> None:
        self.line, self.field, self._source = line, field, source
        place = f"{source}:{line}" if line else source
        where = f"{place}: {field}" if field else place
        super().__init__(_on_one_line(what), where=where, hint=_on_one_line(hint))

    def __reduce__(self) -> tuple[partial[FileError], tuple[str]]:
        again = partial(FileError, source=self._source, line=self.line, field=self.field, hint=self.hint)
        return again, (self.what,)


@dataclass(frozen=True, slots=True)
class Lines:
    """Line of each key of a file, used in errors; empty for a ClusterFile that was not read from text."""

    source: str
    of: Mapping[Key, int] = field(default_factory=dict)
    unread_keys: Set[Key] = frozenset()
    """Keys whose values could not be read; checks that depend on them are skipped."""
    outdated: tuple[FileError, ...] = ()
    """Warnings of keys that the file has under the names of the previous version."""
    written_at: tuple[int, ...] = ()
    """With an expanded file: the index in the file of each of its instances; empty: the same."""
    numbers: Mapping[Key, float] = field(default_factory=dict)
    """Plain text that is a number in YAML 1.2 and not in YAML 1.1, such as 1e9, by its key."""
    moved: Mapping[Key, Key] = field(default_factory=dict)
    """Key in the file of each value that was moved before it was read."""

    def sure(self, *pattern: str | int, whole: bool = False) -> bool:
        """Return True if the value at a key (`*`: any index or name) was read; `whole`: with everything below it."""
        pattern = self.written(pattern)
        return not any(
            (whole or len(key) <= len(pattern))
            and all(part in ("*", at) for part, at in zip(pattern, key, strict=False))
            for key in self.unread_keys
        )

    def error(self, what: str, key: Key = (), hint: str = "") -> FileError:
        """Return a fault at `key`; a fault of an expanded entry is reported at its shorthand."""
        key = self.written(key)
        if key and key not in self.of and self.of:
            shorthand = {"pods": "fabric", "racks": "fabric", "nodes": "fabric", "datacenters": "fabric"}
            owner = shorthand.get(str(key[0]), str(key[0]))
            key = next((k for k in (*(key[:n] for n in range(len(key), 0, -1)), (owner,)) if k in self.of), key)
        return FileError(what, source=self.source, line=self._line(key), field=field_text(key), hint=hint)

    def written(self, key: Key) -> Key:
        """Return the key in the file of a key of the expanded file, or of a value that was moved."""
        if key in self.moved:
            return self.moved[key]
        index = key[1] if len(key) > 1 and key[0] == "instances" else None
        if not isinstance(index, int) or index >= len(self.written_at):
            return key
        return (key[0], self.written_at[index], *key[2:])

    def _line(self, key: Key) -> int:
        while key and key not in self.of:
            key = key[:-1]
        return self.of.get(key, 0)


def field_text(key: Key) -> str:
    """Return a key as text: `("nodes", 3, "nics")` is `nodes[3].nics`. The text has one line for any key."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in key).lstrip(".")


def _printable(name: str) -> str:
    return _on_one_line(name if len(name) <= _SHOWN else name[:_SHOWN] + "...")


def _on_one_line(text: str) -> str:
    """Return the text with control characters, line ends included, as escape sequences; names in a file may contain
    any."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def form_faults(value: object, kind: Any, key: Key, lines: Lines) -> Iterator[FileError]:
    """Yield every fault of `value` against a type of the schema, each at its own key; none if msgspec accepts it."""
    options = kind_options(kind)
    if value is None and type(None) in options:
        return
    structs, array, table = entry_kinds(options)
    if array is not None and isinstance(value, list):
        for index, item in enumerate(value):
            yield from form_faults(item, get_args(array)[0], (*key, index), lines)
        yield from _length_faults(value, kind, key, lines)
    elif table is not None and isinstance(value, dict):
        names, items = get_args(table)
        for name, item in value.items():
            yield from form_faults(name, names, (*key, name), lines)
            yield from form_faults(item, items, (*key, name), lines)
        yield from _length_faults(value, kind, key, lines)
    elif structs and isinstance(value, dict):
        yield from _struct_faults(value, structs, key, lines)
    elif structs or table is not None or (array is not None and not _leaves(options)):
        wanted = " or ".join(
            (["a list of entries"] if array is not None else [])
            + (["a mapping"] if structs or table is not None else [])
        )
        yield lines.error(f"{_shown(value)} is not {wanted}", key, f"write {wanted} here")
    else:
        yield from _leaf_faults(value, kind, options, key, lines)


def kind_options(kind: Any) -> Sequence[Any]:
    """Return the alternatives of a type: `A | None` gives [A, None]."""
    if get_origin(kind) in (Union, types.UnionType):
        return [part for option in get_args(kind) for part in kind_options(option)]
    return [kind]


def entry_kinds(options: Sequence[Any]) -> tuple[list[type[msgspec.Struct]], Any, Any]:
    """Return the Structs, the list and the dict among the alternatives (None: there is none)."""
    options = [_plain(option) for option in options]
    structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
    array = next((option for option in options if get_origin(option) is list), None)
    return structs, array, next((option for option in options if get_origin(option) is dict), None)


def _leaves(options: Sequence[Any]) -> list[Any]:
    """Return the alternatives that are neither mappings nor lists nor null."""
    structs, array, table = entry_kinds(options)
    return [option for option in map(_plain, options) if option not in (*structs, array, table, type(None))]


def _plain(kind: Any) -> Any:
    """Return a list or dict without the limits of its length."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return base if get_origin(base) in (list, dict) else kind


def _length_faults(value: list[Any] | dict[str, Any], kind: Any, key: Key, lines: Lines) -> Iterator[FileError]:
    for option in kind_options(kind):
        if _plain(option) is not option:
            meta = get_args(option)[1]
            low, high = meta.min_length or 0, meta.max_length
            if len(value) < low or (high is not None and len(value) > high):
                limits = f"{low} or more" if high is None else f"{low} to {high}"
                yield lines.error(f"there are {len(value)} entries", key, f"write {limits}")


def struct_of(value: Mapping[str, object], structs: Sequence[type[msgspec.Struct]]) -> type[msgspec.Struct]:
    """Return the Struct that matches the mapping's tag, else the one with most of its keys."""

    def known(struct: type[msgspec.Struct]) -> tuple[bool, int]:
        config = struct.__struct_config__
        names = {entry.encode_name for entry in msgspec.structs.fields(struct)}
        return config.tag_field is not None and value.get(config.tag_field) == config.tag, len(names & value.keys())

    return max(structs, key=known)


def meant_keys(value: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Return unknown keys that resemble an absent key, and that key."""
    absent = sorted(set(known).difference(value))
    meant: dict[str, str] = {}
    for name in value:
        if name not in known and (close := _close(name, absent)) is not None:
            meant[name] = close
            absent.remove(close)
    return meant


def _struct_faults(
    value: dict[str, object], structs: Sequence[type[msgspec.Struct]], key: Key, lines: Lines
) -> Iterator[FileError]:
    struct = struct_of(value, structs)
    tag_field, tag = struct.__struct_config__.tag_field, struct.__struct_config__.tag
    entries = {entry.encode_name: entry for entry in msgspec.structs.fields(struct)}
    own = known = entries.keys() | {tag_field or ""}
    meant = meant_keys(value, own)
    if tag_field is not None and value.get(tag_field) != tag and tag_field not in meant.values():
        what = (
            f"{_shown(value[tag_field])} is an unknown {tag_field}"
            if tag_field in value
            else f"`{tag_field}` is missing"
        )
        tags = ", ".join(str(option.__struct_config__.tag) for option in structs)
        yield lines.error(what, (*key, tag_field), f"write one of {tags}")
        known = own | {entry.encode_name for option in structs for entry in msgspec.structs.fields(option)}
    for name in value:
        if name not in known:
            hint = f"did you mean {meant[name]!r}?" if name in meant else nearest(name, sorted(known - {""}))
            yield lines.error(f"the key {name!r} is unknown", (*key, name), hint)
    written = {meant.get(name, name): name for name in value}
    for name, entry in entries.items():
        if name in written:
            yield from form_faults(value[written[name]], entry.type, (*key, written[name]), lines)
        elif entry.required and known == own:
            yield lines.error(f"`{name}` is missing", key, f"add `{name}: ...`")


def _leaf_faults(value: object, kind: Any, options: Sequence[Any], key: Key, lines: Lines) -> Iterator[FileError]:
    unit = next((option for option in options if isinstance(option, type) and hasattr(option, "accepted")), None)
    try:
        if unit is not None:
            quantity(unit, value)
        else:
            msgspec.convert(value, kind, dec_hook=read_quantity)
    except InputError as error:
        yield lines.error(error.what, key, error.hint)
    except msgspec.ValidationError as error:
        shown = "the value" if any(_is_secret(option) for option in options) else _shown(value)
        yield lines.error(f"{shown} does not fit", key, _wanted(value, options) or str(error))


def _is_secret(option: Any) -> bool:
    """Return True for types marked `Meta(extra={"secret": True})`: a mistaken value may be a key, so no error shows
    it."""
    return get_origin(option) is Annotated and bool((get_args(option)[1].extra or {}).get("secret"))


def _wanted(value: object, options: Sequence[Any]) -> str:
    choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
    limits, noun = "", ""
    for option in options:
        base = get_args(option)[0] if get_origin(option) is Annotated else option
        meta = get_args(option)[1] if get_origin(option) is Annotated else msgspec.Meta()
        if base is bool:
            return "write true or false"
        if base is str:
            if meta.examples:
                return f"write text such as {', '.join(repr(example) for example in meta.examples)}"
            if isinstance(value, str) and meta.pattern:
                return "use letters, digits, `-`, `_` and `.`, and begin with a letter or a digit"
            return "write text; numbers and yes/no words need quotes"
        if base in (int, float):
            noun = "a whole number" if base is int else "a number"
            low = meta.ge if meta.ge is not None else meta.gt
            limits = f" from {low} to {meta.le}" if low is not None and meta.le is not None else ""
            limits = limits if limits or low is None else f" from {low}"
            limits = limits if meta.gt is None else limits.replace(" from", " above").replace(" to ", ", at most ")
            limits += "" if meta.lt is None else f"{' and' if limits else ''} below {meta.lt}"
    wanted = [f"{noun}{limits}"] if noun else []
    wanted += [f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]] if choices else []
    return f"write {' or '.join(wanted)}" if wanted else ""


def _close(name: str, known: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the fix for an unknown name: the nearest known one, else all of them if they are few."""
    close = _close(name, known)
    if close is not None:
        return f"did you mean {close!r}?"
    if not known:
        return ""
    return f"known: {', '.join(known)}" if len(known) <= 16 else f"{len(known)} exist, such as {known[0]!r}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
