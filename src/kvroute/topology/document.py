"""YAML text to a ClusterFile with the line of every key: finds all faults of form at once, refuses aliases and tags.

What the values mean together (unknown parents, GPUs used twice, unreachable pairs) is for `check`.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
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
    value, lines = _read_yaml(text, source)
    try:
        return msgspec.convert(value, ClusterFile, dec_hook=read_quantity), lines
    except msgspec.ValidationError as error:
        faults = list(_faults(value, ClusterFile, (), lines))
        faults.sort(key=lambda fault: (fault.line, fault.field))
        raise InputErrors(faults or [lines.error(str(error))]) from None


def _read_yaml(text: str, source: str) -> tuple[object, Lines]:
    if len(text) > _LONGEST_FILE:
        raise InputErrors([FileError("the file is larger than 64 MiB", source=source, line=1, field="")])
    loader = yaml.CSafeLoader(text)
    try:
        root = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        raise InputErrors([_syntax_error(error, source)]) from None
    finally:
        loader.dispose()
    mend = "begin with `name: my-cluster`, `nodes:` and `instances:`"
    if root is None:
        raise InputErrors([FileError("the file is empty", source=source, line=1, field="", mend=mend)])
    if not isinstance(root, yaml.MappingNode):
        raise InputErrors(
            [FileError("the file is not a mapping of keys to values", source=source, line=1, field="", mend=mend)]
        )
    reader = _Reader(source)
    value = reader.read(root, ())
    if reader.faults:
        raise InputErrors(reader.faults)
    return value, Lines(source, reader.lines)


def _syntax_error(error: Exception, source: str) -> FileError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is nested too deeply"
    line = mark.line + 1 if mark else 1
    mend = "check indentation, colons and quotes near this line"
    return FileError(f"this is not YAML: {what}", source=source, line=line, field="", mend=mend)


class _Reader:
    """Turns nodes into plain values and remembers lines."""

    def __init__(self, source: str) -> None:
        self.lines: dict[Key, int] = {(): 1}
        self.faults: list[InputError] = []
        self._source = source
        self._seen: set[int] = set()
        self._scalars = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node, key: Key) -> object:
        if not isinstance(node, yaml.ScalarNode):
            if id(node) in self._seen:
                self._fault("an alias (*name) is not read here", node, key, "write the value out")
                return None
            self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, key)
        return self._scalar(node, key)

    def _mapping(self, node: yaml.MappingNode, key: Key) -> object:
        if node.tag != f"{_TAG}map":
            self._fault(f"the tag {node.tag!r} is not read here", node, key, "leave the tag out")
        result: dict[str, object] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag == f"{_TAG}merge":
                self._fault("a key must be plain text", name_node, key, "write `key: value`")
                continue
            name = str(name_node.value)
            if name in result:
                first = self.lines[(*key, name)]
                self._fault(
                    f"the key {name!r} stands here twice", name_node, (*key, name), f"it is on line {first} too"
                )
                continue
            self.lines[(*key, name)] = name_node.start_mark.line + 1
            result[name] = self.read(value_node, (*key, name))
        return result

    def _sequence(self, node: yaml.SequenceNode, key: Key) -> object:
        if node.tag != f"{_TAG}seq":
            self._fault(f"the tag {node.tag!r} is not read here", node, key, "leave the tag out")
        result = []
        for index, item in enumerate(node.value):
            self.lines[(*key, index)] = item.start_mark.line + 1
            result.append(self.read(item, (*key, index)))
        return result

    def _scalar(self, node: yaml.Node, key: Key) -> object:
        if node.tag in (f"{_TAG}str", f"{_TAG}timestamp"):
            return str(node.value)
        if node.tag.removeprefix(_TAG) in ("int", "float", "bool", "null"):
            try:
                return self._scalars.construct_object(node)
            except (ValueError, KeyError, yaml.YAMLError):
                return str(node.value)
        self._fault(f"the tag {node.tag!r} is not read here", node, key, "leave the tag out")
        return None

    def _fault(self, what: str, node: yaml.Node, key: Key, mend: str) -> None:
        line = node.start_mark.line + 1
        self.faults.append(FileError(what, source=self._source, line=line, field=field_text(key), mend=mend))


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
    struct = structs[0]
    if tag_field is not None:
        by_tag = {str(option.__struct_config__.tag): option for option in structs}
        if value.get(tag_field) not in by_tag:
            what = (
                f"{_shown(value[tag_field])} is no {tag_field}" if tag_field in value else f"`{tag_field}` is missing"
            )
            place = (*key, tag_field) if tag_field in value else key
            yield lines.error(what, place, f"write one of {', '.join(by_tag)}")
            return
        struct = by_tag[str(value[tag_field])]
    known = {entry.encode_name: entry for entry in msgspec.structs.fields(struct)}
    for name in value:
        if name not in known and name != tag_field:
            yield lines.error(f"the key {name!r} is unknown", (*key, name), nearest(name, sorted(known)))
    for name, entry in known.items():
        if name in value:
            yield from _faults(value[name], entry.type, (*key, name), lines)
        elif entry.required:
            yield lines.error(f"`{name}` is missing", key, f"add `{name}: ...`")


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
