"""The calls that precede a prefill with KV from the store: buffer servers read the blocks into host memory.

A part that fails or is short costs only time: the prefill instance computes these tokens. The part of the decode node
stays in its buffer until the decode instance has loaded it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from msgspec import Raw

from kvroute.http.client.pool import request_bytes
from kvroute.types import Side
from kvroute_engine.block_keys import block_keys

if TYPE_CHECKING:
    from kvroute.http.client.call import Call, Failure
    from kvroute.http.client.pool import UpstreamPool
    from kvroute.http.headers import Headers
    from kvroute.serve.proxy.request_state import RequestState
    from kvroute.types import ReadKv

READS_PATH = b"/v1/kv/reads"
_REPLY_BYTES_MAX = 64 * 1024
_JSON = [(b"content-type", b"application/json")]

Outcome: TypeAlias = Literal["complete", "short", "failed", "given_up"]
"""Result of one part. "short": fewer blocks than requested are stored; "given_up": the prefill was aborted."""


class BlockRead(msgspec.Struct, frozen=True):
    """Response of a buffer server, as far as it is used here."""

    blocks: int
    bytes: float = 0.0
    data: str = ""
    """`host:port` where engines fetch the blocks."""


class _Kept(msgspec.Struct, frozen=True):
    blocks: int


class _KeptParams(msgspec.Struct, frozen=True):
    """Response of a prefill instance, as far as it is used here."""

    kept: _Kept | None = None


class _Part:
    """The call to one buffer server."""

    __slots__ = (
        *("_body", "_read", "_status", "blocks", "call", "data", "first", "keys", "name", "number", "over", "pool"),
        *("side", "url"),
    )

    def __init__(
        self, read: StorageRead, side: Side, first: int, keys: Sequence[bytes], name: str, pool: UpstreamPool, url: str
    ) -> None:
        """Args: `first`: position in the prompt of the first block; `keys` of the blocks; `name` of the instance."""
        self._read, self.side, self.first, self.keys, self.name, self.pool, self.url = (
            *(read, side, first, keys, name, pool, url),
        )
        self.number = len(keys)
        self.call: Call | None = None
        self.blocks = 0
        """Blocks in the buffer."""
        self.data = ""
        self.over = False
        self._status = 0
        self._body = b""

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""
        self._status = status

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`."""
        if len(self._body) < _REPLY_BYTES_MAX:
            self._body += data

    def on_end(self) -> None:
        """See `ResponseHandler`."""
        if self._status == 202:
            self._body = b""
            self._read.reserved(self)
            return
        try:
            reply = msgspec.json.decode(self._body, type=BlockRead) if self._status == 200 else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            reply = None
        self._read.part_ended(self, reply)

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`."""
        self._read.part_ended(self, None)


class StorageRead:
    """One read decision: its parts, and the parameters that the prefill instance gets for them."""

    __slots__ = ("_began_s", "_keys", "_name", "_on_end", "_parts", "_state", "_unsent", "decision", "kept_tokens")

    def __init__(self, state: RequestState, decision: ReadKv, on_end: Callable[[Raw | None, float], None]) -> None:
        """Args: `on_end` receives the parameters for the prefill leg, or None if no block could be read."""
        self._state, self.decision = state, decision
        self._on_end: Callable[[Raw | None, float], None] | None = on_end
        self._keys: list[bytes] = []
        self._parts: list[_Part] = []
        self._unsent: list[_Part] = []
        """Parts that wait until the decode node has reserved its buffer. All reads reserve in this order, so that none
        waits for a buffer that another one holds while it waits for the first one's."""
        self._began_s = 0.0
        self._name = f"{state.runtime.draw():016x}"
        self.kept_tokens = 0
        """Tokens in the buffer of the decode node that the decode instance has not loaded yet."""

    def begin(self, ids: Sequence[int] | None, now: float) -> None:
        """Send the calls. Args: `ids`: the prompt's tokens; None: nothing is read."""
        request, decision = self._state.request, self.decision
        assert request is not None
        self._began_s, block = now, request.block_tokens
        sides: tuple[tuple[Side, str, int], ...] = (
            ("prefill", decision.prefill_instance, decision.prefill_tokens // block),
            ("decode", decision.decode_instance, decision.decode_tokens // block),
        )
        first = decision.first_token // block
        if ids is not None:
            tokens = decision.first_token + decision.prefill_tokens + decision.decode_tokens
            self._keys = block_keys(ids[:tokens], block, self._state.completion.salt)[first:]
        at = 0
        for side, name, blocks in sides:
            if blocks:
                engine, keys = self._state.runtime.engines[name], self._keys[at : at + blocks]
                pool = engine.buffer or engine.pool
                self._parts.append(_Part(self, side, first + at, keys, name, pool, engine.buffer_url))
                at += blocks
        self._unsent = list(self._parts)
        self._send_next(reserve=len(self._parts) > 1)
        if not self._parts:
            self._finish(now)

    def _send_next(self, *, reserve: bool) -> None:
        """Send the call of the last part that has not been sent. Args: `reserve`: wait for its buffer only."""
        while self._unsent:
            part = self._unsent.pop()
            if part.keys and part.url:
                self._order(part, "room" if reserve else "data")
                return
            self.part_ended(part, None)

    def reserved(self, part: _Part) -> None:
        """Record that a part has its buffer, and that its blocks are being read. Wait for them, and send the others."""
        if part.over:
            return
        path = READS_PATH + b"/" + self._id(part.side).encode("latin-1")
        self._send(part, request_bytes(b"GET", path, part.pool.host, [], b""))
        self._send_next(reserve=False)

    def _order(self, part: _Part, wait: Literal["room", "data"]) -> None:
        keys = [key.hex() for key in part.keys]
        fields = {"id": self._id(part.side), "first_block": part.first, "keys": keys, "wait": wait}
        body = msgspec.json.encode(fields)
        self._send(part, request_bytes(b"POST", READS_PATH, part.pool.host, _JSON, body))

    def _send(self, part: _Part, request: bytes) -> None:
        limit_s = self._state.runtime.settings.timeouts.prefill_s
        call = part.pool.send(request, part, first_byte_s=limit_s, idle_s=limit_s)
        if not part.over:
            part.call = call

    def _id(self, side: Side) -> str:
        """Return the id of a part, unique among all gateways that share the buffer servers."""
        return f"{self._name}-{self.decision.read_id}-{side}"

    def part_ended(self, part: _Part, reply: BlockRead | None) -> None:
        """Record the result of a part; None: it has failed. After the last one the prefill leg continues."""
        if part.over:
            return
        part.over, part.call = True, None
        runtime = self._state.runtime
        now = runtime.now()
        if reply is not None:
            part.blocks, part.data = min(max(reply.blocks, 0), part.number), reply.data
        outcome: Outcome = "failed" if reply is None else "complete" if part.blocks == part.number else "short"
        self._count(part, outcome, reply.bytes if reply is not None else 0.0, now)
        self._send_next(reserve=False)
        if all(part.over for part in self._parts):
            self._finish(now)

    def _finish(self, now: float) -> None:
        """Continue the prefill leg, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self._params(), now)

    def _count(self, part: _Part, outcome: Outcome, nbytes: float, now: float) -> None:
        runtime = self._state.runtime
        runtime.metrics.storage_read(part.name, part.side, outcome, nbytes, now - self._began_s)
        if runtime.control.reading(self.decision.read_id):
            runtime.report.read_finished(self.decision.read_id, part.side, now)

    def _params(self) -> Raw | None:
        """Return the parameters of the blocks that are in buffers, without gaps; release the others."""
        assert self._state.request is not None
        parts, staged, gap = [], 0, False
        for part in self._parts:
            if part.blocks and not gap:
                fields = {"id": self._id(part.side), "blocks": part.blocks, "buffer": part.url, "data": part.data}
                parts.append(fields if part.side == "prefill" else {**fields, "keep": True})
                staged += part.blocks
            elif part.blocks:
                self._release(part)
            gap = gap or part.blocks < part.number
        if not staged:
            return None
        first = self.decision.first_token // self._state.request.block_tokens
        document = {"first_block": first, "key": self._keys[staged - 1].hex(), "parts": parts}
        return Raw(msgspec.json.encode(document))

    def prefilled(self, params: Raw | None) -> None:
        """Record what the prefill instance leaves for the decode instance. Args: `params`: its transfer parameters."""
        assert self._state.request is not None
        try:
            kept = msgspec.json.decode(params, type=_KeptParams).kept if params is not None else None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            kept = None
        self.kept_tokens = kept.blocks * self._state.request.block_tokens if kept is not None else 0

    def loaded(self, instance: str) -> None:
        """Record that a decode instance has its KV. Only the one whose node has read loads and releases that part."""
        if instance == self.decision.decode_instance:
            self.kept_tokens = 0

    def release_kept(self) -> None:
        """Release what the decode instance has not loaded and will not load."""
        if self.kept_tokens:
            self.kept_tokens = 0
            for part in self._parts:
                if part.side == "decode":
                    self._release(part)

    def abort(self, now: float) -> None:
        """Cancel the reads and release the buffers: the prefill is not needed any more, or has failed."""
        self._on_end = None
        self._unsent.clear()
        for part in self._parts:
            if not part.over:
                if part.call is not None:
                    part.call.abort()
                part.over, part.call = True, None
                self._count(part, "given_up", 0.0, now)
            self._release(part)

    def _release(self, part: _Part) -> None:
        """Release the part's buffer; the buffer server does the same after its hold time."""
        if not part.url:
            return
        path = READS_PATH + b"/" + self._id(part.side).encode("latin-1")
        part.pool.send(
            request_bytes(b"DELETE", path, part.pool.host, [], b""), _Ignored(), first_byte_s=5.0, idle_s=5.0
        )


class _Ignored:
    """Receives a response that nothing depends on."""

    def on_head(self, status: int, headers: Headers) -> None:
        """See `ResponseHandler`."""

    def on_body(self, data: bytes) -> None:
        """See `ResponseHandler`."""

    def on_end(self) -> None:
        """See `ResponseHandler`."""

    def on_failure(self, failure: Failure) -> None:
        """See `ResponseHandler`."""
