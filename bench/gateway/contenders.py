"""The compared routers as programs in front of the same engines: kvroute in several set-ups, and two peers."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.clusters import served, write
from bench.gateway.load import CHAT, Plan, bodies
from bench.gateway.program import Program, free_ports
from bench.measurement import Failed
from bench.peers.routers import BOOTSTRAP_PORT, sglang_router, vllm_router

from kvroute.types import KvProtocol

READY_S = 60.0
PROXY_CPUS, OTHER_CPUS = (0,), (1,)
"""The proxy has its own core; engines and clients share the other one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Input of a contender: the engines' ports, its own port, and a folder for files."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    port: int
    second_port: int
    folder: Path

    @classmethod
    def of(cls, workers: Mapping[str, Any], folder: Path) -> Place:
        """Return a place in front of the engines with these ports, on free ports."""
        port, second_port = free_ports(2)
        return cls(tuple(workers["prefill"]), tuple(workers["decode"]), port, second_port, folder)


Command = Callable[[Place], list[str]]


def kvroute(section: Mapping[str, Any] | None = None, protocol: KvProtocol = "vllm") -> Command:
    """Return `kvroute serve` with NetKV. `section` is its `gateway:` section without ports; FOLDER is replaced."""

    def command(place: Place) -> list[str]:
        ports = {"listen": {"port": place.port}, "admin": {"port": place.second_port}}
        gateway = {"policy": "netkv", **ports, **(section or {})}
        gateway = json.loads(json.dumps(gateway).replace("FOLDER", str(place.folder)))
        bootstrap = "" if protocol == "vllm" else f"127.0.0.1:{BOOTSTRAP_PORT}"
        file = served(place.prefill, place.decode, gateway, protocol=protocol, bootstrap=bootstrap)
        return [str(Path(sys.executable).with_name("kvroute")), "serve", str(write(file, place.folder))]

    return command


CONTENDERS: dict[str, Command] = {
    "kvroute": kvroute(),
    "vllm-router": lambda place: vllm_router(place.port, place.second_port, place.prefill, place.decode),
    "sglang-router": lambda place: sglang_router(place.port, place.second_port, place.prefill, place.decode),
    "kvroute, foresight": kvroute({"policy": "foresight"}),
    "kvroute, event log": kvroute({"log": {"events": "FOLDER/events.jsonl"}}),
    "kvroute, tokenizer": kvroute({"prompt": {"tokenizer": "FOLDER/tokenizer.json"}}),
    "kvroute, SGLang": kvroute(protocol="sglang"),
}


def started(name: str, place: Place) -> Program:
    """Start a contender and wait until it responds; the caller ends it. Raises Failed if it does not respond."""
    return answering(CONTENDERS[name](place), name, place)


def answering(command: list[str], name: str, place: Place, cpus: Collection[int] = PROXY_CPUS) -> Program:
    """Start a proxy by its command and wait until it responds. `cpus`: the cores that it may use; empty: all."""
    program = Program(command, name=name, cpus=cpus)
    try:
        program.listens(place.port, READY_S)
        _await_response(program, f"http://127.0.0.1:{place.port}")
    except BaseException:
        program.end()
        raise
    return program


def fetch(url: str, body: bytes | None = None, timeout_s: float = 10.0, method: str | None = None) -> bytes:
    """Send one request with the standard library's client. Raises OSError without response or for an error status."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        data: bytes = answer.read()
        return data


def fetch_json(url: str, method: str | None = None) -> Any:
    """Return the JSON document at an address."""
    return json.loads(fetch(url, method=method))


def _await_response(program: Program, url: str) -> None:
    """Wait until the proxy has responded to one request: some routers listen before they have their workers."""
    body, deadline, why = bodies(Plan())[0], time.monotonic() + READY_S, ""
    while time.monotonic() < deadline and program.alive:
        try:
            fetch(url + CHAT, body)
            return
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")
        except OSError as error:
            why = str(error)
        time.sleep(0.2)
    raise Failed(f"{program.name} does not answer: {why or program.errors()}")


def legs(name: str, folder: Path) -> str:
    """Return a contender's legs for one request as the engines receive them: "prefill, then decode with
    kv_transfer_params".

    Raises:
        Failed: the contender did not split the request into two legs that refer to each other.
    """
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--prefill-ms", "20"]
    with Program(worker, cpus=OTHER_CPUS) as mock:
        workers = mock.document()
        place = Place.of(workers, folder)
        control = f"http://127.0.0.1:{workers['control']}"
        with started(name, place):
            fetch_json(control + "/capture", method="POST")
            body = json.loads(bodies(Plan(stream_tokens=3))[1])
            fetch(f"http://127.0.0.1:{place.port}{CHAT}", json.dumps(body).encode())
            seen = [entry for entry in fetch_json(control + "/seen") if entry["path"].startswith(CHAT)]
    return _described(name, {entry["role"]: entry for entry in seen}, len(seen))


def _described(name: str, by_role: Mapping[str, Any], count: int) -> str:
    if count != 2 or len(by_role) != 2:
        raise Failed(f"{name} sent {count} legs to {', '.join(by_role) or 'no engine'}")
    prefill, decode = by_role["prefill"], by_role["decode"]
    if room := decode["body"].get("bootstrap_room"):
        if prefill["body"].get("bootstrap_room") != room:
            raise Failed(f"{name}: the legs are in different bootstrap rooms")
        return "both legs at once, one bootstrap_room"
    params = decode["body"].get("kv_transfer_params") or {}
    if params.get("remote_engine_id") != prefill["engine"] or decode["at_s"] < prefill["at_s"] + 0.015:
        raise Failed(f"{name}: the decode leg does not carry the parameters of the prefill's response")
    return "prefill, then decode with its kv_transfer_params"
