"""The prefill/decode protocols of engines: functions from a request to the bodies of its prefill and its decode leg.

The client's fields stay unchanged, byte for byte, except those that this module sets.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import Raw

from kvroute.serve.api.json_fields import Fields
from kvroute.serve.api.requests import Completion, Kind
from kvroute.serve.engines.pd_protocol import (
    KvHandshake,
    KvSource,
    NoTransferParams,
    PdProtocol,
    ProtocolError,
)
from kvroute.types import TRAITS, KvProtocol

QUERY_PATH = b"/query"
"""Path on which a Mooncake bootstrap server returns the ids of its engines."""
ROOM_LIMIT = 1 << 63
_RANK_DIGITS_MAX = 18

_TRUE, _FALSE, _ONE = Raw(b"true"), Raw(b"false"), Raw(b"1")
_ONE_TOKEN: Mapping[Kind, Fields] = {
    # With `min_tokens`, the first token does not end the output: some connectors transfer nothing after a stop token.
    "completions": {"max_tokens": _ONE, "min_tokens": _ONE},
    "chat": {"max_tokens": _ONE, "max_completion_tokens": _ONE, "min_tokens": _ONE},
    "responses": {"max_output_tokens": _ONE, "ignore_eos": _TRUE, "store": _FALSE},
    "messages": {"max_tokens": _ONE},
}
"""Fields that limit a prefill leg to one token, which is not used."""
_NOT_IN_PREFILL: Mapping[Kind, tuple[str, ...]] = {
    "completions": ("stream_options", "n"),
    "chat": ("stream_options", "n"),
    "responses": ("stream_options", "stop_token_ids", "enable_response_messages"),
    "messages": (),
}
"""Fields that prefill legs do not have. No prompt depends on them."""
_PULL = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's pull (NIXL and similar connectors): the prefill response names the blocks, and the decode engine fetches
    them. kvroute's connector also supports an early pull: both engines receive the transfer id and the address to fetch
    it from."""

    concurrent_legs: ClassVar[bool] = TRAITS["vllm"].concurrent_legs
    resolves_engine_id: ClassVar[bool] = False
    returns_params: ClassVar[bool] = TRAITS["vllm"].returns_params

    def handshake(self, source: KvSource, draw: Callable[[], int], *, early: bool) -> KvHandshake | None:
        if not early:
            return _PLAIN
        return KvHandshake(transfer_id=_id(draw), bootstrap=source.bootstrap, early=True, instance=source.name)

    def aggregated_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(
        self, completion: Completion, handshake: KvHandshake, prefix: Raw | None = None, storage: Raw | None = None
    ) -> bytes:
        if prefix is None and storage is None and not handshake.early:
            return _encode(_one_token(completion, _PULL))
        there = {} if prefix is None else msgspec.json.decode(prefix, type=dict[str, Raw])
        there.pop("remote_prefill_cached_tokens", None)  # otherwise the engine would report it as its own
        name = {"transfer_id": handshake.transfer_id} if handshake.early else {}
        staged = {"storage": storage} if storage is not None else {}
        params = {**there, "do_remote_decode": True, "do_remote_prefill": prefix is not None, **name, **staged}
        return _encode(_one_token(completion, Raw(_encode(params))))

    def transfer_params(self, reply: bytes) -> Raw | None:
        return _transfer_params(reply)

    def peer(self, params: Raw | None) -> Raw | None:
        return None

    def allows_refetch(self, params: Raw | None) -> bool:
        """Return True only if the connector allows it: NIXL reads blocks by number, and they may hold another prompt by
        then."""
        try:
            return params is not None and msgspec.json.decode(params, type=_Refetch).remote_refetch
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False

    def decode_body(self, completion: Completion, handshake: KvHandshake, params: Raw | None) -> bytes:
        if params is None:
            params = _early_params(handshake)
        return _encode({**completion.fields, "kv_transfer_params": params})


@dataclass(frozen=True, slots=True)
class Mooncake:
    """vLLM's Mooncake connector: the gateway generates the id of the transfer and sends it to both engines."""

    concurrent_legs: ClassVar[bool] = TRAITS["mooncake"].concurrent_legs
    resolves_engine_id: ClassVar[bool] = True
    returns_params: ClassVar[bool] = TRAITS["mooncake"].returns_params

    def handshake(self, source: KvSource, draw: Callable[[], int], *, early: bool) -> KvHandshake | None:
        if not source.engine_id:
            return None
        return KvHandshake(transfer_id=_id(draw), bootstrap=source.bootstrap, engine_id=source.engine_id)

    def aggregated_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(
        self, completion: Completion, handshake: KvHandshake, prefix: Raw | None = None, storage: Raw | None = None
    ) -> bytes:
        assert prefix is None, "this protocol does not copy prefixes"
        assert storage is None, "this protocol reads nothing from a store"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": handshake.transfer_id}
        return _encode(_one_token(completion, Raw(_encode(params))))

    def transfer_params(self, reply: bytes) -> Raw | None:
        """Return None: the response has no transfer parameters."""
        return None

    def peer(self, params: Raw | None) -> Raw | None:
        return None

    def allows_refetch(self, params: Raw | None) -> bool:
        return False

    def decode_body(self, completion: Completion, handshake: KvHandshake, params: Raw | None) -> bytes:
        if not (handshake.bootstrap and handshake.engine_id):
            raise ProtocolError("has no bootstrap address or engine id yet")
        own = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": handshake.transfer_id,
            "remote_bootstrap_addr": f"http://{handshake.bootstrap}",
            "remote_engine_id": handshake.engine_id,
        }
        return _encode({**completion.fields, "kv_transfer_params": own})


