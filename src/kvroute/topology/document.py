"""YAML text to a ClusterFile with the line of every key: finds all faults of form at once, refuses aliases and tags.

What the values mean together (unknown parents, GPUs used twice, unreachable pairs) is for `check`.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

from kvroute.topology.schema import ClusterFile, read_quantity
from kvroute.topology.units import quantity
from kvroute.types import InputError, InputErrors

Key = tuple[str | int, ...]
_LONGEST_FILE = 64 * 2**20
_TAG = "tag:yaml.org,2002:"
_SHOWN = 60
_DEEPEST = 32


class FileError(InputError):
    """A fault of a cluster file with its `line` (0: not read from a text) and its `field`."""

    def __init__(self, what: str, *, source: str, line: int, field: str, mend: str = "") -> None:
        self.line, self.field = line, field
        place = f"{source}:{line}" if line else source
        super().__init__(what, where=f"{place}: {field}" if field else place, mend=mend)


@dataclass(frozen=True, slots=True)
class Lines:
    """Where each key of a file stands, to name a place in an error; empty for a ClusterFile that was never text."""

    source: str
    of: Mapping[Key, int] = field(default_factory=dict)

    def error(self, what: str, key: Key = (), mend: str = "") -> FileError:
        """A fault at `key`; what a shorthand made is placed at the shorthand."""
        if key and key not in self.of and self.of:
            shorthand = {"pods": "fabric", "racks": "fabric", "nodes": "fabric", "datacenters": "fabric"}
            owner = shorthand.get(str(key[0]), str(key[0]))
            key = next((k for k in (*(key[:n] for n in range(len(key), 0, -1)), (owner,)) if k in self.of), key)
        return FileError(what, source=self.source, line=self._line(key), field=field_text(key), mend=mend)

    def _line(self, key: Key) -> int:
        while key and key not in self.of:
            key = key[:-1]
        return self.of.get(key, 0)


def field_text(key: Key) -> str:
    """`("nodes", 3, "nics")` as people write it: `nodes[3].nics`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def read_document(text: str, source: str) -> tuple[ClusterFile, Lines]:
    """Parse and validate the form of a cluster file.

    Raises:
        InputErrors: every fault of form, each with its line and field.
    """
    value, lines, found = _read_yaml(text, source)
    file = None
    try:
        file = msgspec.convert(value, ClusterFile, dec_hook=read_quantity)
    except msgspec.ValidationError as error:
        known = {fault.field for fault in found}
        found += [fault for fault in _faults(value, ClusterFile, (), lines) if fault.field not in known]
        found = found or [lines.error(str(error))]
    if file is None or found:
        found.sort(key=lambda fault: (fault.line, fault.field))
        raise InputErrors(found)
    return file, lines


def _read_yaml(text: str, source: str) -> tuple[dict[str, object], Lines, list[FileError]]:
    """Plain values, the line of every key, and what YAML allows but a cluster file does not."""
    if len(text) > _LONGEST_FILE:
        raise InputErrors([FileError("the file is larger than 64 MiB", source=source, line=1, field="")])
    try:
        reader = _Reader(text, source)
        value = reader.document()
    except (yaml.YAMLError, UnicodeError) as error:
        raise InputErrors([_syntax_error(error, source)]) from None
    if not isinstance(value, dict):
        what = "the file is empty" if value is None else "the file is not a mapping of keys to values"
        mend = "begin with `name: my-cluster`, `nodes:` and `instances:`"
        raise InputErrors(reader.faults or [FileError(what, source=source, line=1, field="", mend=mend)])
    return value, Lines(source, reader.lines), reader.faults


def _syntax_error(error: Exception, source: str) -> FileError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    line = mark.line + 1 if mark else 1
    mend = "check indentation, colons and quotes near this line"
    return FileError(f"this is not YAML: {what}", source=source, line=line, field="", mend=mend)


