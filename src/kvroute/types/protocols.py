"""Traits of the prefill/decode protocols. Decisions and checks depend on these and never on a protocol's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

KvProtocol: TypeAlias = Literal["vllm", "mooncake", "sglang", "nixl-push"]
"""Protocol between prefill and decode over HTTP. The decode leg starts after the prefill leg, with the
`kv_transfer_params` of its response (vllm) or with a `transfer_id` that the router created (mooncake), or both legs
start at once (sglang; nixl-push, once a response of the prefill engine has shown its address)."""


class ProtocolTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of one protocol and its engines."""

    concurrent_legs: bool = False
    """Both legs are sent at once, so the decode instance is chosen on arrival."""
    needs_bootstrap: bool = False
    """A prefill engine needs a bootstrap server."""
    early_pull: bool = False
    """A decode engine can fetch the KV cache while it is computed, if the address of the prefill engine is known."""
    prefix_copies: bool = False
    """An engine can fetch a cached prefix from another one."""
    storage_reads: bool = False
    """A prefill engine can begin with blocks that buffer servers have read from the store."""
    decode_prefills: bool = False
    """A decode engine can also compute the prompt."""
    prefill_decodes: bool = False
    """A prefill engine can also generate the whole response."""
    splits_every_format: bool = False
    """Its engines also accept transfer parameters in requests of the Responses API and of Anthropic's Messages API."""
    splits_every_request: bool = False
    """Requests with several sequences can be split into two legs, too."""
    rank_header: bool = False
    """Its engines take the data-parallel rank of a request from the header `X-data-parallel-rank`."""
    emulated: bool = False
    """Emulated engines implement it."""
    returns_params: bool = False
    """The response of the prefill leg contains transfer parameters for the decode leg."""
    writes_kv: bool = False
    """The prefill engine writes the KV cache into blocks that the decode engine has registered. Only this write
    releases the blocks."""
    connector: str = ""
    """The only connector of its engines; empty: there are several."""
    config_paths: tuple[str, ...] = ()
    """Paths on which its engines may return their own configuration, in the order to try."""
    metrics_hint: str = ""
    """How to start its engines with a metrics page."""


_VLLM_CONFIG = ("/server_info?config_format=json",)  # only in vLLM's development mode
_VLLM_METRICS = "vLLM serves the page unless it runs with --disable-log-stats"


TRAITS: Mapping[KvProtocol, ProtocolTraits] = {
    "vllm": ProtocolTraits(
        early_pull=True,
        rank_header=True,
        prefix_copies=True,
        storage_reads=True,
        decode_prefills=True,
        prefill_decodes=True,
        splits_every_format=True,
        emulated=True,
        returns_params=True,
        config_paths=_VLLM_CONFIG,
        metrics_hint=_VLLM_METRICS,
    ),
    "mooncake": ProtocolTraits(
        needs_bootstrap=True,
        rank_header=True,
        decode_prefills=True,
        splits_every_format=True,
        connector="mooncake",
        config_paths=_VLLM_CONFIG,
        metrics_hint=_VLLM_METRICS,
    ),
    "sglang": ProtocolTraits(
        concurrent_legs=True,
        needs_bootstrap=True,
        splits_every_request=True,
        config_paths=("/server_info", "/get_server_info"),
        metrics_hint="start SGLang with --enable-metrics",
    ),
    "nixl-push": ProtocolTraits(
        concurrent_legs=True,
        rank_header=True,
        decode_prefills=True,
        prefill_decodes=True,
        splits_every_format=True,
        returns_params=True,
        writes_kv=True,
        connector="nixl",
        config_paths=_VLLM_CONFIG,
        metrics_hint=_VLLM_METRICS,
    ),
}
