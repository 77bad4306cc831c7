"""Reads the valid parts of a value with faults of form, so that its other faults can be reported at the same time.

A part that cannot be read is replaced by a placeholder, and its key is recorded: checks that depend on it are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from kvroute_engine.files.form import Key, entry_kinds, kind_options, meant_keys, struct_of
from kvroute_engine.files.units import quantity, read_quantity

T = TypeVar("T")


def salvaged(value: object, kind: type[T], key: Key) -> tuple[T, frozenset[Key]]:
    """Convert `value`, located at `key`, to a `kind` as far as possible.

    Return also the keys at which it holds a placeholder, or a default where the file may mean another value.
    """
    reader = _Salvage()
    return cast(T, reader.read(value, kind, key)), frozenset(reader.unread_keys)


class _Salvage:
    def __init__(self) -> None:
        self.unread_keys: set[Key] = set()
        self._names = count()

    def read(self, value: object, kind: Any, key: Key) -> object:
        """Return the value, or its valid parts if the whole does not fit."""
        try:
            return msgspec.convert(value, kind, dec_hook=read_quantity)
        except msgspec.ValidationError:
            pass
        options = kind_options(kind)
        structs, array, table = entry_kinds(options)
        if array is not None and isinstance(value, list):
            return [self.read(item, get_args(array)[0], (*key, index)) for index, item in enumerate(value)]
        if table is not None and isinstance(value, dict):
            return {name: self.read(item, get_args(table)[1], (*key, name)) for name, item in value.items()}
        if structs and isinstance(value, dict):
            return self._struct(value, struct_of(value, structs), key)
        self.unread_keys.add(key)
        return value if isinstance(value, str) and _base(options[0]) is str else self._placeholder(options)

    def _struct(self, value: Mapping[str, object], struct: type[msgspec.Struct], key: Key) -> msgspec.Struct:
        entries = {entry.encode_name: entry for entry in msgspec.structs.fields(struct)}
        tag_field = struct.__struct_config__.tag_field
        if tag_field is not None and value.get(tag_field) != struct.__struct_config__.tag:
            self.unread_keys.add((*key, tag_field))
        own = entries.keys() | {tag_field or ""}
        meant = meant_keys(value, own)
        written = {meant.get(name, name): name for name in value}
        missing = sum(entry.required and name not in written for name, entry in entries.items())
        # Each unknown key is assumed to be a missing required key; any further unknown key may be a misspelling of any
        # absent key.
        puzzles = sum(name not in own and name not in meant for name in value) > missing
        fields = {}
        for name, entry in entries.items():
            if name in written:
                fields[entry.name] = self.read(value[written[name]], entry.type, (*key, written[name]))
                continue
            if entry.required or puzzles:
                self.unread_keys.add((*key, name))
            if entry.default is not msgspec.NODEFAULT:
                fields[entry.name] = entry.default
            elif entry.default_factory is not msgspec.NODEFAULT:
                fields[entry.name] = entry.default_factory()
            else:
                fields[entry.name] = self._placeholder(kind_options(entry.type))
        return struct(**fields)

    def _placeholder(self, options: Sequence[Any]) -> object:
        """Return a value that fits the type; texts are unique."""
        if type(None) in options:
            return None
        kind = options[0]
        base, origin = _base(kind), get_origin(kind)
        if isinstance(base, type) and issubclass(base, msgspec.Struct):
            return self._struct({}, base, ("",))
        if origin is Literal:
            return get_args(kind)[0]
        if hasattr(base, "accepted"):
            return quantity(base, base.example)
        if base is str:
            return f"?{next(self._names)}"
        if base in (int, float):
            return base(1)
        return (get_origin(base) or base)()


def _base(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
