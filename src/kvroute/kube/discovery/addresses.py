"""Where an engine is reached: its HTTP ports, protocol, bootstrap server and KV events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import cast, get_args

from kvroute.kube.discovery.data_parallel import ranks_of
from kvroute.kube.discovery.labels import (
    BOOTSTRAP_PORT,
    BOOTSTRAP_PORT_ALIAS,
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    PORT,
    PROTOCOL,
)
from kvroute.kube.discovery.roles import ARGS, Source, shards_of
from kvroute.types import TRAITS, Endpoint, InputError, KvProtocol, Role
from kvroute_engine.addresses import host_port

_DEFAULT_PORTS = {"vllm": 8000, "sglang": 30000}
"""Port on which an engine listens unless its command line says otherwise."""
_PORT_NAMES = ("http", "openai", "api", "modelserver", "vllm", "sglang")
"""Names of container ports that are the engine's HTTP port, best first."""
_BOOTSTRAP_DEFAULT = 8998
"""Default bootstrap port of SGLang, and of vLLM's Mooncake connector."""
_MOST_PORTS = 64
_CONNECTORS: Mapping[object, KvProtocol] = {
    "NixlConnector": "vllm",
    "NixlPushConnector": "nixl-push",
    "KvrouteConnector": "vllm",
    "MooncakeConnector": "mooncake",
}
_BOUND = re.compile(r"tcp://(?:\*|::|\[::\]):(\d{1,5})", re.ASCII)
"""Endpoint on which a publisher listens; with another host, vLLM's publisher connects to a subscriber."""


def addresses_of(source: Source, role: Role, warnings: list[InputError]) -> tuple[dict[int, Endpoint], int]:
    """Return the endpoint of each HTTP port, ascending by rank of the data-parallel server, and the number of ranks
    that share the port.

    Raises:
        InputError: a label is wrong, or the port or the protocol is not known.
    """
    protocol = _protocol(source, role, warnings)
    ip = source.pod.status.pod_ip
    address = partial(host_port, ip)
    command = source.command
    scheme = "https" if command is not None and command.has("--ssl-keyfile", "--ssl-certfile") else "http"
    events, replay = _event_ports(source, warnings)
    bootstrap = _bootstrap_port(source, role, protocol)
    ports = _http_ports(source, warnings)
    ranks = ranks_of(source.pod, command, protocol, len(ports), warnings)
    step = (shards_of(source)[0] or 1) if not TRAITS[protocol].needs_bootstrap else 0
    endpoints = {
        port: Endpoint(
            url=f"{scheme}://{address(port)}",
            protocol=protocol,
            bootstrap=address(bootstrap + rank * step) if bootstrap else "",
            kv_events=f"tcp://{address(events + rank)}" if events else "",
            kv_replay=f"tcp://{address(replay + rank)}" if events and replay else "",
        )
        for rank, port in enumerate(ports, start=ranks.first)
    }
    return endpoints, ranks.count


def _protocol(source: Source, role: Role, warnings: list[InputError]) -> KvProtocol:
    own = source.named(PROTOCOL)
    if own:
        if own not in get_args(KvProtocol):
            raise InputError(f"unknown protocol {own!r}", where=PROTOCOL, hint=f"known: {', '.join(TRAITS)}")
        return cast(KvProtocol, own)
    command = source.command
    if command is None:
        return "vllm"
    if command.kind == "sglang":
        return "sglang"
    connectors = _connectors(source)
    known = next((name for name in connectors if name in _CONNECTORS), None)
    if known is not None:
        return _CONNECTORS[known]
    if role != "both" and connectors:
        what = f"kvroute does not know how to transfer KV with {' and '.join(map(str, connectors))}"
        raise InputError(what, where=ARGS, hint=f"use NixlConnector, or name its protocol with {PROTOCOL}")
    if role != "both" and command.kind == "vllm" and not command.has("--kv-transfer-config", "--config"):
        what = "the engine has no --kv-transfer-config, so it transfers no KV"
        warnings.append(InputError(what, where=ARGS, hint="add one, or give it the role both"))
    return "vllm"


def _connectors(source: Source) -> list[object]:
    """Return the names of vLLM's connectors, those inside a MultiConnector instead of itself."""
    config = (source.command.mapping("--kv-transfer-config") if source.command else None) or {}
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    if config.get("kv_connector") == "MultiConnector" and isinstance(inner, list):
        return [connector.get("kv_connector") for connector in inner if isinstance(connector, dict)]
    return [config["kv_connector"]] if "kv_connector" in config else []


