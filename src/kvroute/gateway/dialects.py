"""How prefill and decode engines are told of each other: pure functions from a request to the body of each leg.

What the client sent stays byte for byte; only the fields named here are set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
from msgspec import Raw

from kvroute.gateway.fields import Fields
from kvroute.gateway.openai import Completion
from kvroute.types import KvProtocol

QUERY_PATH = b"/query"
"""Where a Mooncake bootstrap server tells its engines' ids."""
ROOM_LIMIT = 1 << 63
_RANK_DIGITS_MAX = 18

_TRUE, _FALSE, _ONE = Raw(b"true"), Raw(b"false"), Raw(b"1")
_PULL = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)

_encode = msgspec.json.Encoder().encode


class DialectError(Exception):
    """An engine's answer, or its endpoint, lacks what the other leg needs; the text goes on after the engine's name."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and under which name the two legs of one request meet; each protocol reads its part."""

    transfer_id: str = ""
    """Made up by the gateway (mooncake, and vllm where KV is asked for early)."""
    room: int = 0
    """Drawn by the caller, 0 to 2^63-1 (sglang)."""
    bootstrap: str = ""
    """`host:port` of the prefill engine's bootstrap server (mooncake, sglang), or where it hands out KV (vllm)."""
    engine_id: str = ""
    """Of the prefill engine, from its bootstrap server (mooncake)."""
    early: bool = False
    """Both legs are sent at once, and the KV cache is fetched while it is computed (vllm)."""
    instance: str = ""
    """Name of the prefill instance, for the decode engine's metrics (vllm, early)."""


class Dialect(Protocol):
    """One way to split a request into a prefill and a decode leg."""

    @property
    def joint(self) -> bool:
        """Both legs are sent at once, so the decode instance is chosen on arrival."""

    def hands_over(self, completion: Completion) -> bool:
        """Whether the protocol can split this request at all; otherwise one instance does it alone."""

    def alone_body(self, completion: Completion) -> bytes:
        """Body for an instance that computes prefill and decode itself."""

    def prefill_body(self, completion: Completion, meeting: Meeting, prefix: Raw | None = None) -> bytes:
        """Body of the prefill leg. `prefix`: what the engine that holds the prompt's beginning has answered, where that
        is to be fetched first (vllm).

        Raises:
            DialectError: the meeting lacks what the engine needs.
        """

    def handover(self, reply: bytes) -> Raw | None:
        """What the decode leg is told of `reply`, the body of the prefill leg's answer.

        Raises:
            DialectError: it lacks what the decode engine needs.
        """

    def refetches(self, handover: Raw | None) -> bool:
        """Whether a second decode engine may be sent for the KV that a first one had begun to fetch."""

    def decode_body(self, completion: Completion, meeting: Meeting, handover: Raw | None) -> bytes:
        """Body of the decode leg; `handover` is what the prefill leg's answer gave, None where legs are joint.

        Raises:
            DialectError: the meeting or the handover lacks what the decode engine needs.
        """


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's pull (NIXL and its like): the prefill answer names the blocks, the decode engine fetches them. kvroute's
    connector can be asked early too: both engines are told a name, and where to ask for it."""

    joint: ClassVar[bool] = False

    def hands_over(self, completion: Completion) -> bool:
        return not completion.one_leg

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting, prefix: Raw | None = None) -> bytes:
        if prefix is None and not meeting.early:
            return _encode(_one_token(completion, _PULL))
        there = {} if prefix is None else msgspec.json.decode(prefix, type=dict[str, Raw])
        there.pop("remote_prefill_cached_tokens", None)  # else the engine would tell it as its own number
        name = {"transfer_id": meeting.transfer_id} if meeting.early else {}
        params = {**there, "do_remote_decode": True, "do_remote_prefill": prefix is not None, **name}
        return _encode(_one_token(completion, Raw(_encode(params))))

    def handover(self, reply: bytes) -> Raw | None:
        return _transfer_params(reply)

    def refetches(self, handover: Raw | None) -> bool:
        """Only where the connector says so: NIXL reads blocks by number, which may hold another prompt by then."""
        try:
            return handover is not None and msgspec.json.decode(handover, type=_Refetch).remote_refetch
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False

    def decode_body(self, completion: Completion, meeting: Meeting, handover: Raw | None) -> bytes:
        if handover is None:
            handover = _announcement(meeting)
        return _encode({**completion.fields, "kv_transfer_params": handover})


@dataclass(frozen=True, slots=True)
class Mooncake:
    """vLLM's Mooncake connector: the gateway makes up the transfer's id and tells it to both engines."""

    joint: ClassVar[bool] = False

    def hands_over(self, completion: Completion) -> bool:
        return not completion.one_leg

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting, prefix: Raw | None = None) -> bytes:
        assert prefix is None, "nobody copies prefixes by this protocol"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": meeting.transfer_id}
        return _encode(_one_token(completion, Raw(_encode(params))))

    def handover(self, reply: bytes) -> Raw | None:
        """The answer itself says nothing."""
        return None

    def refetches(self, handover: Raw | None) -> bool:
        return False

    def decode_body(self, completion: Completion, meeting: Meeting, handover: Raw | None) -> bytes:
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

    joint: ClassVar[bool] = True

    def hands_over(self, completion: Completion) -> bool:
        """Always: a prefill engine of this kind answers nobody, and rooms come in arrays.

        Log-probabilities of the prompt stay with the prefill engine and are missing from the answer.
        """
        return True

    def alone_body(self, completion: Completion) -> bytes:
        return _encode(completion.fields)

    def prefill_body(self, completion: Completion, meeting: Meeting, prefix: Raw | None = None) -> bytes:
        assert prefix is None, "nobody copies prefixes by this protocol"
        return _encode(completion.fields | _rooms(completion.n * completion.prompts, meeting))

    def handover(self, reply: bytes) -> Raw | None:
        """The answer is nobody's: the decode engine gives its own."""
        return None

    def refetches(self, handover: Raw | None) -> bool:
        return False

    def decode_body(self, completion: Completion, meeting: Meeting, handover: Raw | None) -> bytes:
        return self.prefill_body(completion, meeting)


