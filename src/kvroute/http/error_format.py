"""The format of error responses, which is that of the API that a server serves."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ErrorFormat(Protocol):
    """Makes the error responses of a server in the format of its API. All paths are empty if they are not known."""

    def body(self, path: bytes, status: int, message: str, kind: str, code: str | None) -> bytes:
        """Return the JSON body of an error.

        Args:
            path: of the request.
            status: of the response.
            message: one sentence for the client.
            kind: type of the error; empty: derived from the status.
            code: name of the error for programs; None: it has none.
        """
        ...

    def of_path(self, path: bytes, status: int, body: bytes) -> bytes:
        """Return the body of a response in the format of its path. Args: `body`: in the server's usual format."""
        ...

    def id_lines(self, path: bytes, request_id: bytes) -> bytes:
        """Return the header lines with the id of a request that each response has."""
        ...


class PlainErrors:
    """An object with `message`, `type` and `code`, under every path."""

    def body(self, path: bytes, status: int, message: str, kind: str, code: str | None) -> bytes:
        """See `ErrorFormat`."""
        return msgspec.json.encode({"error": {"message": message, "type": kind or error_type(status), "code": code}})

    def of_path(self, path: bytes, status: int, body: bytes) -> bytes:
        """See `ErrorFormat`."""
        return body

    def id_lines(self, path: bytes, request_id: bytes) -> bytes:
        """See `ErrorFormat`."""
        return b"x-request-id: %b\r\n" % request_id


def error_type(status: int) -> str:
    """Return the type of an error that has none of its own."""
    return "server_error" if status >= 500 else "invalid_request_error"
