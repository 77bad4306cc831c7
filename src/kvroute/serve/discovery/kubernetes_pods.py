"""Engines by the pods of a Kubernetes cluster, with a log line for each finding and each failure."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec

from kvroute.kube.api.client import Access
from kvroute.kube.discovery.engines import DiscoverySpec, KubernetesDiscovery
from kvroute.kube.discovery.places import DEFAULT_LEVELS
from kvroute.kube.discovery.pods import Effect, PodFinding
from kvroute.kube.discovery.pool_discovery import PoolDiscovery
from kvroute.serve.observe.logs import log_event
from kvroute.topology.schema import KubernetesEntry
from kvroute.types import OwnPicker, Reporter

_CHECK_S = 1.0
"""Interval between checks of failures. One that a single check sees, as a watch that is cut, is not logged."""
_LOGGED_MOST = 50
"""Number of new findings that are logged one by one."""
_EFFECTS: tuple[Effect, ...] = ("left out", "warning", "waiting")


def access_of(section: KubernetesEntry, folder: Path) -> Access:
    """Return how to reach the API server. Args: `folder`: where a relative path starts."""
    path = section.kubeconfig
    where = None if path is None else Path(os.path.abspath(folder / Path(path).expanduser()))
    return Access(where, section.context)


def options_of(section: KubernetesEntry) -> DiscoverySpec:
    """Return which pods are followed, and which node labels give their places."""
    given = {level: tuple(keys) for level, keys in msgspec.structs.asdict(section.levels).items() if keys}
    namespace = "" if section.namespace == "*" else section.namespace
    return DiscoverySpec(namespace, section.selector.strip(), replace(DEFAULT_LEVELS, **given))


class KubernetesPods:
    """The source `discovery.kubernetes`."""

    def __init__(self, section: KubernetesEntry, folder: Path, picker: OwnPicker | None = None) -> None:
        """
        Args:
            folder: where a relative path starts.
            picker: this process as the endpoint picker of an InferencePool; None: it is none.

        Raises:
            InputError: there is no usable kubeconfig.
        """
        access, options = access_of(section, folder), options_of(section)
        self._discovery: KubernetesDiscovery | PoolDiscovery = (
            KubernetesDiscovery(access, options, self._on_findings)
            if section.pool is None
            else PoolDiscovery(access, options, section.pool, picker, self._on_findings)
        )
        self._findings: tuple[PodFinding, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Why pods or nodes are not up to date."""
        return self._discovery.failures

    @property
    def findings(self) -> dict[str, int]:
        """Number of findings by effect: `left out`, `warning` or `waiting`."""
        counts = Counter(finding.effect for finding in self._findings)
        return {effect: counts[effect] for effect in _EFFECTS}

    async def run(self, report: Reporter) -> None:
        """See `DiscoverySource`. While the server is away, the engines of the last report stay."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._discovery.run(report))
            group.create_task(self._log_failures())

    async def _log_failures(self) -> None:
        """Log when pods or nodes have begun to fail, and when they are up to date again."""
        before: set[str] = set()
        logged: set[str] = set()
        while True:
            await asyncio.sleep(_CHECK_S)
            now = {why.partition(":")[0]: why for why in self._discovery.failures}
            for part in sorted(now.keys() & before - logged):
                log_event("warning", "discovery_failing", reason=now[part])
            for part in sorted(logged - now.keys()):
                log_event("info", "discovery_recovered", reason=part)
            logged = (logged | before) & now.keys()
            before = set(now)

    def _on_findings(self, findings: tuple[PodFinding, ...]) -> None:
        known = set(self._findings)
        self._findings = findings
        # Every new pod waits for its address: that is counted, and no line of the log.
        new = [finding for finding in findings if finding not in known and finding.effect != "waiting"]
        for finding in new[:_LOGGED_MOST]:
            log_event("warning", "discovery_finding", kind=finding.effect, reason=finding.sentence)
        if len(new) > _LOGGED_MOST:
            log_event("warning", "discovery_findings_not_logged", count=len(new) - _LOGGED_MOST)
