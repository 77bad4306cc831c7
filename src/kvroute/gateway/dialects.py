"""How prefill and decode engines are told of each other: pure functions from a request to the body of each leg.

What the client sent stays byte for byte; only the fields named here are set, and headers that belong to one
connection do not cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.gateway.fields import Fields
from kvroute.gateway.openai import Completion
from kvroute.types import KvProtocol

Headers: TypeAlias = list[tuple[bytes, bytes]]

QUERY_PATH = b"/query"
"""Where a Mooncake bootstrap server tells its engines' ids."""
ROOM_LIMIT = 1 << 63

_TRUE, _FALSE, _ONE = Raw(b"true"), Raw(b"false"), Raw(b"1")
_PULL = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    }
)
_OUR_OWN = _HOP_BY_HOP | {b"host", b"expect", b"accept-encoding"}

_encode = msgspec.json.Encoder().encode


class DialectError(Exception):
    """An engine's answer, or its endpoint, lacks what the other leg needs; the text goes on after the engine's name."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and under which name the two legs of one request meet; each protocol reads its part."""

    transfer_id: str = ""
    """Made up by the gateway (mooncake)."""
    room: int = 0
    """Drawn by the caller, 0 to 2^63-1 (sglang)."""
    bootstrap: str = ""
    """`host:port` of the prefill engine's bootstrap server (mooncake, sglang)."""
    engine_id: str = ""
    """Of the prefill engine, from its bootstrap server (mooncake)."""


class Dialect(Protocol):
    """One way to split a request into a prefill and a decode leg."""

    @property
    def joint(self) -> bool:
        """Both legs are sent at once, so the decode instance is chosen on arrival."""

    def hands_over(self, completion: Completion) -> bool:
        """Whether the protocol can split this request at all; otherwise one instance does it alone."""

    def alone_body(self, completion: Completion) -> bytes:
        """Body for an instance that computes prefill and decode itself."""

    def prefill_body(self, completion: Completion, meeting: Meeting) -> bytes:
        """Body of the prefill leg.

        Raises:
            DialectError: the meeting lacks what the engine needs.
        """

    def check(self, reply: bytes) -> None:
        """Raises DialectError if `reply`, the prefill leg's answer, lacks what the decode leg needs."""

    def refetches(self, reply: bytes | None) -> bool:
        """Whether a second decode engine may be sent for the KV that a first one had begun to fetch."""

    def decode_body(self, completion: Completion, meeting: Meeting, reply: bytes | None) -> bytes:
        """Body of the decode leg; `reply` is the body of the prefill leg's answer, None where legs are joint.

        Raises:
            DialectError: the reply or the meeting lacks what the decode engine needs.
        """


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's pull (NIXL and its like): the prefill answer names the blocks, the decode engine fetches them."""

    joint = False

    def hands_over(self, completion: Completion) -> bool:
        return not completion.one_leg

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting) -> bytes:
        return _encode(_one_token(completion, _PULL))

    def check(self, reply: bytes) -> None:
        _transfer_params(reply)

    def refetches(self, reply: bytes | None) -> bool:
        """Only where the connector says so: NIXL reads blocks by number, which may hold another prompt by then."""
        try:
            return msgspec.json.decode(_transfer_params(reply), type=_Refetch).remote_refetch
        except (msgspec.MsgspecError, UnicodeDecodeError, DialectError):
            return False

    def decode_body(self, completion: Completion, meeting: Meeting, reply: bytes | None) -> bytes:
        return _encode({**completion.fields, "kv_transfer_params": _transfer_params(reply)})


@dataclass(frozen=True, slots=True)
class Mooncake:
    """vLLM's Mooncake connector: the gateway makes up the transfer's id and tells it to both engines."""

    joint = False

    def hands_over(self, completion: Completion) -> bool:
        return not completion.one_leg

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting) -> bytes:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": meeting.transfer_id}
        return _encode(_one_token(completion, Raw(_encode(params))))

    def check(self, reply: bytes) -> None:
        """The answer itself says nothing."""

    def refetches(self, reply: bytes | None) -> bool:
        return False

    def decode_body(self, completion: Completion, meeting: Meeting, reply: bytes | None) -> bytes:
        if not (meeting.bootstrap and meeting.engine_id):
            raise DialectError("has no bootstrap address or engine id yet")
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": meeting.transfer_id,
            "remote_bootstrap_addr": f"http://{meeting.bootstrap}",
            "remote_engine_id": meeting.engine_id,
        }
        return _encode({**completion.fields, "kv_transfer_params": params})


