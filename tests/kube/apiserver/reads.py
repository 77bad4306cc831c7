"""Reads: one object, lists with selectors, pages and resourceVersion semantics."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.kube.apiserver.golang import GoError, parse_uint
from tests.kube.apiserver.requests import Answer, Request
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.selectors import Selection, parse_fields, parse_labels
from tests.kube.apiserver.status import (
    ApiError,
    Cause,
    Object,
    bad_request,
    expired,
    forbidden_field,
    not_found,
    options_invalid,
    quoted,
    timed_out,
    unsupported,
)  # fmt: skip
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.tables import partial, table
from tests.kube.apiserver.views import Form, to_version, without_type

UNCACHED = frozenset({("", "events")})
"""Kinds without a watch cache: their history is the storage's, which compaction cuts."""
TOO_OLD_PAGE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)
TOO_OLD_LIST = "The resourceVersion for the provided list is too old."


def selection(request: Request) -> Selection:
    """Return what a list, watch or deletion selects; raise ApiError 400."""
    labels = parse_labels(request.option("labelSelector"))
    return Selection(labels, parse_fields(request.option("fieldSelector"), request.resource))


def check_list_options(request: Request, watching: bool) -> None:
    """Raise ApiError 422 for options that do not go together."""
    version, match = request.option("resourceVersion"), request.option("resourceVersionMatch")
    causes: list[Cause] = []
    sending = "sendInitialEvents" in request.query
    path = "resourceVersionMatch"
    if watching and request.option("continue"):
        causes.append(forbidden_field(path, "resourceVersionMatch is forbidden when continue is provided"))
    elif watching:
        if match and not sending:
            text = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
            causes.append(forbidden_field(path, text))
        if sending and match != "NotOlderThan":
            text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            causes.append(forbidden_field(path, text))
            if match:
                causes.append(unsupported(path, match, ("NotOlderThan",)))
    else:
        if sending:
            causes.append(forbidden_field("sendInitialEvents", "sendInitialEvents is forbidden for list"))
        causes += _match_errors(version, match)
    if causes:
        raise options_invalid("ListOptions", causes)


def _match_errors(version: str, match: str) -> list[Cause]:
    if not match:
        return []
    path = "resourceVersionMatch"
    causes = []
    if not version:
        text = "resourceVersionMatch is forbidden unless resourceVersion is provided"
        causes.append(forbidden_field(path, text))
    if match not in ("Exact", "NotOlderThan"):
        causes.append(unsupported(path, match, ("Exact", "NotOlderThan", "")))
    elif match == "Exact" and version == "0":
        text = 'resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
        causes.append(forbidden_field(path, text))
    return causes


@dataclass(frozen=True, slots=True)
class Token:
    """A continue token: the version of the list, or -1 for the newest, and the key after which it goes on."""

    version: int
    start: str

    def text(self) -> str:
        """Return the token as clients get it."""
        made = {"v": "meta.k8s.io/v1", "rv": self.version, "start": f"{self.start}\u0000"}
        packed = json.dumps(made, separators=(",", ":"), ensure_ascii=True).encode()
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_token(text: str) -> Token:
    """Return a token from a query; raise ApiError 400."""
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        found = json.loads(raw)
        return Token(int(found["rv"]), str(found["start"]).removesuffix("\u0000"))
    except (ValueError, KeyError, TypeError):
        shown = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[:1] if _is_base64(text) else b""
        sign = f"'\\u{shown[0]:04x}'" if shown and shown[0] >= 0x80 else f"'{shown.decode()}'"
        problem = f"continue key is not valid: invalid character {sign} looking for beginning of value"
        raise bad_request(f"invalid continue token: {problem}") from None


def _is_base64(text: str) -> bool:
    try:
        base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return False
    return True


