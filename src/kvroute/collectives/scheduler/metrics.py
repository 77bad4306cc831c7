"""Prometheus metrics of the central scheduler of all-reduce schemes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from kvroute.collectives.scheduler.service import SchedulerService


def scheduler_metrics(service: SchedulerService) -> Iterator[Metric]:
    """Yield the metrics of a scheduler."""
    tables, connected = service.tables, set(service.agents)
    agents = GaugeMetricFamily(
        "kvroute_scheduler_agent_connected", "1 for each connected agent.", labels=["kind", "agent"]
    )
    for agent in sorted(connected, key=str):
        agents.add_metric([agent.kind, agent.name], 1)
    version = GaugeMetricFamily(
        "kvroute_scheduler_entry_version", "Version of the entry of each group.", labels=["group"]
    )
    scheme = GaugeMetricFamily(
        "kvroute_scheduler_entry_rule",
        "1 for each rule of each group: scheme of tensors up to a size in bytes.",
        labels=["group", "scheme", "up_to_bytes"],
    )
    for name, entry in sorted(tables.entries.items()):
        version.add_metric([name], entry.version)
        for rule in entry.rules:
            scheme.add_metric([name, rule.scheme, str(rule.up_to_bytes or "+Inf")], 1)
    in_use = GaugeMetricFamily(
        "kvroute_scheduler_entry_version_in_use",
        "Version that the ranks of each group use, as their server's agent reports; 0: none.",
        labels=["group"],
    )
    for name, used in tables.versions_in_use().items():
        in_use.add_metric([name], used)
    background = GaugeMetricFamily(
        "kvroute_scheduler_link_background",
        "Share of a link that traffic other than all-reduces takes, for links above 0.",
        labels=["link"],
    )
    for link, share in enumerate(tables.background.tolist()):
        if share > 0.0:
            background.add_metric([tables.cluster.links[link].name], share)
    yield from (agents, version, scheme, in_use, background)
