"""Structs of files whose fields are declared elsewhere as numbers of seconds: in the file they are text with a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from msgspec import NODEFAULT, Struct

from kvroute_engine.files.units import Duration

S = TypeVar("S", bound=Struct)
N = TypeVar("N", bound=Struct)
_UNIT = "_s"


def with_units(key: Callable[[str], str] = str) -> Callable[[type[S]], type[S]]:
    """Return a decorator of a Struct that inherits fields in seconds: it reads `base_s` as a Duration, under the key
    `base`. Numbers that are given in Python become Durations, too.

    Args: `key` returns the key in the file of a field's name without its unit.
    """

    def decorate(plain: type[S]) -> type[S]:
        found = msgspec.structs.fields(plain)
        fields = [field for field in found if field.type is float and field.name.endswith(_UNIT)]
        names = tuple(field.name for field in fields)

        def wrap(self: S) -> None:
            for name in names:
                if not isinstance(value := getattr(self, name), Duration):
                    msgspec.structs.force_setattr(self, name, Duration(value))

        config = plain.__struct_config__
        with_durations: Any = msgspec.defstruct(
            plain.__name__,
            [(field.name, Duration, _field(field, key(field.name.removesuffix(_UNIT)))) for field in fields],
            bases=(plain,),
            module=plain.__module__,
            namespace={"__doc__": plain.__doc__, "__post_init__": wrap},
            frozen=config.frozen,
            kw_only=True,
            tag=config.tag,
            tag_field=config.tag_field,
        )
        return cast("type[S]", with_durations)

    return decorate


def _field(field: msgspec.structs.FieldInfo, key: str) -> Any:
    if field.default is NODEFAULT:
        return msgspec.field(name=key)
    return msgspec.field(name=key, default=Duration(field.default))


def without_units(entry: Struct, kind: type[N]) -> N:
    """Return the values of a Struct of a file as the Struct of numbers, a `kind`, that it inherits."""
    values = {field.name: getattr(entry, field.name) for field in msgspec.structs.fields(kind)}
    return kind(**{name: float(value) if isinstance(value, Duration) else value for name, value in values.items()})
