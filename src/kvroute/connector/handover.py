"""What the prefill instance tells the decode instance through the router: the dict `kv_transfer_params`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvroute.connector.options import KV_CLASS


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's KV blocks wait. The names are those of vLLM's own pull connector, so that a router that knows
    that one knows this one."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_ports: tuple[int, ...] = ()
    """One port per tensor-parallel rank."""
    remote_block_ids: tuple[tuple[int, ...], ...] = ()
    """Only their number matters here: blocks are asked for by position."""
    remote_num_tokens: int
    remote_prompt: str
    """Digest of the prompt's tokens: another tokenizer or chat template on the decode instance is noticed."""
    remote_instance: str = ""
    tp_size: int = 1
    transfer_mode: str = "pull"
    remote_refetch: bool = True
    """A router may hand this to a second decode instance when the first has died: what is gone is refused, and never
    is another prompt's KV taken for it."""
    traffic_class: str = KV_CLASS
    """May be set by the router: how the packets are marked."""
    checksum: bool | None = None
    """May be set by the router: instead of the decode instance's own option."""

    def port(self, rank: int) -> int:
        """Where rank `rank` listens."""
        return self.remote_ports[rank] if self.remote_ports else self.remote_port

    def params(self) -> dict[str, Any]:
        """As JSON-able dict."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in params.items() if value is not None}


def read_handover(params: Mapping[str, Any]) -> Handover | str:
    """The handover in a decode request's `kv_transfer_params`, or in words what is wrong with it."""
    try:
        return msgspec.convert(dict(params), Handover)
    except msgspec.ValidationError as error:
        return str(error)


def prompt_digest(tokens: Sequence[int] | None) -> str:
    """Of token ids; a prompt without any (embeddings) has none, and matches nothing."""
    if not tokens:
        return ""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=12).hexdigest()