class Reader:
    """Answers get and list."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, request: Request) -> Object:
        """Return the stored object of a request; raise ApiError 404."""
        held = self._store.get(request.resource.key(request.namespace, request.name))
        if held is None:
            raise not_found(request.resource.where(request.name))
        return held

    def get(self, request: Request, form: Form) -> Answer:
        """Answer a read of one object."""
        self._reached(request.option("resourceVersion"))
        found = to_version(request.resource, self.find(request))
        return Answer(200, shaped(request, found, form))

    def _reached(self, text: str) -> int:
        """Return a version as a number; raise ApiError for one that is invalid or in the future."""
        if not text:
            return 0
        try:
            version = parse_uint(text)
        except GoError as error:
            problem = f"resourceVersion: Invalid value: {quoted(text)}: {error}"
            raise bad_request(f"invalid resource version: {problem}") from None
        if version > self._store.version:
            raise timed_out(f"Too large resource version: {version}, current: {self._store.version}")
        return version

    def collection(self, request: Request, form: Form) -> Answer:
        """Answer a list."""
        check_list_options(request, watching=False)
        selected = selection(request)
        resource = request.resource
        limit = request.number("limit")
        if limit < 0:
            return Answer(200, self._negative_limit(resource))
        items, metadata = self._page(request, selected, limit)
        shown = [to_version(resource, found) for found in items]
        if form.wanted == "Table":
            return Answer(200, table(resource, shown, metadata, request.option("includeObject")))
        if form.wanted == "PartialObjectMetadata":
            body: Object = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
            return Answer(200, {**body, "items": [partial(found) for found in shown]})
        return Answer(200, listing(resource, shown, metadata))

    def _negative_limit(self, resource: Resource) -> Object:
        made = listing(resource, [], {"resourceVersion": str(self._store.version)})
        del made["items"]
        return made

    def _page(self, request: Request, selected: Selection, limit: int) -> tuple[list[Object], Object]:
        """Return the items of a list and its metadata."""
        resource = request.resource
        token = request.option("continue")
        start, shown_version = "", 0
        match, asked = request.option("resourceVersionMatch"), request.option("resourceVersion")
        if token:
            if asked not in ("", "0"):
                raise bad_request("specifying resource version is not allowed when using continue")
            found = parse_token(token)
            shown_version, start = self._token_version(resource, found), found.start
            if asked == "0":
                limit = 0
        else:
            version = self._reached(asked)
            if match == "Exact":
                if not self._available(resource, version):
                    raise expired(TOO_OLD_LIST)
                shown_version = version
            elif asked == "0":
                limit = 0
        version = shown_version or self._store.version
        return self._cut(request, selected, version, start, limit)

    def _cut(
        self, request: Request, selected: Selection, version: int, start: str, limit: int
    ) -> tuple[list[Object], Object]:
        resource = request.resource
        items: list[Object] = []
        metadata: Object = {"resourceVersion": str(version)}
        left, last = 0, ""
        for key, found in self._store.at(resource.stored_in, request.where_namespace(), version):
            place = _place(resource, key[2], key[3], bool(request.where_namespace()))
            if start and place <= start.lstrip("/"):
                continue
            if limit and len(items) == limit:
                left += 1
                continue
            if not selected.matches(found):
                continue
            items.append(found)
            last = place
        if left:
            cached = resource.stored_in not in UNCACHED and version >= self._store.watch_floor
            prefix = "/" if cached else ""
            metadata["continue"] = Token(version, f"{prefix}{last}").text()
            if selected == Selection():
                metadata["remainingItemCount"] = left
        return items, metadata

    def _available(self, resource: Resource, version: int) -> bool:
        """Return whether a past state can be read: from the storage, or from the watch cache of the kind."""
        cached = resource.stored_in not in UNCACHED and version >= self._store.watch_floor
        return cached or version >= self._store.compacted

    def _token_version(self, resource: Resource, token: Token) -> int:
        """Return the version that a page is read at; raise ApiError 410 with a token for the newest."""
        if token.version < 0:
            return self._store.version
        if not self._available(resource, token.version):
            again = Token(-1, token.start.lstrip("/"))
            raise ApiError(410, "Expired", TOO_OLD_PAGE, metadata={"continue": again.text()})
        return token.version


def _place(resource: Resource, namespace: str, name: str, inside: bool) -> str:
    """Return the part of a storage key that orders a list."""
    return name if inside or not resource.namespaced else f"{namespace}/{name}"


def listing(resource: Resource, items: list[Any], metadata: Object) -> Object:
    """Return a list object. Items of built-in kinds have no apiVersion and kind."""
    kind = resource.list_kind or f"{resource.kind}List"
    if resource.custom:
        metadata = {"continue": "", **metadata}
        return {"apiVersion": resource.api_version, "items": items, "kind": kind, "metadata": metadata}
    shown = [without_type(found) for found in items]
    return {"kind": kind, "apiVersion": resource.api_version, "metadata": metadata, "items": shown}


def shaped(request: Request, found: Object, form: Form) -> Object:
    """Return an object in the form that the client asks for."""
    if form.wanted == "Table":
        metadata = {"resourceVersion": found["metadata"]["resourceVersion"]}
        return table(request.resource, [found], metadata, request.option("includeObject"))
    return partial(found) if form.wanted == "PartialObjectMetadata" else found
