"""Prometheus metrics of an agent, and the port that serves them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute_engine.addresses import host_port
from kvroute_engine.agent.agent import Agent
from kvroute_engine.errors import InputError


@dataclass(frozen=True, slots=True)
class Page(Collector):
    """Metrics that a function makes at each request."""

    make: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self.make()


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """An HTTP port with metrics, in a thread of its own."""

    address: str
    _server: Any
    _thread: threading.Thread

    @classmethod
    def start(cls, host: str, port: int, make: Callable[[], Iterable[Metric]]) -> MetricsServer:
        """Listen; port 0 takes a free one.

        Raises:
            InputError: the address cannot be bound.
        """
        registry = CollectorRegistry()
        registry.register(Page(lambda: list(make())))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            what = f"{host_port(host, port)} cannot be bound ({error.strerror})"
            raise InputError(what, where="--metrics-port", hint="choose a free port") from None
        return cls(host_port(host, server.server_port), server, thread)

    def close(self) -> None:
        """Stop the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def agent_metrics(agent: Agent) -> Iterator[Metric]:
    """Yield the metrics of an agent."""
    age_s = agent.age_s()
    help_ = "Seconds since the scheduler last said that the table is current; NaN without a table."
    yield GaugeMetricFamily("kvroute_agent_table_age_seconds", help_, value=math.nan if age_s is None else age_s)
    yield GaugeMetricFamily(
        "kvroute_agent_table_version", "Version of the table; 0 without a table.", value=agent.held.version
    )
    yield GaugeMetricFamily(
        "kvroute_agent_connected", "1 while the scheduler is connected.", value=int(agent.connected)
    )
