"""The start of an engine with topology labels: settings from the environment, the wait for the labels, and the
environment of the engine.

The variables are those of the proposal ai-dynamo/dynamo#9118 and of Dynamo 1.6 (components/src/dynamo/common/utils/
topology.py), as aliases of kvroute's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvroute_engine.errors import InputError
from kvroute_engine.topology_labels.files import read_labels

ENABLED = ("KVROUTE_TOPOLOGY_ENABLED", "DYN_TOPOLOGY_ENABLED")
MOUNT_PATH = ("KVROUTE_TOPOLOGY_MOUNT_PATH", "DYN_TOPOLOGY_MOUNT_PATH")
LEVEL = (
    "KVROUTE_KV_TRANSFER_TOPOLOGY_LEVEL",
    "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL",
    "DYN_KV_TRANSFER_DOMAIN",
)
POLICY = (
    "KVROUTE_KV_TRANSFER_MISMATCH_POLICY",
    "DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY",
    "DYN_KV_TRANSFER_ENFORCEMENT",
)
WAIT_S = ("KVROUTE_TOPOLOGY_WAIT_S",)
DEFAULT_FOLDERS = (Path("/etc/podinfo/topology"), Path("/etc/dynamo/topology"))
"""Mount paths of the proposal and of Dynamo; the first that exists is used."""
PUBLISHED = "KVROUTE_TOPOLOGY"
"""Variable of the engine with all labels, as a JSON object."""
POLICIES = {"fail": "fail", "required": "fail", "fallback": "fallback", "preferred": "fallback"}
"""Mismatch policies; `required` and `preferred` are Dynamo 1.6's enforcement."""


class MissingTopology(Exception):
    """The configured level has no value in time; the worker must not start."""


@dataclass(frozen=True, slots=True)
class TopologyWorkerSpec:
    """What the environment says about topology."""

    enabled: bool = False
    folder: Path = DEFAULT_FOLDERS[0]
    level: str = ""
    """The level whose value must exist; empty: none must."""
    policy: str = "fail"
    wait_s: float = 30.0
    """How long the value may take."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> TopologyWorkerSpec:
        """Return the settings.

        Raises:
            InputError: a variable has a value that it cannot have, or two names of one variable differ.
        """
        if not _switch(environment):
            return cls()
        folder = _value(environment, MOUNT_PATH)
        policy = _value(environment, POLICY, {name: POLICIES.get(name, name) for name in POLICIES}) or "fail"
        if policy not in POLICIES:
            raise InputError(f"unknown policy {policy!r}", where=POLICY[0], hint="write fail or fallback")
        level = _value(environment, LEVEL)
        if "/" in level or level.startswith("."):
            raise InputError(f"{level!r} is not a level", where=LEVEL[0], hint="write one like zone or rack")
        existing = (folder for folder in DEFAULT_FOLDERS if folder.is_dir())
        return cls(
            enabled=True,
            folder=Path(folder) if folder else next(existing, DEFAULT_FOLDERS[0]),
            level=level,
            policy=POLICIES[policy],
            wait_s=_seconds(_value(environment, WAIT_S)),
        )


def _switch(environment: Mapping[str, str]) -> bool:
    value = _value({key: text.lower() for key, text in environment.items()}, ENABLED)
    if value in ("", "false", "0"):
        return False
    if value in ("true", "1"):
        return True
    raise InputError(f"{value!r} is neither true nor false", where=ENABLED[0], hint="write true")


def _value(environment: Mapping[str, str], names: tuple[str, ...], same: Mapping[str, str] | None = None) -> str:
    """Return the value under any of the names, the first of which is kvroute's.

    Args:
        same: values that mean the same, by value.
    """
    found = {name: text for name in names if (text := environment.get(name, "").strip())}
    meanings = {(same or {}).get(text, text) for text in found.values()}
    if len(meanings) > 1:
        both = " and ".join(f"{name}={text}" for name, text in found.items())
        raise InputError(f"the variables contradict each other: {both}", where=names[0], hint="set one of them")
    return next(iter(found.values()), "")


def _seconds(text: str) -> float:
    try:
        seconds = float(text or 30.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise InputError(f"{text!r} is not a number of seconds", where=WAIT_S[0], hint="write one like 30")
    return seconds


def wait_for_labels(
    settings: TopologyWorkerSpec,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Return the labels of the volume as soon as the configured level has a value.

    The kubelet updates the volume after the pod's labels have changed, by default once a minute.

    Args:
        clock: seconds that only grow.
        pause: waits for a number of seconds.

    Raises:
        MissingTopology: the level has no value after `wait_s`, in one sentence.
        OSError: the volume cannot be read.
    """
    if not settings.enabled:
        return {}
    limit_s = clock() + settings.wait_s
    while True:
        labels = read_labels(settings.folder)
        if not settings.level or settings.level in labels:
            return labels
        left_s = limit_s - clock()
        if left_s <= 0:
            raise MissingTopology(_missing(settings, labels))
        pause(min(1.0, left_s))


def _missing(settings: TopologyWorkerSpec, labels: Mapping[str, str]) -> str:
    path = settings.folder / settings.level
    state = "is empty" if path.is_file() else "does not exist"
    others = f" (the volume has {', '.join(labels)})" if labels else ""
    return (
        f"{path} {state} after {settings.wait_s:g} s, so this worker's {settings.level} is not known{others}; "
        f"label the pod's node, or unset {LEVEL[0]}"
    )


def engine_environment(environment: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine: that of the wrapper, with the labels as JSON in `KVROUTE_TOPOLOGY`."""
    published = {PUBLISHED: msgspec.json.encode(dict(sorted(labels.items()))).decode()} if labels else {}
    return {**environment, **published}