def _http_ports(source: Source, warnings: list[InputError]) -> list[int]:
    own = source.named(PORT)
    if source.ports:
        if own and _port_list(own) != list(source.ports):
            what = f"ports {own} are not used: those of the InferencePool are {', '.join(map(str, source.ports))}"
            warnings.append(InputError(what, where=PORT, hint="remove the label, or change the pool's targetPorts"))
        return list(source.ports)
    if own:
        return _port_list(own)
    command = source.command
    if command is not None and command.has("--port"):
        number = command.number("--port")
        if number and number < 2**16:
            return [number]
        raise InputError("the value of --port is not known", where=ARGS, hint=f"give the port with {PORT}")
    if command is not None and command.kind in _DEFAULT_PORTS:
        return [_DEFAULT_PORTS[command.kind]]
    declared = [port for port in source.container.ports or [] if 0 < port.container_port < 2**16]
    by_name = {port.name: port.container_port for port in declared}
    named = next((by_name[name] for name in _PORT_NAMES if name in by_name), None)
    numbers = sorted({port.container_port for port in declared})
    if named is None and len(numbers) != 1:
        what = "it is not clear which port serves HTTP" if numbers else "no port is declared"
        where = f"spec.containers[{source.container.name}].ports"
        raise InputError(what, where=where, hint=f"give the port with {PORT}")
    return [numbers[0] if named is None else named]


def _port_list(text: str) -> list[int]:
    """Return the ports of "8000", "8000-8007" or "8000,8001"."""
    ports: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = _port(first), _port(last if dash else first)
        if low is None or high is None or not low <= high < low + _MOST_PORTS:
            hint = f"give one like 8000, or up to {_MOST_PORTS} like 8000-8007"
            raise InputError(f"{text!r} is not a port or a range of ports", where=PORT, hint=hint)
        ports += range(low, high + 1)
    if len(set(ports)) != len(ports):
        raise InputError(f"{text!r} names a port twice", where=PORT, hint="name each port once")
    return ports


def _port(text: str) -> int | None:
    """Return a port from 1 to 65535; None if the text is none."""
    valid = text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 2**16
    return int(text) if valid else None


def _own_port(source: Source, key: str) -> int | None:
    """Return the port of a label, 0 if it says so, and None without the label."""
    text = source.named(key)
    if not text:
        return None
    number = 0 if text == "0" else _port(text)
    if number is None:
        raise InputError(f"{text!r} is not a port", where=key, hint="give a number from 1 to 65535, or 0 for none")
    return number


def _bootstrap_port(source: Source, role: Role, protocol: KvProtocol) -> int:
    """Return the bootstrap port of a prefill engine, or the port of kvroute's connector; 0 if there is none."""
    if role == "decode" or (role == "both" and TRAITS[protocol].needs_bootstrap):
        return 0
    own = _own_port(source, BOOTSTRAP_PORT)
    if own is not None:
        return own
    command = source.command
    if not TRAITS[protocol].needs_bootstrap:
        return _connector_port(source)
    variables = {variable.name: variable.value for variable in source.container.env or []}
    given = (
        _port(source.pod.annotations.get(BOOTSTRAP_PORT_ALIAS, "")),
        command.number("--disaggregation-bootstrap-port") if command is not None else None,
        _port(variables.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", "")),
    )
    return next((port for port in given if port), _BOOTSTRAP_DEFAULT)


def _connector_port(source: Source) -> int:
    """Return the port on which kvroute's own connector listens; 0 if it is not known."""
    config = (source.command.mapping("--kv-transfer-config") if source.command else None) or {}
    extra = config.get("kv_connector_extra_config")
    port = extra.get("port") if config.get("kv_connector") == "KvrouteConnector" and isinstance(extra, dict) else None
    return port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 2**16 else 0


def _event_ports(source: Source, warnings: list[InputError]) -> tuple[int, int]:
    """Return the ports of KV events and of their replay of rank 0; 0: none."""
    events, replay = _own_port(source, KV_EVENTS_PORT), _own_port(source, KV_REPLAY_PORT)
    config = (source.command.mapping("--kv-events-config") if source.command else None) or {}
    enabled = config.get("enable_kv_cache_events") in (True, "true", "True") or config.get("publisher") == "zmq"
    if events is None:
        events = _bound_port(config.get("endpoint", "tcp://*:5557"), "endpoint", warnings) if enabled else 0
    if replay is None:
        address = config.get("replay_endpoint")
        replay = _bound_port(address, "replay_endpoint", warnings) if enabled and address else 0
    return events, replay


def _bound_port(address: object, name: str, warnings: list[InputError]) -> int:
    match = _BOUND.fullmatch(address) if isinstance(address, str) else None
    port = _port(match[1]) if match else None
    if port is None:
        what = f"the gateway cannot subscribe to KV events: {name} is {str(address)[:80]!r}"
        hint = f"write tcp://*:PORT, or give the port with {KV_EVENTS_PORT}"
        warnings.append(InputError(what, where=f"{ARGS} --kv-events-config", hint=hint))
    return port or 0
