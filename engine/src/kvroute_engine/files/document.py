"""Parses YAML text to Structs with the line of every key: finds all faults of form at once, rejects aliases and tags.

`check` tests the values against each other (unknown parents, GPUs used twice, unreachable pairs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import yaml

from kvroute_engine import renamed
from kvroute_engine.errors import InputError, InputErrors
from kvroute_engine.files.form import FileError, Key, Lines, field_text, form_faults
from kvroute_engine.files.salvage import salvaged
from kvroute_engine.files.units import read_quantity

T = TypeVar("T")
_LONGEST_FILE = 64 * 2**20
_TAG = "tag:yaml.org,2002:"
_DEEPEST = 32
_NUMBER = re.compile(r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)[eE][-+]?\d{1,3}", re.ASCII)
"""A number with an exponent; YAML 1.1 only knows those with a point and a sign, such as 1.0e+9."""
_WHOLE_MOST = 1e15
_KINDS = (
    ("a cluster file", "kvroute topology check FILE", {"instances", "nodes", "fabric", "racks"}),
    ("a plan file", "kvroute plan prfaas FILE", {"traffic", "kv", "hardware", "clusters"}),
    ("a plan file", "kvroute plan dualpath FILE", {"kv", "prefill", "decode", "turn", "compute"}),
    ("transfers over links", "kvroute flows FILE", {"links", "flows", "classes"}),
    ("a scenario", "kvroute simulate CLUSTER --scenario FILE", {"changes", "fluctuations", "transfer", "copies"}),
)
"""Files that kvroute reads: name, command and the keys that identify the kind."""
_CLUSTER_BEGINS = "begin with `name: my-cluster`, `nodes:` and `instances:`"


Overlay: TypeAlias = Callable[[dict[str, object]], dict[str, object]]
"""Returns the plain values of a file with those of the command line."""
Short: TypeAlias = Callable[[object, Lines], tuple[object, Lines, list[FileError]]]
"""Returns the plain value of a section without short forms, its lines with the values that this moved, and faults."""


def read_document(
    text: str, source: str, kind: type[T], overlay: Overlay = lambda plain: plain
) -> tuple[T, Lines, list[FileError]]:
    """Read a cluster file as a `kind`, as far as possible; return it with its lines and every fault of form, each with
    line and field. The lines record which values are placeholders.

    Raises:
        InputErrors: the text is no YAML mapping, or a file of another kind.
    """
    value, lines, found = _read_cluster(text, source)
    return _salvaged(overlay(value), kind, (), lines, found)


def read_section(text: str, source: str, key: str, kind: type[T]) -> tuple[T, Lines]:
    """Read one top-level mapping of a cluster file as a `kind` (a Struct whose fields all have defaults), and the lines
    of the whole file. An absent section is `kind()`. The rest of the file is not checked.

    Raises:
        InputErrors: every fault of the section's form, each with its line and field; or the text is no YAML mapping.
    """
    section, lines, found = salvage_section(text, source, key, kind)
    if found:
        raise InputErrors(found)
    return section, lines


def salvage_section(
    text: str, source: str, key: str, kind: type[T], short: Short = lambda value, lines: (value, lines, [])
) -> tuple[T, Lines, list[FileError]]:
    """Read as `read_section` does, as far as possible; return also every fault of the section's form. Args: `short`
    replaces short forms of the section's plain value.

    Raises:
        InputErrors: the text is no YAML mapping.
    """
    value, lines, found = _read_cluster(text, source)
    inside = [fault for fault in found if fault.field == key or fault.field.startswith((f"{key}.", f"{key}["))]
    if key not in value and not inside:
        return kind(), lines, []
    section, lines, faults = short(value.get(key), lines)
    return _salvaged(section, kind, (key,), lines, inside + faults)


def read_mapping(text: str, source: str, kind: type[T], begin: str) -> tuple[T, Lines]:
    """Read a whole file that is one mapping, as a `kind`; `begin` describes the start of such a file.

    Raises:
        InputErrors: every fault of form, each with its line and field.
    """
    value, lines, found = _read_yaml(text, source, begin)
    result, lines, found = _salvaged(value, kind, (), lines, found)
    if found:
        raise InputErrors(found)
    return result, lines


def read_list(text: str, source: str, kind: type[T], begin: str) -> tuple[list[T], Lines]:
    """Read a whole file that is one list, as values of a `kind`; `begin` describes the start of such a file. An empty
    file is an empty list.

    Raises:
        InputErrors: every fault of form, each with its line and field.
    """
    value, lines, found = _read_value(text, source)
    if value is None and not found:
        return [], lines
    if not isinstance(value, list) and not found:
        found = [lines.error("the file is not a list", (), begin)]
    if found:
        raise InputErrors(found)
    result, lines, found = _salvaged(value, list[kind], (), lines, found)  # type: ignore[valid-type]
    if found:
        raise InputErrors(found)
    return result, lines


def read_mapping_file(path: Path, kind: type[T], begin: str) -> tuple[T, Lines]:
    """Read a file as `read_mapping` does.

    Raises:
        InputError: the file cannot be read.
        InputErrors: every fault of form, each with its line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path), hint="give a YAML file") from error
    except UnicodeDecodeError as error:
        raise InputError("the file is not UTF-8 text", where=str(path), hint="give a YAML file") from error
    return read_mapping(text, str(path), kind, begin)