class _Reader:
    """Turns YAML events into plain values and remembers lines; events, because composing nodes has no depth limit."""

    def __init__(self, text: str, source: str) -> None:
        self.lines: dict[Key, int] = {(): 1}
        self.faults: list[FileError] = []
        self._source = source
        self._loader = yaml.CSafeLoader(text)
        self._scalars = yaml.constructor.SafeConstructor()

    def document(self) -> object:
        """The value of the only document; None if there is none."""
        self._next()
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        value = self._value(self._next(), ())
        self._next()
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            self._fault("a second document begins here", after, (), "keep one per file, without `---` between")
        return value

    def _value(self, event: yaml.Event, key: Key) -> object:
        if len(key) > _DEEPEST:
            self._fault("it is nested too deeply", event, key[:3], "no section has more than six levels")
            raise InputErrors(self.faults)
        if isinstance(event, yaml.AliasEvent):
            self._fault("an alias (*name) is not read here", event, key, "write the value out")
            return None
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, key)
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._fault(f"the tag {tag!r} is not read here", event, key, "leave the tag out")
        return self._mapping(key) if isinstance(event, yaml.MappingStartEvent) else self._sequence(key)

    def _mapping(self, key: Key) -> object:
        result: dict[str, object] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            name, known = event.value if isinstance(event, yaml.ScalarEvent) else "", len(self.faults)
            place = (*key, name)
            if not isinstance(event, yaml.ScalarEvent) or name == "<<":
                self._fault("a key must be plain text", event, key, "write `key: value`")
                self._value(event, place)
            elif name in result:
                mend = f"it is on line {self.lines[place]} too"
                self._fault(f"the key {name!r} stands here twice", event, place, mend)
            self.lines.setdefault(place, _line(event))
            value = self._value(self._next(), place)
            if value is None and len(self.faults) == known:
                self._fault(f"{name!r} has no value", event, place, "give it one, or remove the key")
            result.setdefault(name, value)
        return result

    def _sequence(self, key: Key) -> object:
        result: list[object] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            place = (*key, len(result))
            self.lines[place] = _line(event)
            result.append(self._value(event, place))
        return result

    def _scalar(self, event: yaml.ScalarEvent, key: Key) -> object:
        text = str(event.value)
        tag = event.tag or self._loader.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
        kind = str(tag).removeprefix(_TAG)
        if kind in ("str", "timestamp", "!", "merge", "value"):
            return text
        if kind in ("int", "float", "bool", "null"):
            try:
                return self._scalars.construct_object(yaml.ScalarNode(tag, text))
            except (ValueError, KeyError, yaml.YAMLError):
                return text
        self._fault(f"the tag {tag!r} is not read here", event, key, "leave the tag out")
        return None

    def _next(self) -> yaml.Event:
        event = self._loader.get_event()
        assert event is not None, "the stream's end was read before"
        return event

    def _fault(self, what: str, event: yaml.Event, key: Key, mend: str) -> None:
        fault = FileError(what, source=self._source, line=_line(event), field=field_text(key), mend=mend)
        self.faults.append(fault)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _faults(value: object, kind: Any, key: Key, lines: Lines) -> Iterator[FileError]:
    """Every fault of `value` against a type of the schema, each at its own key; none where msgspec accepts it."""
    kind, options = _options(kind)
    if value is None and type(None) in options:
        return
    structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
    array = next((option for option in options if get_origin(option) is list), None)
    if array is not None and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, get_args(array)[0], (*key, index), lines)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, item in value.items():
            yield from _faults(item, get_args(kind)[1], (*key, name), lines)
    elif structs and isinstance(value, dict):
        yield from _struct_faults(value, structs, key, lines)
    elif structs or array is not None or get_origin(kind) is dict:
        wanted = " or ".join(
            (["a list of entries"] if array is not None else []) + (["a mapping"] if structs or array is None else [])
        )
        yield lines.error(f"{_shown(value)} is not {wanted}", key, f"write {wanted} here")
    else:
        yield from _leaf_faults(value, kind, options, key, lines)


def _options(kind: Any) -> tuple[Any, Sequence[Any]]:
    """The type and its alternatives: `A | None` gives (A | None, [A, None])."""
    if get_origin(kind) in (Union, types.UnionType):
        return kind, [part for option in get_args(kind) for part in _options(option)[1]]
    return kind, [kind]


def _struct_faults(
    value: dict[str, object], structs: Sequence[type[msgspec.Struct]], key: Key, lines: Lines
) -> Iterator[FileError]:
    tag_field = structs[0].__struct_config__.tag_field
    if tag_field is not None:
        by_tag = {str(option.__struct_config__.tag): option for option in structs}
        tag = value.get(tag_field)
        if not isinstance(tag, str) or tag not in by_tag:
            known = {entry.encode_name for option in structs for entry in msgspec.structs.fields(option)} | {tag_field}
            yield from _unknown_keys(value, known, key, lines)
            what = f"{_shown(tag)} is no {tag_field}" if tag_field in value else f"`{tag_field}` is missing"
            yield lines.error(what, (*key, tag_field), f"write one of {', '.join(by_tag)}")
            return
        structs = [by_tag[tag]]
    entries = {entry.encode_name: entry for entry in msgspec.structs.fields(structs[0])}
    yield from _unknown_keys(value, entries.keys() | {tag_field or ""}, key, lines)
    for name, entry in entries.items():
        if name in value:
            yield from _faults(value[name], entry.type, (*key, name), lines)
        elif entry.required:
            yield lines.error(f"`{name}` is missing", key, f"add `{name}: ...`")


def _unknown_keys(value: Iterable[str], known: Set[str], key: Key, lines: Lines) -> Iterator[FileError]:
    for name in value:
        if name not in known:
            yield lines.error(f"the key {name!r} is unknown", (*key, name), nearest(name, sorted(known - {""})))


def _leaf_faults(value: object, kind: Any, options: Sequence[Any], key: Key, lines: Lines) -> Iterator[FileError]:
    unit = next((option for option in options if isinstance(option, type) and hasattr(option, "accepted")), None)
    try:
        if unit is not None:
            quantity(unit, value)
        else:
            msgspec.convert(value, kind, dec_hook=read_quantity)
    except InputError as error:
        yield lines.error(error.what, key, error.mend)
    except msgspec.ValidationError as error:
        yield lines.error(f"{_shown(value)} does not fit", key, _wanted(value, options) or str(error))


def _wanted(value: object, options: Sequence[Any]) -> str:
    choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
    limits, noun = "", ""
    for option in options:
        base = get_args(option)[0] if get_origin(option) is Annotated else option
        meta = get_args(option)[1] if get_origin(option) is Annotated else msgspec.Meta()
        if base is str:
            if isinstance(value, str) and meta.pattern:
                return "a name has letters, digits, `-`, `_` and `.` and begins with a letter or a digit"
            return "write text; numbers and yes/no words need quotes"
        if base in (int, float):
            noun = "a whole number" if base is int else "a number"
            low = meta.ge if meta.ge is not None else meta.gt
            limits = f" from {low} to {meta.le}" if low is not None and meta.le is not None else ""
            limits = limits if limits or low is None else f" from {low}"
    wanted = [f"{noun}{limits}"] if noun else []
    wanted += [f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]] if choices else []
    return f"write {' or '.join(wanted)}" if wanted else ""


def nearest(name: str, known: Sequence[str]) -> str:
    """How to mend an unknown name: the nearest known one, else all of them if they are few."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    if not known:
        return ""
    return f"known are {', '.join(known)}" if len(known) <= 16 else f"{len(known)} are known, such as {known[0]!r}"


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