DIALECTS: dict[KvProtocol, Dialect] = {"vllm": Vllm(), "mooncake": Mooncake(), "sglang": Sglang()}


def engine_id(reply: bytes) -> str:
    """The engine's id in a Mooncake bootstrap server's answer to `GET /query`; of several ranks, the first's.

    Raises:
        DialectError: it names none.
    """
    try:
        ranks = msgspec.json.decode(reply, type=dict[str, _Rank])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DialectError(f"has a bootstrap server that answers what is not understood: {error}") from None
    found = [ranks[rank].engine_id for rank in sorted(ranks, key=_rank_order) if ranks[rank].engine_id]
    if not found:
        raise DialectError("has a bootstrap server that knows no engine yet")
    return found[0]


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


def _transfer_params(reply: bytes) -> Raw:
    try:
        params = _REPLY.decode(reply).kv_transfer_params
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DialectError(f"answered what is no such answer: {error}") from None
    if bytes(params)[:1] != b"{":
        raise DialectError("answered without kv_transfer_params; is a KV connector configured there?")
    return params


def _announcement(meeting: Meeting) -> Raw:
    """What the decode engine of an early pull is told before there is an answer."""
    if not meeting.early:
        raise DialectError("answered nothing")
    host, port = _address(meeting)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": meeting.transfer_id,
        "remote_host": host.strip("[]"),
        "remote_port": port,
        "remote_instance": meeting.instance,
    }
    return Raw(_encode(params))


def _address(meeting: Meeting) -> tuple[str, int]:
    host, colon, port = meeting.bootstrap.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise DialectError(f"has the bootstrap address {meeting.bootstrap!r}, which is not host:port")
    return host, int(port)


def _rooms(sequences: int, meeting: Meeting) -> Fields:
    host, port = _address(meeting)
    rooms = [(meeting.room + index) % ROOM_LIMIT for index in range(sequences)]
    single = sequences == 1
    return {
        "bootstrap_host": Raw(_encode(host if single else [host] * sequences)),
        "bootstrap_port": Raw(_encode(port if single else [port] * sequences)),
        "bootstrap_room": Raw(_encode(rooms[0] if single else rooms)),
    }


def _rank_order(rank: str) -> tuple[int, str]:
    numeric = rank.isascii() and rank.isdigit() and len(rank) <= _RANK_DIGITS_MAX
    return (int(rank) if numeric else ROOM_LIMIT, rank)
