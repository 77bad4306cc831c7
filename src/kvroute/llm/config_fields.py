"""Fields of a Hugging Face config.json: the names under which models give them, and checks of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvroute.types import InputError

LAYER_COUNT = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields by name; a null counts as missing."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that is present, else None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the positive whole number under the first of `names` that is present."""
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is not None:
                return default
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise self.error(f"the field {self.prefix}{names[0]} is missing", f"add `{names[0]}`{others}")
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{self.prefix}{name} is {value!r}", "give a whole number above 0")
        return value

    def inner(self, name: str) -> Fields:
        """Return the fields of an object."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.error(f"{self.prefix}{name} is {value!r}", "give an object of fields")
        return Fields(value, self.where, f"{self.prefix}{name}.")

    def sequence(self, name: str, length: int) -> list[Any]:
        """Return the first `length` entries of a list."""
        value = self.values[name]
        if not isinstance(value, list) or len(value) < length:
            raise self.error(f"{self.prefix}{name} does not list {length} layers", "give one entry per layer")
        return value[:length]

    def error(self, what: str, hint: str = "") -> InputError:
        """Return an error that names the file."""
        return InputError(what, where=self.where, hint=hint)


def kv_heads(fields: Fields, heads: int) -> int:
    """Return the number of KV heads."""
    if isinstance(fields.get("attn_config"), Mapping):  # MPT, DBRX
        return fields.inner("attn_config").count("kv_n_heads", default=heads)
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    return fields.count(*KV_HEADS, default=heads)


def head_dim(fields: Fields, heads: int) -> int:
    """Return the dimension of a head."""
    if fields.get("head_dim", "kv_channels") is not None:
        return fields.count("head_dim", "kv_channels")
    hidden = fields.count(*HIDDEN)
    if hidden % heads:
        raise fields.error(f"hidden size {hidden} is not divisible by {heads} heads", "add `head_dim`")
    return hidden // heads
