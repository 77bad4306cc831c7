"""Keep-alive connections to one engine, and calls over them; it neither interprets requests nor chooses engines."""

from __future__ import annotations

import asyncio
import ssl
import time
from urllib.parse import SplitResult, urlsplit

from kvroute.http.client.call import Call, Failure, FailureKind, ResponseHandler
from kvroute.http.client.upstream_connection import UpstreamConnection
from kvroute.http.deadlines import Deadlines
from kvroute.http.headers import Headers
from kvroute.http.loop_lag import judge
from kvroute.http.open_files import out_of_files
from kvroute.types import InputError


def request_bytes(method: bytes, path: bytes, host: bytes, headers: Headers, body: bytes) -> bytes:
    """Return a complete HTTP/1.1 request; `headers` exclude host and content-length, which are set here.

    `path` includes its query. Without a body, only POST, PUT and PATCH have a content-length of 0 (RFC 9110 section
    8.6).
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if not body and method not in (b"POST", b"PUT", b"PATCH"):
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, path, host, lines)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        method,
        path,
        host,
        lines,
        len(body),
        body,
    )


class UpstreamPool:
    """Connections to one origin: the most recently used one is used next; a new one is opened when all are busy."""

    def __init__(
        self,
        url: str,
        *,
        connect_s: float = 2.0,
        idle_max: int = 256,
        keep_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """
        Args:
            url: `http://host:port` or `https://host:port`.
            connect_s: time limit, in seconds, for name resolution, TCP and TLS together.
            idle_max: maximum number of idle connections.
            keep_s: seconds for which idle connections are kept.
            tls: context for https; None: the system's certificates are trusted.
            deadlines: shared with other pools, so that one timer serves all; None: its own.

        Raises:
            InputError: the URL is invalid, or has a path.
        """
        parts = _origin(url)
        self.host = parts.netloc.encode()
        """Value of the Host header."""
        self._address = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._idle_max = idle_max
        self._keep_s = keep_s
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._opening: dict[asyncio.Task[None], Call] = {}
        """The call that waits for each connection that is being opened."""
        self._closed = False
        self.busy = 0
        """Calls that are not finished."""

    @property
    def idle(self) -> int:
        """Number of idle connections."""
        return len(self._idle)

    @property
    def connections(self) -> int:
        """Number of connections that are open or being opened."""
        return len(self._open) + len(self._opening)

    def send(
        self,
        request: bytes,
        handler: ResponseHandler,
        *,
        first_byte_s: float,
        idle_s: float,
        head_only: bool = False,
        body: bytes = b"",
    ) -> Call:
        """Send a request. `handler` is called in later turns of the loop, never from within `send`.

        Args:
            first_byte_s: seconds from sending to the first byte of the response body.
            idle_s: seconds between bytes of the body.
            body: the part after `request`, sent separately to avoid a large copy.
            head_only: the request is a HEAD, so that no body follows.
        """
        call = Call(request, handler, first_byte_s, idle_s, head_only, self._ended)
        call.body = body
        self.busy += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.begin(call)
                return call
            connection.close()
        self.resend(call)
        return call

    def close(self) -> None:
        """Close idle connections and keep none from now on; calls in progress continue."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def abort_calls(self, why: str) -> None:
        """Fail all calls in progress, as if the engine had closed their connections."""
        for connection in list(self._open):
            connection.fail(why)
        for call in list(self._opening.values()):
            if not call.over:
                call.finish()
                call.handler.on_failure(Failure("reset", "connect", why))

    # callbacks of connections and calls

    def _opened(self, task: asyncio.Task[None]) -> None:
        del self._opening[task]

    def keep(self, connection: UpstreamConnection) -> None:
        """See `ConnectionOwner`."""
        if self._closed or len(self._idle) >= self._idle_max:
            connection.close()
            return
        connection.park(self._keep_s)
        self._idle.append(connection)

    def opened(self, connection: UpstreamConnection) -> None:
        """See `ConnectionOwner`."""
        self._open.add(connection)
        self._deadlines.watch(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """See `ConnectionOwner`."""
        self._open.discard(connection)
        self._deadlines.forget(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def resend(self, call: Call) -> None:
        """See `ConnectionOwner`."""
        task = asyncio.get_running_loop().create_task(self._connect(call))
        self._opening[task] = call
        task.add_done_callback(self._opened)

    async def _connect(self, call: Call) -> None:
        """Open a connection for a call, which may have ended by the time it is open."""
        try:
            connection = await self._open_line(call)
        except TimeoutError:
            failure = Failure(
                "timeout", "connect", f"cannot connect to {self.host.decode()} within {self._connect_s:g} s"
            )
        except (OSError, UnicodeError) as error:  # UnicodeError: the host name is invalid (`a..b`)
            kind: FailureKind = "reset" if isinstance(error, ConnectionResetError) else "refused"
            if out_of_files(error):
                kind = "out_of_files"
            failure = Failure(kind, "connect", f"cannot connect to {self.host.decode()} ({error})")
        else:
            if call.over:
                self.keep(connection)
            elif connection.usable:
                connection.begin(call)
            else:
                call.finish()
                call.handler.on_failure(Failure("reset", "connect", "the engine closed the connection"))
            return
        if not call.over:
            call.finish()
            call.handler.on_failure(failure)

    async def _open_line(self, call: Call) -> UpstreamConnection:
        """Connect; an attempt that times out while the loop is late is repeated, until the attempts have had
        `connect_s` of a loop that is on time. Raises OSError or UnicodeError."""
        lag = self._deadlines.lag
        started_s, lag_s = time.monotonic(), lag.total_s()
        while True:
            try:
                return await self._attempt()
            except TimeoutError:
                verdict = judge(self._connect_s, time.monotonic() - started_s, lag.total_s() - lag_s)
                if verdict == "failed" or call.over:
                    raise

    async def _attempt(self) -> UpstreamConnection:
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, self._address, self._port, ssl=self._tls
                )
        except (OSError, UnicodeError):
            connection.close()
            raise
        return connection

    def _ended(self) -> None:
        self.busy -= 1


def _origin(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port != 0
    except ValueError:
        parts, port_is_fine = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine or parts.path.strip("/"):
        raise InputError(
            f"{url!r} is not a valid origin", where="url", hint="write http://host:port or https://host:port"
        )
    return parts
