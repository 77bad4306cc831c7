"""One request as the API server sees it: user, verb, resource, query options; and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kube.apiserver.golang import GoError, parse_int
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import (
    Cause,
    Object,
    bad_request,
    forbidden_field,
    invalid,
    options_invalid,
    required,
    too_long,
    unsupported,
)  # fmt: skip

FIELD_VALIDATION = ("", "Ignore", "Strict", "Warn")
FIELD_MANAGER_MAX_BYTES = 128
APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def info(self) -> Object:
        """Return the UserInfo object."""
        found: Object = {"username": self.name, "uid": self.uid, "groups": list(self.groups)}
        found["extra"] = {name: list(values) for name, values in self.extra.items()}
        return {name: value for name, value in found.items() if value}


@dataclass(slots=True)
class Request:
    """One request for a resource."""

    method: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    user: User
    verb: str
    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    warnings: list[str] = field(default_factory=list)

    def option(self, name: str) -> str:
        """Return the first value of a query parameter, or an empty text."""
        return (self.query.get(name) or [""])[0]

    def flag(self, name: str) -> bool:
        """Return a boolean parameter: every value but 0 and false counts as true, as in the API server."""
        values = self.query.get(name) or ["0"]
        return values[0].lower() not in ("0", "false")

    def number(self, name: str) -> int:
        """Return an integer parameter, 0 if absent; raise ApiError 400."""
        text = self.option(name)
        try:
            return parse_int(text) if text else 0
        except GoError as error:
            raise bad_request(str(error)) from None

    @property
    def content_type(self) -> str:
        """Return the media type of the body, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def dry_run(self) -> bool:
        """Return whether nothing may be stored."""
        return "All" in self.query.get("dryRun", [])

    @property
    def field_validation(self) -> str:
        """Return how unknown fields are treated."""
        return self.option("fieldValidation") or "Warn"

    @property
    def manager(self) -> str:
        """Return the field manager: the parameter, or the name of the client program."""
        agent = self.headers.get("user-agent", "")
        return self.option("fieldManager") or agent.partition("/")[0] or "unknown"

    def where_namespace(self) -> str:
        """Return the namespace of the objects, empty for cluster resources."""
        return self.namespace if self.resource.namespaced else ""

    def check_options(self, kind: str) -> None:
        """Raise ApiError 422 for write options that are not valid; `kind` is CreateOptions or another."""
        causes: list[Cause] = []
        dry_run = self.query.get("dryRun")
        if dry_run is not None and dry_run != ["All"]:
            causes.append(unsupported("dryRun", dry_run, ("All",)))
        if self.option("fieldValidation") not in FIELD_VALIDATION:
            causes.append(unsupported("fieldValidation", self.option("fieldValidation"), FIELD_VALIDATION))
        if kind == "PatchOptions":
            applying = self.content_type == APPLY
            if applying and not self.option("fieldManager"):
                causes.append(required("fieldManager", "is required for apply patch"))
            if not applying and self.query.get("force"):
                causes.append(forbidden_field("force", "may not be specified for non-apply patch"))
        causes += _manager_errors(self.option("fieldManager"))
        if causes:
            raise options_invalid(kind, causes)


def _manager_errors(manager: str) -> list[Cause]:
    if len(manager.encode()) > FIELD_MANAGER_MAX_BYTES:
        return [too_long("fieldManager", FIELD_MANAGER_MAX_BYTES)]
    for at, sign in enumerate(manager):
        if not sign.isprintable():
            return [invalid("fieldManager", manager, f"invalid character U+{ord(sign):04X} (at position {at})")]
    return []


@dataclass(slots=True)
class Answer:
    """A complete answer. A body of bytes or text is sent as it is."""

    status: int
    body: Object | str | bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


def success(details: Object | None = None, code: int = 200) -> Object:
    """Return the Status of a success."""
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details is not None:
        status["details"] = details
    if code == 201:
        status["code"] = code
    return status
