"""Web pages that may use the client port: checks the Host and Origin headers of requests; reads no bytes itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvroute_engine.origins import is_loopback, refusal

if TYPE_CHECKING:
    from kvroute.http.server.exchange import Exchange

_HOSTS_MOST = 1024
_HOST_BYTES_MOST = 300
"""Longest Host header that is cached: no name with a port is longer. Longer headers are checked at each request."""
_HINT = "; list the name under gateway.listen.hosts or the page under gateway.listen.origins, or set gateway.keys"
_CORS = (
    b"access-control-allow-origin: %b\r\nvary: origin\r\n"
    b"access-control-expose-headers: x-request-id, request-id, retry-after\r\n"
)


class WebPages:
    """Checks requests of clients that need no key. Other web pages do not have a key, so with keys all requests
    pass."""

    __slots__ = ("_any_host", "_checked", "_hosts", "origins", "passed")

    def __init__(self) -> None:
        """Every request passes until `change` is called."""
        self.passed: set[bytes] = set()
        """Host headers seen so far that pass without an Origin header."""
        self.origins: frozenset[bytes] = frozenset()
        """Pages of other sites that may use the port; `*`: all."""
        self._hosts: frozenset[str] = frozenset()
        self._checked = self._any_host = False

    def change(self, *, checked: bool, listen_host: str, hosts: Collection[str], origins: Collection[str]) -> None:
        """Replace the rules from now on.

        Args:
            checked: False: every request passes, because it needs a key.
            listen_host: address of the port. If it is not loopback, a request without an Origin may use any host name.
            hosts: further host names of the port.
            origins: pages of other sites that may use the port.
        """
        self.passed = set()
        self.origins = frozenset(origin.encode() for origin in origins)
        self._checked, self._any_host = checked, not is_loopback(listen_host)
        self._hosts = frozenset({listen_host.lower(), *(name.lower() for name in hosts)})

    def refusal(self, host: bytes, origin: bytes | None) -> str:
        """Return the reason for rejecting a request with these headers; empty: it passes."""
        why = ""
        if self._checked:
            why = refusal(
                host.decode("latin-1"),
                None if origin is None else origin.decode("latin-1"),
                known=self._hosts,
                origins=[page.decode() for page in self.origins],
                any_host=self._any_host,
            )
        if not why and origin is None and len(host) <= _HOST_BYTES_MOST:
            if len(self.passed) >= _HOSTS_MOST:
                self.passed.clear()
            self.passed.add(host)
        return why + _HINT if why else ""

    def allows(self, origin: bytes) -> bool:
        """Whether a page of another site may read responses."""
        return origin in self.origins or b"*" in self.origins


def answer_other_site(pages: WebPages, exchange: Exchange) -> bool:
    """Allow a listed page of another site to read the response (CORS). Return True after responding to a preflight
    request."""
    origin = exchange.header(b"origin")
    if origin is None or not pages.allows(origin):
        return False
    exchange.add_header_lines(_CORS % origin)
    requested_method = exchange.header(b"access-control-request-method")
    if exchange.method != b"OPTIONS" or requested_method is None:
        return False
    headers = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"600")]
    wanted = exchange.header(b"access-control-request-headers")
    if wanted is not None:
        headers.append((b"access-control-allow-headers", wanted))
    exchange.respond(204, b"", headers=headers)
    return True