@dataclass(frozen=True, slots=True)
class Sglang:
    """SGLang's bootstrap: both engines receive the same body, which names one room (transfer id) per sequence.

    An SGLang prefill engine cannot serve a request alone, so requests with several sequences are split, too.
    Log-probabilities of the prompt stay in the prefill engine and are missing from the response.
    """

    concurrent_legs: ClassVar[bool] = TRAITS["sglang"].concurrent_legs
    resolves_engine_id: ClassVar[bool] = False
    returns_params: ClassVar[bool] = TRAITS["sglang"].returns_params

    def handshake(self, source: KvSource, draw: Callable[[], int], *, early: bool) -> KvHandshake | None:
        return KvHandshake(room=draw(), bootstrap=source.bootstrap)

    def aggregated_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(
        self, completion: Completion, handshake: KvHandshake, prefix: Raw | None = None, storage: Raw | None = None
    ) -> bytes:
        assert prefix is None, "this protocol does not copy prefixes"
        assert storage is None, "this protocol reads nothing from a store"
        return _encode(completion.fields | _rooms(completion.n * completion.prompts, handshake))

    def transfer_params(self, reply: bytes) -> Raw | None:
        """Return None: the prefill response is not used; the decode engine responds by itself."""
        return None

    def peer(self, params: Raw | None) -> Raw | None:
        return None

    def allows_refetch(self, params: Raw | None) -> bool:
        return False

    def decode_body(self, completion: Completion, handshake: KvHandshake, params: Raw | None) -> bytes:
        return self.prefill_body(completion, handshake)


@dataclass(frozen=True, slots=True)
class NixlPush:
    """vLLM's NixlPushConnector: the decode engine registers its blocks with the prefill engine, which writes the KV
    cache into them.

    A registration may arrive before the prompt is computed, so both legs are sent at once. It needs the address and id
    of the prefill engine, which only responses of that engine contain; until they are known, the decode leg waits for
    the prefill's response. The engines find each other's half of a request by its X-Request-Id. Each attempt has one of
    its own, because a client may repeat an id, and a retry would find the registration of an earlier attempt.
    """

    concurrent_legs: ClassVar[bool] = TRAITS["nixl-push"].concurrent_legs
    resolves_engine_id: ClassVar[bool] = False
    returns_params: ClassVar[bool] = TRAITS["nixl-push"].returns_params

    def handshake(self, source: KvSource, draw: Callable[[], int], *, early: bool) -> KvHandshake | None:
        return KvHandshake(attempt=_id(draw).encode(), peer=source.peer)

    def aggregated_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(
        self, completion: Completion, handshake: KvHandshake, prefix: Raw | None = None, storage: Raw | None = None
    ) -> bytes:
        assert prefix is None, "this protocol does not copy prefixes"
        assert storage is None, "this protocol reads nothing from a store"
        return _encode(_one_token(completion, _PULL))

    def transfer_params(self, reply: bytes) -> Raw | None:
        return _transfer_params(reply)

    def peer(self, params: Raw | None) -> Raw | None:
        assert params is not None
        try:
            fields = msgspec.json.decode(params, type=Fields)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"sent invalid kv_transfer_params: {error}") from None
        missing = [name for name in _PEER_REQUIRED if name not in fields]
        if missing:
            raise ProtocolError(f"sent kv_transfer_params without {missing[0]}; check that it has NixlPushConnector")
        return Raw(_encode({name: value for name, value in fields.items() if name not in _OF_ONE_REQUEST}))

    def allows_refetch(self, params: Raw | None) -> bool:
        return False

    def decode_body(self, completion: Completion, handshake: KvHandshake, params: Raw | None) -> bytes:
        if params is None and handshake.peer is not None:
            fields = msgspec.json.decode(handshake.peer, type=Fields)
            fields["remote_request_id"] = Raw(_encode(handshake.attempt.decode()))
            params = Raw(_encode(fields))
        if params is None:
            raise ProtocolError("sent no transfer parameters")
        return _encode({**completion.fields, "kv_transfer_params": params})


