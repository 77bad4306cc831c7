"""Checks before discovery starts: whether the API server knows namespace and InferencePool, and lists the pods."""

from __future__ import annotations

import asyncio
import ssl

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from kvroute.kube.api.client import Access
from kvroute.kube.api.inference_pool import members_of, not_installed
from kvroute.kube.api.requests import HEADERS, PODS, POOLS, Selection, close_client, refusal_of
from kvroute.kube.discovery.engines import DiscoverySpec
from kvroute.types import InputError

_LIMIT_S = 10.0
"""Longest time that the checks take."""


async def check_access(access: Access, options: DiscoverySpec, pool: str | None = None) -> None:
    """Ask for the namespace, for one pod of it, and for its InferencePool. A server that does not answer is no fault,
    and neither is one that lets the namespace not be read.

    Args:
        pool: name of the InferencePool; None: there is none.

    Raises:
        InputError: there is no usable kubeconfig, there is no such namespace or pool, the pool selects nothing usable,
            or the server refuses to list pods or pools.
    """
    namespace = options.selection(access).namespace
    client = access.connect()
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _check(client, namespace, options.selection(access).parameters())
            if pool is not None:
                await _check_pool(client, namespace, pool)
    except msgspec.MsgspecError as error:
        what = f"the API server sends no list of InferencePools ({error})"
        raise InputError(what, where=str(client.base_url), hint="check its address") from None
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ssl.SSLError, ConfigError):
        return  # TimeoutError is an OSError
    finally:
        await close_client(client)


async def _check(client: httpx2.AsyncClient, namespace: str, selection: dict[str, str]) -> None:
    where = str(client.base_url)
    response = await client.get(PODS.url(namespace), params=selection | {"limit": "1"}, headers=HEADERS)
    if 400 <= response.status_code < 500 and response.status_code != 429:
        what = f"the API server refuses to list pods: {refusal_of(response)}"
        raise InputError(what, where=where, hint="check the credentials, the namespace and the RBAC rules")
    if not namespace:
        return
    response = await client.get(f"api/v1/namespaces/{namespace}", headers=HEADERS)
    if response.status_code == 404:
        what = f"there is no namespace {namespace!r}"
        raise InputError(what, where=where, hint="create it, or give another one")


async def _check_pool(client: httpx2.AsyncClient, namespace: str, pool: str) -> None:
    where = str(client.base_url)
    selection = Selection(namespace, name=pool)
    response = await client.get(POOLS.url(namespace), params=selection.parameters(), headers=HEADERS)
    if response.status_code == 404:
        raise not_installed(where)
    if 400 <= response.status_code < 500 and response.status_code != 429:
        what = f"the API server refuses to list InferencePools: {refusal_of(response)}"
        raise InputError(what, where=where, hint="check the credentials, the namespace and the RBAC rules")
    if response.status_code != 200:
        return
    found = POOLS.decode_list(response.content).items
    if not found:
        what = f"there is no InferencePool {namespace}/{pool}"
        raise InputError(what, where=where, hint="create it, or give another one")
    try:
        members_of(found[0])
    except InputError as fault:
        what = f"{fault.where}: {fault.what}"
        raise InputError(what, where=f"InferencePool {namespace}/{pool}", hint=fault.hint) from None
