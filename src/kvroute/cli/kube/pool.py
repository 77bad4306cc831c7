"""`kvroute kube check --pool`: what it prints of an InferencePool, and which engines Envoy cannot reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from kvroute.kube.discovery.pods import PodReading
    from kvroute.kube.preflight.check import PickerTarget, PoolReport
    from kvroute.types.discovered import Discovered


def envoy_reachable(reading: PodReading) -> PodReading:
    """Return the reading with a finding in place of each engine that `kvroute epp` leaves out."""
    from kvroute.epp.addresses import address_fault
    from kvroute.kube.discovery.pods import PodFinding

    hint = "start it without TLS; Envoy adds TLS to engines itself"
    left_out = tuple(
        PodFinding(pod=f"engine {engine.name}", effect="left out", field="endpoint", what=fault, hint=hint)
        for engine in reading.engines
        if (fault := address_fault(engine.endpoint.url))
    )
    kept = tuple(engine for engine in reading.engines if not address_fault(engine.endpoint.url))
    return replace(reading, engines=kept, findings=(*reading.findings, *left_out))


def print_pool(out: Console, pool: PoolReport, engines: Sequence[Discovered]) -> None:
    """Print the pool, and how many of its endpoints a picker would choose among."""
    lines = [
        ("InferencePool", pool.name),
        ("selector", f"{pool.selector or '-'} ({pool.pods} pods)"),
        ("target ports", ", ".join(map(str, pool.target_ports)) or "-"),
        ("endpoint picker", _picker(pool.picker)),
        ("endpoints", _endpoints(engines)),
    ]
    for name, value in lines:
        out.print(f"{name + ':':<17}{value}", markup=False, highlight=False, soft_wrap=True)
    out.print()


def _picker(picker: PickerTarget | None) -> str:
    if picker is None:
        return "none, so gateways ask no picker"
    port = "no port" if not picker.port else f"port {picker.port}"
    target = "" if picker.target_port in (None, picker.port) else f" (target port {picker.target_port})"
    return f"{picker.kind} {picker.name}, {port}{target}, {picker.failure_mode}"


def _endpoints(engines: Sequence[Discovered]) -> str:
    roles = Counter(engine.role for engine in engines if engine.ready)
    ready = sum(roles.values())
    kinds = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    return f"{ready} of {len(engines)} ready" + (f": {kinds}" if kinds else "")
