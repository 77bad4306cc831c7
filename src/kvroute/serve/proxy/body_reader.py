"""Parses request bodies that are large or encoded in threads, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvroute.http.client_exchange import ClientExchange
from kvroute.http.server.content_coding import CodingError, decoded
from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.passthrough_body import PassthroughBody
from kvroute.serve.api.requests import Completion

SMALL_BODY_BYTES = 1024 * 1024
Read = TypeVar("Read", Completion, PassthroughBody)
Taken = TypeVar("Taken", bound=ClientExchange)


class BodyReader:
    """Two threads, for small and for large bodies, so that a small one does not wait for a large one."""

    def __init__(self) -> None:
        self._threads = (ThreadPoolExecutor(1, "read"), ThreadPoolExecutor(1, "read-large"))

    async def read(
        self, exchange: Taken, read: Callable[[bytes, bytes], Read], coding: bytes, bytes_max: int
    ) -> Read | None:
        """Return a body, decoded and parsed; None: the client has disconnected.

        Args:
            exchange: whose body is read; it gets the decoded body.
            read: parses a path and its body.
            coding: content codings of the body; empty: none.
            bytes_max: largest size of the decoded body.

        Raises:
            RequestError: the body cannot be decoded or parsed; 503: there is no memory for the decoded body.
        """
        if coding:
            await self._decode(exchange, coding, bytes_max)
        return await self._parse(exchange, read)

    async def _decode(self, exchange: ClientExchange, coding: bytes, bytes_max: int) -> None:
        body = exchange.body
        if not body:
            return
        run = asyncio.get_running_loop().run_in_executor
        try:
            found = await run(self._threads[1], decoded, coding, body, bytes_max)
        except CodingError as error:
            raise RequestError(str(error), status=error.status, code=error.code) from None
        if not (exchange.gone or exchange.replace_body(found)):
            exchange.release_body()
            what = "the gateway has reached its memory limit for request bodies; try again later"
            raise RequestError(what, status=503, type="service_unavailable")

    async def _parse(self, exchange: Taken, read: Callable[[bytes, bytes], Read]) -> Read | None:
        """Parse a body in a thread, one at a time: a decoder holds the interpreter lock while it works, and several at
        once would hold it in turn without running the event loop in between. None: the client has disconnected."""
        reader = self._threads[len(exchange.body) > SMALL_BODY_BYTES]

        def run() -> Read | None:
            path, body = exchange.path, exchange.body
            return None if exchange.gone else read(path, body)

        return await asyncio.get_running_loop().run_in_executor(reader, run)