def read_plain(text: str, source: str) -> dict[str, object]:
    """Read a cluster file as plain values, without checks of their form.

    Raises:
        InputErrors: the text is no YAML mapping, or uses YAML features that are not supported.
    """
    value, _, found = _read_cluster(text, source)
    if found:
        raise InputErrors(found)
    return value


def other_kind(text: str, kind: type[msgspec.Struct]) -> tuple[str, str] | None:
    """Return which other kind of file a YAML text looks like, and the command that reads it; None if no kind fits
    better.

    Raises:
        InputErrors: the text is no YAML mapping.
    """
    return _other_kind(_read_yaml(text, "", "")[0], kind)


def _salvaged(
    value: object, kind: type[T], key: Key, lines: Lines, found: list[FileError]
) -> tuple[T, Lines, list[FileError]]:
    """Convert `value`, located at `key`, to a `kind`; return all faults, including those in `found`, in file order."""
    try:
        result, unread_keys = msgspec.convert(value, kind, dec_hook=read_quantity), frozenset[Key]()
    except msgspec.ValidationError as error:
        if not key and (other := _other_kind(value, kind)):
            raise InputErrors([FileError(other[0], source=lines.source, line=1, field="", hint=other[1])]) from None
        known = {(fault.line, fault.field) for fault in found}
        wrong = list(form_faults(value, kind, key, lines))
        if _read_as_numbers(value, key, lines, {fault.field for fault in wrong}):
            return _salvaged(value, kind, key, replace(lines, numbers={}), found)
        found = found + [fault for fault in wrong if (fault.line, fault.field) not in known]
        found = found or [lines.error(str(error), key)]
        result, unread_keys = salvaged(value, kind, key)
    return result, replace(lines, unread_keys=unread_keys), sorted(found, key=lambda fault: (fault.line, fault.field))


def _read_as_numbers(value: object, base: Key, lines: Lines, wrong: Set[str]) -> bool:
    """Replace text by the number that it is, in the fields that are `wrong` as text; return whether there was any.
    Elsewhere the same text may be a name. Args: `base`: the key of `value`."""
    inside = [key for key in lines.numbers if key[: len(base)] == base and len(key) > len(base)]
    found = [key for key in inside if field_text(lines.written(key)) in wrong]
    for key in found:
        parent: Any = value
        for part in key[len(base) : -1]:
            parent = parent[part]
        parent[key[-1]] = lines.numbers[key]
    return bool(found)


