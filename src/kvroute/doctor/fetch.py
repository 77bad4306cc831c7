"""One HTTP request over the gateway's own connections, as a coroutine. A cancelled request is aborted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvroute.http.client.call import Failure, ResponseHandler
from kvroute.http.client.pool import UpstreamPool, request_bytes
from kvroute.http.headers import Headers

BODY_BYTES_MAX = 8 << 20
LATE = "no complete response"
"""Start of the failure text when the time limit is exceeded."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A response, or why there is none. Times are those of `time.time`."""

    status: int = 0
    """HTTP status; 0: no complete response arrived, and `failure` says why."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    failure: str = ""
    sent_s: float = 0.0
    head_s: float = 0.0
    """Time at which the headers arrived; 0 without them."""
    first_byte_s: float = 0.0
    """Time at which the body's first byte arrived; 0 without one."""
    end_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True for a complete response with a status from 200 to 299."""
        return 200 <= self.status < 300

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing."""
        return "" if self.ok else self.failure or f"HTTP status {self.status}"

    def header(self, name: bytes) -> str:
        """Return the value of a header; empty if it is missing."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")


class _Listener(ResponseHandler):
    """Collects one response."""

    def __init__(self, body_bytes_max: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status, self.head_s, self.first_byte_s = 0, 0.0, 0.0
        self.headers: Headers = []
        self.body = bytearray()
        self.failure = ""
        self._body_bytes_max = body_bytes_max

    def on_head(self, status: int, headers: Headers) -> None:
        """See ResponseHandler."""
        self.status, self.headers, self.head_s = status, headers, time.time()

    def on_body(self, data: bytes) -> None:
        """See ResponseHandler."""
        self.first_byte_s = self.first_byte_s or time.time()
        self.body += data
        if len(self.body) > self._body_bytes_max:
            self._finish(f"the response is longer than {self._body_bytes_max} bytes")

    def on_end(self) -> None:
        """See ResponseHandler."""
        self._finish("")

    def on_failure(self, failure: Failure) -> None:
        """See ResponseHandler."""
        self._finish(failure.text)

    def _finish(self, failure: str) -> None:
        if not self.done.done():
            self.failure = failure
            self.done.set_result(None)


async def fetch(
    pool: UpstreamPool,
    path: bytes,
    *,
    wait_s: float,
    headers: Headers | None = None,
    body: bytes | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Fetched:
    """GET a path, or POST a body to it. The whole response must arrive within `wait_s` seconds."""
    listener = _Listener(body_bytes_max)
    method = b"GET" if body is None else b"POST"
    request = request_bytes(method, path, pool.host, headers or [], body or b"")
    sent_s = time.time()
    call = pool.send(request, listener, first_byte_s=wait_s, idle_s=wait_s)
    try:
        async with asyncio.timeout(wait_s):
            await listener.done
    except TimeoutError:
        listener.failure = f"{LATE} in {wait_s:.3g} s"
    finally:
        call.abort()
    return Fetched(
        status=0 if listener.failure else listener.status,
        headers=listener.headers,
        body=bytes(listener.body),
        failure=listener.failure,
        sent_s=sent_s,
        head_s=listener.head_s,
        first_byte_s=listener.first_byte_s,
        end_s=time.time(),
    )