@dataclass(frozen=True, slots=True)
class Sglang:
    """SGLang's bootstrap: the same body to both engines, which meet in a room; one room per sequence."""

    joint = True

    def hands_over(self, completion: Completion) -> bool:
        """Always: a prefill engine of this kind answers nobody, and rooms come in arrays.

        Log-probabilities of the prompt stay with the prefill engine and are missing from the answer.
        """
        return True

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting) -> bytes:
        return _encode(completion.fields | _rooms(completion.n * completion.prompts, meeting))

    def check(self, reply: bytes) -> None:
        """The answer is nobody's: the decode engine gives its own."""

    def refetches(self, reply: bytes | None) -> bool:
        return False

    def decode_body(self, completion: Completion, meeting: Meeting, reply: bytes | None) -> bytes:
        return self.prefill_body(completion, meeting)


DIALECTS: dict[KvProtocol, Dialect] = {"vllm": Vllm(), "mooncake": Mooncake(), "sglang": Sglang()}


def engine_id(reply: bytes) -> str:
    """The engine's id in a Mooncake bootstrap server's answer to `GET /query`; of several ranks, the first's.

    Raises:
        DialectError: it names none.
    """
    try:
        ranks = msgspec.json.decode(reply, type=dict[str, _Rank])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DialectError(f"has a bootstrap server that answers what is not understood: {error}") from None
    found = [ranks[rank].engine_id for rank in sorted(ranks, key=_rank_order) if ranks[rank].engine_id]
    if not found:
        raise DialectError("has a bootstrap server that knows no engine yet")
    return found[0]


def forwarded(headers: Headers, request_id: bytes, traceparent: bytes | None = None) -> Headers:
    """What a client's headers become on the way to an engine.

    Authorization and X-Request-Id go along; `request_id` is for clients that send none, `traceparent` replaces the
    client's. Left out: what belongs to one connection, and Accept-Encoding, since answers are read on the way.
    """
    left_out = _named(headers, _OUR_OWN)
    if traceparent is not None:
        left_out = left_out | {b"traceparent"}
    kept = [header for header in headers if header[0] not in left_out]
    names = {name for name, _ in kept}
    if b"x-request-id" not in names:
        kept.append((b"x-request-id", request_id))
    if b"content-type" not in names:
        kept.append((b"content-type", b"application/json"))
    if traceparent is not None:
        kept.append((b"traceparent", traceparent))
    return kept


def answered(headers: Headers) -> Headers:
    """What an engine's headers become on the way to the client: without what belongs to one connection."""
    left_out = _named(headers, _HOP_BY_HOP)
    return [header for header in headers if header[0] not in left_out]


class _Rank(msgspec.Struct):
    engine_id: str = ""


class _Reply(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _Refetch(msgspec.Struct):
    remote_refetch: bool = False


_REPLY = msgspec.json.Decoder(_Reply)


def _one_token(completion: Completion, params: Raw) -> Fields:
    """The request cut down to its prompt: one token, answered whole.

    A prefill that ends by a stop token instead of by length hands nothing over (vLLM), hence `min_tokens`.
    """
    fields = {
        **completion.fields,
        "stream": _FALSE,
        "max_tokens": _ONE,
        "min_tokens": _ONE,
        "kv_transfer_params": params,
    }
    if completion.kind == "chat" or "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    fields.pop("stream_options", None)
    fields.pop("n", None)
    return fields


def _transfer_params(reply: bytes | None) -> Raw:
    try:
        params = _REPLY.decode(reply or b"").kv_transfer_params
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DialectError(f"answered what is no such answer: {error}") from None
    if bytes(params)[:1] != b"{":
        raise DialectError("answered without kv_transfer_params; is a KV connector configured there?")
    return params


def _rooms(sequences: int, meeting: Meeting) -> Fields:
    host, colon, port = meeting.bootstrap.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise DialectError(f"has the bootstrap address {meeting.bootstrap!r}, which is not host:port")
    rooms = [(meeting.room + index) % ROOM_LIMIT for index in range(sequences)]
    single = sequences == 1
    return {
        "bootstrap_host": Raw(_encode(host if single else [host] * sequences)),
        "bootstrap_port": Raw(_encode(int(port) if single else [int(port)] * sequences)),
        "bootstrap_room": Raw(_encode(rooms[0] if single else rooms)),
    }


def _rank_order(rank: str) -> tuple[int, str]:
    return (int(rank) if rank.isascii() and rank.isdigit() else ROOM_LIMIT, rank)


def _named(headers: Headers, left_out: frozenset[bytes]) -> frozenset[bytes]:
    """`left_out` and what a Connection header adds to it (RFC 9110, 7.6.1)."""
    for name, value in headers:
        if name == b"connection":
            left_out = left_out | {word.strip().lower() for word in value.split(b",")}
    return left_out
