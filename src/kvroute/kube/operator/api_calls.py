"""Calls of the operator to the API server: single objects, each by a right of the table `RIGHTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec

from kvroute.kube.api.requests import close_client, refusal_of
from kvroute.kube.operator.observed import MANAGED_BY
from kvroute.kube.operator.rights import RIGHTS, ResourceKind
from kvroute.kube.resources import Object

_TIMEOUT_S = 15.0
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"


class ApiCalls:
    """Reads and writes single objects.

    Every method raises `Refused` for an answer with an error other than those that it names, and `httpx2.HTTPError` if
    the server does not answer.
    """

    def __init__(self, connect: Callable[[], httpx2.AsyncClient]) -> None:
        self._connect = connect
        self._client: httpx2.AsyncClient | None = None

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object with `apiVersion` and `kind`; None if it, or its kind, does not exist."""
        response = await self._send("get", "GET", kind, kind.path(namespace, name))
        return _object(response, kind, absent=404)

    async def create(self, kind: ResourceKind, namespace: str, obj: Object) -> dict[str, Any] | None:
        """Create an object; None if one of that name exists."""
        response = await self._send("create", "POST", kind, kind.path(namespace), obj)
        return _object(response, kind, absent=409)

    async def update(self, kind: ResourceKind, namespace: str, obj: Object) -> dict[str, Any] | None:
        """Replace an object that has the resourceVersion of `obj`; None if it has another one."""
        path = kind.path(namespace, obj["metadata"]["name"])
        return _object(await self._send("update", "PUT", kind, path, obj), kind, absent=409)

    async def apply(self, kind: ResourceKind, obj: Object, sub: str = "") -> None:
        """Apply an object by server-side apply, with force."""
        metadata = obj["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"], sub)
        parameters = {"fieldManager": MANAGED_BY, "force": "true"}
        _check(await self._send("patch", "PATCH", kind, path, obj, _APPLY, parameters, sub=sub))

    async def patch(self, kind: ResourceKind, namespace: str, name: str, change: Object) -> None:
        """Send a JSON merge patch; with `metadata.resourceVersion` it fails with 409 if the object has changed."""
        path = kind.path(namespace, name)
        _check(await self._send("patch", "PATCH", kind, path, change, _MERGE, {"fieldManager": MANAGED_BY}))

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str) -> None:
        """Delete an object if it has this UID; do nothing if it does not exist, or has another one."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        response = await self._send("delete", "DELETE", kind, kind.path(namespace, name), body)
        if response.status_code not in (404, 409):
            _check(response)

    async def serves(self, kind: ResourceKind) -> bool:
        """Return True if the server has a kind; every user may ask for that."""
        response = await self._request("GET", f"apis/{kind.api_version}")
        if response.status_code == 404:
            return False
        _check(response)
        resources = msgspec.json.decode(response.content).get("resources") or ()
        return any(resource.get("name") == kind.plural for resource in resources)

    async def close(self) -> None:
        """Close the connection; the next call opens another one, with new credentials."""
        client, self._client = self._client, None
        if client is not None:
            await close_client(client)

    async def _send(
        self,
        verb: str,
        method: str,
        kind: ResourceKind,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        parameters: dict[str, str] | None = None,
        *,
        sub: str = "",
    ) -> httpx2.Response:
        resource = f"{kind.plural}/{sub}" if sub else kind.plural
        assert verb in RIGHTS[kind.group, resource], (verb, resource)
        return await self._request(method, path, body, content_type, parameters)

    async def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        parameters: dict[str, str] | None = None,
    ) -> httpx2.Response:
        self._client = self._client or self._connect()
        headers = {"Accept": "application/json", "Content-Type": content_type}
        content = None if body is None else msgspec.json.encode(body)
        timeout = httpx2.Timeout(_TIMEOUT_S)
        try:
            return await self._client.request(
                method, path, content=content, headers=headers, params=parameters, timeout=timeout
            )
        except httpx2.HTTPError:
            await self.close()
            raise


def _check(response: httpx2.Response) -> None:
    if response.status_code >= 300:
        raise refusal_of(response)


def _object(response: httpx2.Response, kind: ResourceKind, *, absent: int) -> dict[str, Any] | None:
    if response.status_code == absent:
        return None
    _check(response)
    found: dict[str, Any] = msgspec.json.decode(response.content)
    return {"apiVersion": kind.api_version, "kind": kind.kind} | found
