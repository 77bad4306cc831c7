"""What the prefill instance tells the decode instance through the router: the dict `kv_transfer_params`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvroute.connector.options import CONNECTIONS_MAX, KV_CLASS

NOT_YET = -1
"""Instead of a number of tokens: nobody knows yet."""


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's KV blocks wait. The names are those of vLLM's own pull connector, so that a router that knows
    that one knows this one. With `do_remote_decode` besides, the request pulls them, computes the rest of a longer
    prompt and is held itself."""

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
    connections: Annotated[int, msgspec.Meta(ge=0, le=CONNECTIONS_MAX)] = 0
    """May be set by the router, in place of the decode instance's own option if not 0: more for a longer way."""

    @property
    def early(self) -> bool:
        """Whether the prompt may still be to be computed."""
        return self.remote_num_tokens == NOT_YET

    def port(self, rank: int) -> int:
        """Where rank `rank` listens."""
        if self.early and not self.remote_ports:
            return self.remote_port + rank
        return self.remote_ports[rank] if self.remote_ports else self.remote_port

    def params(self) -> dict[str, Any]:
        """As JSON-able dict."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in params.items() if value is not None}


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a router tells a decode instance while the prompt is being computed: ask there, under that name.

    The prefill instance is told the name, too: `{"do_remote_decode": true, "transfer_id": ...}`.
    """

    transfer_id: Annotated[str, msgspec.Meta(min_length=1)]
    """Made up by the router, another one for every attempt."""
    remote_host: str
    remote_port: int
    """Of rank 0; rank r listens r ports above unless `remote_ports` says otherwise."""
    remote_ports: tuple[int, ...] = ()
    remote_instance: str = ""
    tp_size: int = 0
    """0: as here; the connection's greeting compares it anyway."""
    traffic_class: str = KV_CLASS
    checksum: bool | None = None
    connections: Annotated[int, msgspec.Meta(ge=0, le=CONNECTIONS_MAX)] = 0

    def handover(self, tp: int) -> Handover:
        """As if the prompt had been computed; `tp` is the tensor parallelism here."""
        return Handover(
            remote_engine_id="",
            remote_request_id=self.transfer_id,
            remote_host=self.remote_host,
            remote_port=self.remote_port,
            remote_ports=self.remote_ports,
            remote_num_tokens=NOT_YET,
            remote_prompt="",
            remote_instance=self.remote_instance,
            tp_size=self.tp_size or tp,
            traffic_class=self.traffic_class,
            checksum=self.checksum,
            connections=self.connections,
        )


def read_handover(params: Mapping[str, Any], tp: int = 1) -> Handover | str:
    """The handover in a decode request's `kv_transfer_params`, or in words what is wrong with it."""
    try:
        if params.get("transfer_id") and "remote_request_id" not in params:
            return msgspec.convert(dict(params), Announcement).handover(tp)
        return msgspec.convert(dict(params), Handover)
    except msgspec.ValidationError as error:
        return str(error)


def prompt_digest(tokens: Sequence[int] | None) -> str:
    """Of token ids; a prompt without any (embeddings) has none, and matches nothing."""
    if not tokens:
        return ""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=12).hexdigest()
