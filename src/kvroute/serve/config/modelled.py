"""What a simulation of a cluster file takes from its `gateway:` section, and what it does not model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from kvroute.control import ControlSpec
from kvroute.serve.config.service_classes import DEFAULT_CLASS
from kvroute.serve.config.settings import SECTION, GatewaySettings

Effect: TypeAlias = Literal["modelled", "not modelled", "none"]
"""`none`: no request of a trace could notice the setting, such as the port of the gateway."""
EFFECTS: dict[str, Effect] = {
    "listen": "none",
    "admin": "none",
    "policy": "modelled",
    "parameters": "modelled",
    "shadow": "modelled",
    "prefill": "modelled",
    "constraint": "modelled",
    "reserve": "modelled",
    "reserve_output_tokens": "not modelled",
    "models": "none",
    "adapters": "not modelled",
    "session_affinity": "not modelled",
    "oracle": "modelled",
    "oracle.prometheus.url": "none",
    "oracle.prometheus.timeout": "none",
    "prompt": "none",
    "prompt.context": "not modelled",
    "prompt.memory": "not modelled",
    "prefix": "not modelled",
    "limits": "none",
    "limits.in_flight": "modelled",
    "limits.queue": "modelled",
    "limits.queue_wait": "modelled",
    "limits.per_key": "not modelled",
    "timeouts": "not modelled",
    "timeouts.drain": "none",
    "retries": "not modelled",
    "breaker": "not modelled",
    "health": "not modelled",
    "scrape": "none",
    "scrape.interval": "modelled",
    "keys": "none",
    "keys.concurrency": "not modelled",
    "keys.classes": "not modelled",
    "keys.tenants": "not modelled",
    "classes": "not modelled",
    "classes.default": "none",
    "classes.default.requests_per_minute": "not modelled",
    "classes.default.tokens_per_minute": "not modelled",
    "classes.default.slo.ttft": "modelled",
    "classes.default.slo.late": "not modelled",
    "classes.default.slo.header": "not modelled",
    "fair_queue": "modelled",
    "upstream_key_env": "none",
    "forward_headers": "none",
    "passthrough": "none",
    "cache_salt": "not modelled",
    "cache_salt_secret_env": "none",
    "tracing": "none",
    "log": "none",
    "measure": "not modelled",
    "layerwise": "modelled",
    "forwarding_thread": "none",
    "offload": "modelled",
    "offload.copy.timeout": "not modelled",
    "offload.wan_path": "not modelled",
    "offload.role_switch": "not modelled",
    "offload.role_switch.url": "modelled",
    "offload.role_switch.command": "modelled",
    "autoscaling": "not modelled",
    "replication": "not modelled",
}
"""Effect of each setting on a simulation. A setting without an entry has that of the nearest entry above it."""
_MODELLED_VALUES: dict[str, tuple[Any, ...]] = {
    "prefix": ("auto", "events"),
    "classes.default.slo.late": ("refuse",),
    "cache_salt": ("none",),
    "measure": ("auto",),
}
"""Values that ask for what a simulation does anyway."""


def simulated_spec(settings: GatewaySettings) -> ControlSpec:
    """Return the configuration of the core that serves these settings, in front of simulated engines.

    They report the blocks that they store and evict, so the core does not estimate their caches. They have no queue for
    KV memory, so a request for which no instance has room is rejected; a gateway lets it wait in an engine.
    """
    return msgspec.structs.replace(settings.control_spec(), cache_block_tokens=0, overcommit=False)


def default_ttft_s(settings: GatewaySettings) -> float | None:
    """Return the limit on the time to the first token of a request without a key, beyond which it is refused; None:
    there is none."""
    found = settings.classes.get(DEFAULT_CLASS)
    if found is None or found.slo is None or found.slo.ttft_s is None or found.slo.late != "refuse":
        return None
    return float(found.slo.ttft_s)


def effect_of(path: tuple[str, ...]) -> tuple[str, Effect]:
    """Return the entry of EFFECTS for a setting, by its keys from the section on, and its effect."""
    parts = next(path[:end] for end in range(len(path), 0, -1) if ".".join(path[:end]) in EFFECTS)
    name = ".".join(parts)
    return name, EFFECTS[name]


def not_modelled(section: Mapping[str, Any]) -> list[str]:
    """Return the settings of a file's section that a simulation leaves out, by name, sorted."""
    found: set[str] = set()
    for path, value in _leaves(section):
        name, effect = effect_of(path)
        if effect == "not modelled" and value not in _MODELLED_VALUES.get(".".join(path), ()):
            found.add(".".join((SECTION, *path[:2])) if name == "classes" else f"{SECTION}.{name}")
    return sorted(found)


def _leaves(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each setting that is not a section, and sections without settings."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value