_PLAIN = KvHandshake()
_PEER_REQUIRED = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
"""Transfer parameters that a registration needs (NixlPushConnector)."""
_OF_ONE_REQUEST = frozenset({"remote_block_ids", "remote_request_id", "remote_num_tokens"})
"""Transfer parameters that differ from request to request. The prefill engine does not need them back."""


def _id(draw: Callable[[], int]) -> str:
    return uuid.UUID(int=draw() << 1 | 1).hex


PROTOCOLS: dict[KvProtocol, PdProtocol] = {
    "vllm": Vllm(),
    "mooncake": Mooncake(),
    "sglang": Sglang(),
    "nixl-push": NixlPush(),
}


def engine_id(reply: bytes, rank: int | None = None) -> str:
    """Return the engine's id from a Mooncake bootstrap server's response to `GET /query`.

    Args:
        reply: body of the response.
        rank: data-parallel rank, counted from 0 in the ranks of this server; None: the first one that is registered.

    Raises:
        ProtocolError: the response names no engine, or not this rank.
    """
    try:
        ranks = msgspec.json.decode(reply, type=dict[str, _Rank])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"has a bootstrap server that sent an invalid response: {error}") from None
    found = [ranks[rank].engine_id for rank in sorted(ranks, key=_rank_order) if ranks[rank].engine_id]
    if not found:
        raise ProtocolError("has a bootstrap server without a registered engine")
    if rank is None:
        return found[0]
    own = ranks.get(str(rank), _Rank()).engine_id
    if not own:
        raise ProtocolError(f"has a bootstrap server on which data-parallel rank {rank} is not registered")
    return own


class _Rank(msgspec.Struct):
    engine_id: str = ""


def _rank_order(rank: str) -> tuple[int, str]:
    numeric = rank.isascii() and rank.isdigit() and len(rank) <= _RANK_DIGITS_MAX
    return (int(rank) if numeric else ROOM_LIMIT, rank)


class _Reply(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _Refetch(msgspec.Struct):
    remote_refetch: bool = False


_REPLY = msgspec.json.Decoder(_Reply)


def with_one_token(completion: Completion) -> Completion:
    """Return the request limited to one output token, without streaming."""
    fields = _one_token(completion, Raw(b"null"))
    del fields["kv_transfer_params"]
    return msgspec.structs.replace(completion, fields=fields, stream=False, max_tokens=1)


def _one_token(completion: Completion, params: Raw) -> Fields:
    """Return the request's fields, limited to one output token, without streaming."""
    fields = {**completion.fields, "stream": _FALSE, **_ONE_TOKEN[completion.kind], "kv_transfer_params": params}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    for name in _NOT_IN_PREFILL[completion.kind]:
        fields.pop(name, None)
    if completion.kind == "messages" and "tool_choice" in fields:
        fields["tool_choice"] = _unnamed(fields["tool_choice"])
    return fields


def _unnamed(choice: Raw) -> Raw:
    """Return a `tool_choice` of the Messages API that names no tool: vLLM parses the output of a named tool as JSON,
    and one token is no JSON. Prompts do not depend on it."""
    try:
        fields = msgspec.json.decode(choice, type=Fields | None) or {}
    except (msgspec.MsgspecError, RecursionError):
        return choice  # the engine rejects it
    if bytes(fields.get("type", b"")) != b'"tool"':
        return choice
    return Raw(_encode({name: value for name, value in fields.items() if name != "name"} | {"type": "any"}))


def _transfer_params(reply: bytes) -> Raw:
    try:
        params = _REPLY.decode(reply).kv_transfer_params
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"sent an invalid response: {error}") from None
    if bytes(params)[:1] != b"{":
        raise NoTransferParams("sent a response without kv_transfer_params; check that it has a KV connector")
    return params


def _early_params(handshake: KvHandshake) -> Raw:
    """Return the transfer parameters of an early pull, for which there is no prefill response yet."""
    if not handshake.early:
        raise ProtocolError("sent no transfer parameters")
    host, port = _address(handshake)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": handshake.transfer_id,
        "remote_host": host.strip("[]"),
        "remote_port": port,
        "remote_instance": handshake.instance,
    }
    return Raw(_encode(params))


def _address(handshake: KvHandshake) -> tuple[str, int]:
    host, colon, port = handshake.bootstrap.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise ProtocolError(f"has the bootstrap address {handshake.bootstrap!r}, which is not host:port")
    return host, int(port)


def _rooms(sequences: int, handshake: KvHandshake) -> Fields:
    host, port = _address(handshake)
    rooms = [(handshake.room + index) % ROOM_LIMIT for index in range(sequences)]
    single = sequences == 1
    return {
        "bootstrap_host": Raw(_encode(host if single else [host] * sequences)),
        "bootstrap_port": Raw(_encode(port if single else [port] * sequences)),
        "bootstrap_room": Raw(_encode(rooms[0] if single else rooms)),
    }