def _other_kind(value: object, kind: type) -> tuple[str, str] | None:
    """Return which other kind of file `value` looks like, and the command that reads it; None if no kind fits
    better."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return None
    keys = set(value) if isinstance(value, dict) else set()
    own = len(keys & ({field.encode_name for field in msgspec.structs.fields(kind)} - {"name"}))
    name, command, tells = max(_KINDS, key=lambda other: len(keys & other[2]))
    if len(keys & tells) > own:
        return f"this looks like {name}", f"read it with `{command}`"
    return None


def _read_cluster(text: str, source: str) -> tuple[dict[str, object], Lines, list[FileError]]:
    """Return the plain values of a cluster file, with keys of the previous version under their present names."""
    value, lines, found = _read_yaml(text, source, _CLUSTER_BEGINS)
    old: dict[Key, Key] = {
        key: present
        for key, name in renamed.CLUSTER_FILE.items()
        if key in lines.of and (present := (*key[:-1], name)) not in lines.of
    }
    if not old:
        return value, lines, found
    hint = "`kvroute topology check --write` renames it in the file"
    outdated = tuple(lines.error(f"is now called `{new[-1]}`", key, hint) for key, new in old.items())
    renamed.rename_keys(value, renamed.CLUSTER_FILE)
    of = {old.get(key, key): line for key, line in lines.of.items()}
    numbers = {old.get(key, key): number for key, number in lines.numbers.items()}
    return value, replace(lines, of=of, numbers=numbers, outdated=outdated), found


def with_present_names(text: str, source: str) -> tuple[str, list[FileError]]:
    """Return a cluster file in which the keys of the previous version have their present names, and the warnings of
    these keys. Comments and layout stay; a key that the file also has under its present name stays, too.

    Raises:
        InputErrors: the text is no YAML mapping, or uses YAML features that are not supported.
    """
    _, lines, found = _read_cluster(text, source)
    if found:
        raise InputErrors(found)
    keys = dict[Key, tuple[int, int]]()
    _Reader(text, source, keys).document()
    spans = [
        (keys[key], key[-1], name)
        for key, name in renamed.CLUSTER_FILE.items()
        if key in keys and (*key[:-1], name) not in keys
    ]
    for (start, end), old, name in sorted(spans, reverse=True):
        text = text[:start] + text[start:end].replace(old, name) + text[end:]
    return text, list(lines.outdated)


def _read_yaml(text: str, source: str, begin: str) -> tuple[dict[str, object], Lines, list[FileError]]:
    """Return plain values, the line of every key, and unsupported YAML features; `begin` is the advice for an empty
    file."""
    value, lines, faults = _read_value(text, source)
    if not isinstance(value, dict):
        what = "the file is empty" if value is None else "the file is not a mapping of keys to values"
        raise InputErrors(faults or [FileError(what, source=source, line=1, field="", hint=begin)])
    return value, lines, faults


def _read_value(text: str, source: str) -> tuple[object, Lines, list[FileError]]:
    """Return the value of the only document, None if there is none, the line of every key, and unsupported YAML
    features."""
    if len(text) > _LONGEST_FILE:
        raise InputErrors([FileError("the file is larger than 64 MiB", source=source, line=1, field="")])
    try:
        reader = _Reader(text, source)
        value = reader.document()
    except (yaml.YAMLError, UnicodeError) as error:
        raise InputErrors([_syntax_error(error, source)]) from None
    return value, Lines(source, reader.lines, numbers=reader.numbers), reader.faults


def _syntax_error(error: Exception, source: str) -> FileError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    line = mark.line + 1 if mark else 1
    hint = "check indentation, colons and quotes near this line"
    return FileError(f"this is not YAML: {what}", source=source, line=line, field="", hint=hint)


class _Reader:
    """Converts YAML events to plain values and records lines. It uses events because composing nodes has no depth
    limit."""

    def __init__(self, text: str, source: str, keys: dict[Key, tuple[int, int]] | None = None) -> None:
        """Args: `keys` gets the position of each key's name in the text, as start and end; None: not needed."""
        self._keys = keys
        self.lines: dict[Key, int] = {(): 1}
        self.numbers: dict[Key, float] = {}
        """See `Lines.numbers`."""
        self.faults: list[FileError] = []
        self._source = source
        self._loader = yaml.CSafeLoader(text)
        self._scalars = yaml.constructor.SafeConstructor()

    def document(self) -> object:
        """Return the value of the only document; None if there is none."""
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
            self._fault("the nesting is too deep", event, key[:3], "use at most six levels")
            raise InputErrors(self.faults)
        if isinstance(event, yaml.AliasEvent):
            self._fault("aliases (*name) are not supported", event, key, "write the value itself")
            return None
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, key)
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._fault(f"the tag {tag!r} is not supported", event, key, "remove the tag")
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
                hint = f"its first definition is on line {self.lines[place]}"
                self._fault(f"the key {name!r} is defined twice", event, place, hint)
            self.lines.setdefault(place, _line(event))
            if self._keys is not None and event.start_mark and event.end_mark:
                self._keys[place] = event.start_mark.index, event.end_mark.index
            value = self._value(self._next(), place)
            if value is None and len(self.faults) == known:
                self._fault(f"{name!r} has no value", event, place, "give a value or remove the key")
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
            if event.implicit[0] and _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
                self.numbers[key] = int(number) if number.is_integer() and abs(number) < _WHOLE_MOST else number
            return text
        if kind in ("int", "float", "bool", "null"):
            try:
                return self._scalars.construct_object(yaml.ScalarNode(tag, text))
            except (ValueError, LookupError, OverflowError, yaml.YAMLError):  # such as `!!int ""`
                return text
        self._fault(f"the tag {tag!r} is not supported", event, key, "remove the tag")
        return None

    def _next(self) -> yaml.Event:
        event = self._loader.get_event()
        assert event is not None, "the stream's end was read before"
        return event

    def _fault(self, what: str, event: yaml.Event, key: Key, hint: str) -> None:
        fault = FileError(what, source=self._source, line=_line(event), field=field_text(key), hint=hint)
        self.faults.append(fault)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1
