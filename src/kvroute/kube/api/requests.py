"""Lists and watches as HTTP: paths, parameters, pages, lines and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic

import httpx2
import msgspec

from kvroute.kube.api.inference_pool import GROUP_VERSION, InferencePool, Service
from kvroute.kube.api.objects import KubeNode, KubePod
from kvroute.kube.api.store import Object

HEADERS = {"Accept": "application/json"}
_RETRY_AFTER_MAX_S = 30.0
"""Longest pause that the server may ask for."""


class ListMeta(msgspec.Struct, frozen=True):
    """Metadata of one answer to a list."""

    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continue_: str = msgspec.field(name="continue", default="")


class ListPage(msgspec.Struct, Generic[Object], frozen=True):
    """One answer to a list."""

    metadata: ListMeta
    items: list[Object] | None = None


@dataclass(frozen=True, slots=True)
class Resource(Generic[Object]):
    """A kind of object: where the API server has it, and how it is decoded."""

    path: str
    """Path of its API, such as `api/v1`."""
    plural: str
    kind: type[Object]

    def url(self, namespace: str) -> str:
        """Return the path of the objects of a namespace; of all objects if it is empty."""
        return f"{self.path}/namespaces/{namespace}/{self.plural}" if namespace else f"{self.path}/{self.plural}"

    def decode_list(self, text: bytes) -> ListPage[Object]:
        """Decode one answer to a list."""
        return msgspec.json.decode(text, type=ListPage[self.kind])  # type: ignore[name-defined]


PODS = Resource("api/v1", "pods", KubePod)
NODES = Resource("api/v1", "nodes", KubeNode)
POOLS = Resource(f"apis/{GROUP_VERSION}", "inferencepools", InferencePool)
SERVICES = Resource("api/v1", "services", Service)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a kind are followed."""

    namespace: str = ""
    """Empty: all."""
    labels: str = ""
    """Label selector, such as `app=vllm,role in (prefill,decode)`; empty: all."""
    name: str = ""
    """Name of the only object; empty: all."""

    def parameters(self) -> dict[str, str]:
        """Return the parameters of a request."""
        labels = {"labelSelector": self.labels} if self.labels else {}
        return labels | ({"fieldSelector": f"metadata.name={self.name}"} if self.name else {})


class ApiRefused(Exception):
    """The API server has answered with an error."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        self.status, self.message, self.retry_after_s = status, message, retry_after_s
        super().__init__(f"{status}: {message}")


class Status(msgspec.Struct):
    """An error of the API server as an object."""

    message: str = ""
    code: int = 0


def refusal_of(response: httpx2.Response) -> ApiRefused:
    """Return what a response with an error says; proxies and the server's limits answer with plain text."""
    try:
        message = msgspec.json.decode(response.content, type=Status).message
    except (msgspec.MsgspecError, UnicodeError):
        message = " ".join(response.text[:200].split())
    after = response.headers.get("retry-after", "")
    wait_s = min(float(after), _RETRY_AFTER_MAX_S) if after.isascii() and after.isdecimal() else 0.0
    return ApiRefused(response.status_code, message or response.reason_phrase, wait_s)


async def close_client(client: httpx2.AsyncClient) -> None:
    """Close all connections of a client, also if the caller is cancelled meanwhile: its pool closes one after another,
    and a cancellation between two of them would leave the others open."""
    closing = asyncio.ensure_future(client.aclose())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream at newlines only: a chunk may hold several events, or a part of one."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        *whole, tail = rest.split(b"\n")
        rest = bytearray(tail)
        for line in whole:
            if line:
                yield bytes(line)
