"""Failure answers of the API server: `ApiError`, and the causes of an invalid object in Kubernetes' wording."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
"""A decoded JSON object."""


def quoted(text: str) -> str:
    """Return the text as a Go string literal: JSON's escapes, without those of HTML."""
    return json.dumps(text, ensure_ascii=False)


def go_json(value: object) -> str:
    """Return compact JSON as Go's encoder writes it, which escapes `<`, `>` and `&`."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown(value: object) -> str:
    """Return a value as a field error shows it."""
    return quoted(value) if isinstance(value, str) else go_json(value)


@dataclass(frozen=True, slots=True)
class Cause:
    """One invalid field."""

    reason: str
    message: str
    field: str

    def text(self) -> str:
        """Return the cause as it stands in the message of the answer."""
        return f"{self.field}: {self.message}"


def required(path: str, detail: str = "") -> Cause:
    """Return the cause for an absent field."""
    return Cause("FieldValueRequired", "Required value" + (f": {detail}" if detail else ""), path)


def invalid(path: str, value: object, detail: str) -> Cause:
    """Return the cause for a value that breaks a rule."""
    return Cause("FieldValueInvalid", f"Invalid value: {shown(value)}: {detail}", path)


def type_invalid(path: str, value: object, detail: str) -> Cause:
    """Return the cause for a value of another JSON type."""
    return Cause("FieldValueTypeInvalid", f"Invalid value: {shown(value)}: {detail}", path)


def unsupported(path: str, value: object, supported: Sequence[str]) -> Cause:
    """Return the cause for a value outside an enumeration."""
    values = ", ".join(quoted(text) for text in supported)
    return Cause("FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {values}", path)


def forbidden_field(path: str, detail: str) -> Cause:
    """Return the cause for a field that may not be set or changed."""
    return Cause("FieldValueForbidden", f"Forbidden: {detail}", path)


def duplicate(path: str, value: object) -> Cause:
    """Return the cause for a second item with the same key."""
    return Cause("FieldValueDuplicate", f"Duplicate value: {shown(value)}", path)


def missing(path: str, value: object) -> Cause:
    """Return the cause for a reference to nothing."""
    return Cause("FieldValueNotFound", f"Not found: {shown(value)}", path)


def too_long(path: str, most_bytes: int) -> Cause:
    """Return the cause for a text above a limit."""
    return Cause("FieldValueTooLong", f"Too long: may not be more than {most_bytes} bytes", path)


def too_many(path: str, count: int, most: int) -> Cause:
    """Return the cause for a list above a limit."""
    return Cause("FieldValueTooMany", f"Too many: {count}: must have at most {most} items", path)


@dataclass(frozen=True, slots=True)
class Where:
    """What an answer is about: the `details` of a Status."""

    group: str
    kind: str
    name: str = ""

    def qualified(self) -> str:
        """Return the kind or resource with its group, as messages name it."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def details(self) -> Object:
        """Return the `details` of a Status."""
        found = {"name": self.name, "group": self.group, "kind": self.kind}
        return {key: value for key, value in found.items() if value}


@dataclass(slots=True)
class ApiError(Exception):
    """A failure answer: HTTP status, reason, message and details of the Status body."""

    code: int
    reason: str
    message: str
    details: Object | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Object = field(default_factory=dict)

    def body(self) -> Object:
        """Return the Status object."""
        status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": self.metadata, "status": "Failure"}
        status["message"] = self.message
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return {**status, "code": self.code}


def not_found(where: Where) -> ApiError:
    """Return 404 for an object."""
    return ApiError(404, "NotFound", f'{where.qualified()} "{where.name}" not found', where.details())


def unknown_path() -> ApiError:
    """Return 404 for a resource that a served group version does not have."""
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def not_allowed() -> ApiError:
    """Return 405."""
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {})


def bad_request(message: str) -> ApiError:
    """Return 400."""
    return ApiError(400, "BadRequest", message)


def internal(message: str) -> ApiError:
    """Return 500 without a reason, as errors without a class of their own are answered."""
    return ApiError(500, "", message)


def conflict(where: Where, message: str) -> ApiError:
    """Return 409 for a write that can not be fulfilled."""
    text = f'Operation cannot be fulfilled on {where.qualified()} "{where.name}": {message}'
    return ApiError(409, "Conflict", text, where.details())


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def already_exists(where: Where, deleting: bool = False) -> ApiError:
    """Return 409 for a name that is taken."""
    prefix = "object is being deleted: " if deleting else ""
    text = f'{prefix}{where.qualified()} "{where.name}" already exists'
    return ApiError(409, "AlreadyExists", text, where.details())


def forbidden(where: Where, message: str, causes: Iterable[Cause] = ()) -> ApiError:
    """Return 403."""
    subject = f'{where.qualified()} "{where.name}"' if where.name else where.qualified()
    details = where.details()
    if listed := [cause_body(cause) for cause in causes]:
        details["causes"] = listed
    return ApiError(403, "Forbidden", f"{subject} is forbidden: {message}", details)


def cause_body(cause: Cause) -> Object:
    """Return a cause as JSON."""
    found = {"reason": cause.reason, "message": cause.message, "field": cause.field}
    return {key: value for key, value in found.items() if value}


def unprocessable(where: Where, causes: Sequence[Cause]) -> ApiError:
    """Return 422. The message names equal causes once; `details` repeats them as the validators found them."""
    texts = list(dict.fromkeys(cause.text() for cause in causes))
    listed = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    message = f'{where.qualified()} "{where.name}" is invalid: {listed}'
    details = {**where.details(), "causes": [cause_body(cause) for cause in causes]}
    return ApiError(422, "Invalid", message, details)


def options_invalid(kind: str, causes: Sequence[Cause]) -> ApiError:
    """Return 422 for query parameters."""
    return unprocessable(Where("meta.k8s.io", kind), causes)


def timed_out(message: str, retry_after_s: int = 1) -> ApiError:
    """Return 504 for a resourceVersion that the server has not reached."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    details = {"causes": causes, "retryAfterSeconds": retry_after_s}
    return ApiError(504, "Timeout", f"Timeout: {message}", details, {"Retry-After": str(retry_after_s)})


def expired(message: str) -> ApiError:
    """Return 410."""
    return ApiError(410, "Expired", message)
