"""What lightkube raises or returns for the answers of the server: file 18."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.models import Context, User
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import ConfigMap, Pod
from lightkube.types import PatchType
from tests.kube.replay import Replay
from tests.kube.scenario import Observe, Scenario
from tests.kube.scenarios.objects import CONFIG_MAPS
from tests.waiting import until

SHOWN_LENGTH = 160
"""The recorder cut the texts of errors."""
UnknownGroup = create_namespaced_resource("nosuch.example.com", "v1", "Nope", "nopes")
UnknownVersion = create_namespaced_resource("apps", "v9", "Deployment", "deployments")


def configuration(url: str, token: str) -> KubeConfig:
    """Return the configuration of a client with a bearer token."""
    made = KubeConfig.from_server(url)
    context = Context(cluster="default", user="test", namespace="default")
    return KubeConfig(
        clusters=made.clusters, users={"test": User(token=token)}, contexts={"test": context}, current_context="test"
    )


def raised(error: Exception) -> dict[str, Any]:
    """Return what the recorder kept of an error."""
    if isinstance(error, ApiError):
        details = error.status.details
        causes = (details.causes if details else None) or []
        return {
            "raises": "ApiError", "status.code": error.status.code, "status.reason": error.status.reason,
            "causes": len(causes),
        }  # fmt: skip
    assert isinstance(error, httpx2.HTTPStatusError)
    return {"raises": "httpx2.HTTPStatusError", "text": str(error).replace("http:", "https:", 1)[:SHOWN_LENGTH]}


Call = Callable[[Client], Any]


def called(call: Call, token: str = "admin") -> Observe:
    """Return the observation of a call: the class of the result, or what was raised."""

    async def observe(replay: Replay) -> Any:
        def make() -> Any:
            with Client(configuration(replay.server.url, token), field_manager="lk", trust_env=False) as client:
                try:
                    found = call(client)
                except (ApiError, httpx2.HTTPStatusError) as error:
                    return raised(error)
            return found if isinstance(found, dict) else {"returns": None if found is None else type(found).__name__}

        return await asyncio.to_thread(make)

    return observe


def config_map(name: str = "lk", **data: str) -> ConfigMap:
    """Return a ConfigMap."""
    return ConfigMap(metadata=ObjectMeta(name=name), data=data or {"a": "1"})


def stale(client: Client) -> Any:
    """Replace an object by one that is based on an earlier version."""
    old = client.get(ConfigMap, "lk")
    client.patch(ConfigMap, "lk", {"data": {"b": "2"}}, patch_type=PatchType.MERGE)
    return client.replace(old)


def applied(client: Client, force: bool = False) -> Any:
    """Apply a field of another manager with another value."""
    found = ConfigMap(apiVersion="v1", kind="ConfigMap", metadata=ObjectMeta(name="lk"), data={"a": "9"})
    return client.apply(found, field_manager="other", force=force)


def too_old(client: Client) -> Any:
    """Watch from a version before the history."""
    return next(iter(client.watch(ConfigMap, resource_version="1")))


async def resumed(replay: Replay) -> Any:
    """Return the event of a watch that the server has ended once, so that lightkube had to open it again."""
    _, held = await replay.send("GET", CONFIG_MAPS)
    version = held["metadata"]["resourceVersion"]
    opened = sum(entry["verb"] == "watch" for entry in replay.server.audit)

    def first() -> Any:
        with Client(configuration(replay.server.url, "admin"), trust_env=False) as client:
            kind, found = next(iter(client.watch(ConfigMap, resource_version=version, server_timeout=1)))
            assert found.metadata is not None
            return {"eventsAfterServerTimeout": [[kind, found.metadata.name]]}

    watching = asyncio.create_task(asyncio.to_thread(first))
    await until(lambda: sum(entry["verb"] == "watch" for entry in replay.server.audit) >= opened + 2)
    await replay.send("POST", CONFIG_MAPS, {"metadata": {"name": "lkw"}})
    return await watching


def leased(renewed: datetime) -> Call:
    """Return the creation of a Lease with a time."""

    def call(client: Client) -> Any:
        lease = Lease(metadata=ObjectMeta(name="lk"), spec=LeaseSpec(renewTime=renewed))
        found = client.create(lease)
        assert found.spec is not None
        return {"renewTime": str(found.spec.renewTime)}

    return call


SECOND = datetime(2020, 1, 1, 0, 0, 1, tzinfo=UTC)
JSON_TEST = [{"op": "test", "path": "/data/a", "value": "no"}]
CALLS: Mapping[str, Observe] = {
    "create": called(lambda client: client.create(config_map())),
    "create-exists": called(lambda client: client.create(config_map())),
    "get-missing": called(lambda client: client.get(ConfigMap, "missing")),
    "unauthorized": called(lambda client: client.get(ConfigMap, "lk"), token="other"),
    "forbidden": called(lambda client: client.get(ConfigMap, "lk"), token="nobody"),
    "replace-stale": called(stale),
    "invalid": called(lambda client: client.create(Pod(metadata=ObjectMeta(name="lk"), spec={"containers": []}))),  # type: ignore[arg-type]
    "apply-conflict": called(applied),
    "apply-force": called(lambda client: applied(client, force=True)),
    "patch-json-test-fails": called(
        lambda client: client.patch(ConfigMap, "lk", JSON_TEST, patch_type=PatchType.JSON)
    ),
    "delete": called(lambda client: client.delete(ConfigMap, "lk")),
    "delete-missing": called(lambda client: client.delete(ConfigMap, "lk")),
    "unknown-group-text-404": called(lambda client: client.get(UnknownGroup, "x")),
    "list-unknown-group": called(lambda client: list(client.list(UnknownGroup))),
    "unknown-version-json-404": called(lambda client: client.get(UnknownVersion, "x")),
    "watch-too-old": called(too_old),
    "watch-reconnects-after-timeout": resumed,
    "lease-microtime": called(leased(SECOND.replace(microsecond=500_000))),
    "lease-microtime-cleanup": called(lambda client: client.delete(Lease, "lk")),
    "lease-microtime-whole-second": called(leased(SECOND)),
    "naive-datetime": called(leased(SECOND.replace(tzinfo=None, microsecond=500_000))),
}  # fmt: skip
LIGHTKUBE = Scenario(observations={f"18-lightkube/lightkube-{name}": observe for name, observe in CALLS.items()})
