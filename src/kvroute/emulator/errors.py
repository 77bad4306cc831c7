"""Errors of an engine, in OpenAI's JSON format."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A request that this engine rejects: an HTTP status, a message and, if there is one, the field."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def body(self) -> bytes:
        """Return `{"error": {...}}` in vLLM's format, with the status as code."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class EngineError(ApiError):
    """The engine itself failed the request."""

    def __init__(self, message: str, *, status: int = 500) -> None:
        super().__init__(message, status=status, kind="InternalServerError")
