"""The HTTP paths of a buffer server, which routers call. docs/dualpath.md documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from kvroute_engine.buffer.reads import BufferedRead, NodeReads, ReadError
from kvroute_engine.errors import InputError
from kvroute_engine.origins import is_loopback, refusal

READS_PATH = "/v1/kv/reads"


class ReadOrder(msgspec.Struct, frozen=True):
    """The body of POST /v1/kv/reads: consecutive blocks of one prompt."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+\Z")]
    keys: list[Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){1,64}\Z")]]
    """Keys of the blocks, hexadecimal."""
    first_block: int = 0
    wait: Literal["data", "room"] = "data"
    """When the response comes: when the blocks are in the buffer, or as soon as they have room there."""


class Routes:
    """The handlers of one buffer server."""

    def __init__(self, reads: NodeReads, data: Callable[[], str], quota_bytes: int, host: str) -> None:
        """Args: `data` returns `host:port` for engines; `quota_bytes`: host memory for blocks; `host`: own address."""
        self._reads, self._data, self._quota_bytes, self._host = reads, data, quota_bytes, host

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; bad ones get one sentence, and requests from web pages are rejected."""
        headers = request.headers
        why = refusal(
            headers.get("Host", ""),
            headers.get("Origin"),
            known={self._host.lower()},
            any_host=not is_loopback(self._host),
        )
        if why:
            return _error(403, why)
        try:
            return await self._answer(request)
        except ReadError as error:
            return _error(error.status, str(error))
        except InputError as error:
            return _error(503, str(error))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        method, path = request.method, request.path
        read_id = path.removeprefix(READS_PATH + "/")
        if path == "/health" and method == "GET":
            return web.Response()
        if path == READS_PATH and method == "POST":
            return await self._begin(await request.read())
        if path == READS_PATH and method == "GET":
            return _json(200, self._state())
        if read_id != path and method == "GET":
            read = self._reads.find(read_id)
            await self._reads.complete(read)
            return _json(200, self._found(read))
        if read_id != path and method == "DELETE":
            self._reads.release(read_id)
            return web.Response(status=204)
        return _error(404, f"there is no {method} {path}; see docs/dualpath.md")

    async def _begin(self, body: bytes) -> web.Response:
        try:
            order = msgspec.json.decode(body, type=ReadOrder)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _error(400, f"the body cannot be read: {error}")
        reads = self._reads
        read = await reads.begin(order.id, [bytes.fromhex(key) for key in order.keys])
        if order.wait == "room":
            return _json(202, {"id": read.id, "blocks": len(read.keys)})
        try:
            await reads.complete(read)
            return _json(200, self._found(read))
        except BaseException:
            reads.release(order.id)  # the router has given up
            raise

    def _found(self, read: BufferedRead) -> dict[str, Any]:
        return {
            "id": read.id,
            "blocks": len(read.keys),
            "bytes": read.kv_bytes,
            "seconds": read.in_service_s,
            "waited_s": read.waited_s,
            "data": self._data(),
        }

    def _state(self) -> dict[str, int]:
        reads = self._reads
        return {
            "queued_bytes": reads.queued_bytes,
            "buffered_bytes": reads.buffered_bytes,
            "quota_bytes": self._quota_bytes,
            "read_bytes": reads.read_bytes,
        }


def _json(status: int, document: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(status, {"error": {"message": message, "code": status}})
