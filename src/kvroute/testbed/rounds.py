"""Compare the simulator with the kernel: one trace, predicted for a cluster and played on its testbed with real links
and real TCP. Neither side is adjusted to the other."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvroute import topology
from kvroute.sim.settings import Background
from kvroute.sim.workload import Trace
from kvroute.testbed import Build, NamedTestbed, Testbed
from kvroute.testbed.live import (
    Half,
    LiveComparisonSpec,
    ServedGateway,
    observed,
    predicted,
    send_trace,
    simulated,
)
from kvroute.testbed.processes import cpu_s
from kvroute.types import Endpoint, InputError

POLICIES = ("round-robin", "cla", "netkv", "foresight")
IDLE_S = 20.0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one policy, on the kernel's network and in the simulator."""

    policy: str
    kernel: Half
    simulated: Half
    cpu_share: float
    """Share of the machine's cores used by engines, gateway and background traffic during the requests."""


@dataclass(slots=True)
class Course:
    """A running testbed with its engines; every round starts and stops a gateway."""

    testbed: Testbed
    cluster: Path
    endpoints: Mapping[str, Endpoint]
    _rounds: int = field(default=0)

    def play(self, policy: str, prefill: str, trace: Trace, on_answer: Callable[[], None] = lambda: None) -> Round:
        """Play one round, with empty caches in the engines.

        Raises:
            InputError: engines or gateway do not start, or no request gets a response.
        """
        testbed, build = self.testbed, self.testbed.build
        if self._rounds:
            self._forget()
        self._rounds += 1
        options = ["--policy", policy, "--prefill", prefill, "--seed", str(build.seed)]
        state = testbed.start_gateway(self.endpoints, options)
        served = ServedGateway(state.url, state.admin)
        before_s, began = cpu_s(testbed.run.name), time.monotonic()
        answers, _ = send_trace(served, trace, on_answer)
        share = (cpu_s(testbed.run.name) - before_s) / (time.monotonic() - began) / len(os.sched_getaffinity(0))
        kernel = observed(answers, served.page("/metrics").decode())
        testbed.stop_gateway()
        if not kernel.answered:
            raise InputError(f"no request was answered under {policy}: {' '.join(kernel.errors) or 'none was sent'}")
        live_spec = LiveComparisonSpec(self.cluster, trace, policy, prefill, build.seed)
        return Round(policy=policy, kernel=kernel, simulated=predict(live_spec, build.background), cpu_share=share)

    def _forget(self) -> None:
        """Clear the cache of every engine; an engine rejects this while a request is in flight."""
        deadline = time.monotonic() + IDLE_S
        for name, endpoint in self.endpoints.items():
            while not _reset(endpoint.url):
                if time.monotonic() > deadline:
                    raise InputError(f"{name} is still busy {IDLE_S:g} s after the last response")
                time.sleep(0.1)


@contextmanager
def course(run: NamedTestbed, cluster: Path, build: Build) -> Iterator[Course]:
    """Run a testbed for the duration of the block. Raises InputError if it cannot be set up."""
    testbed = Testbed(run, topology.load(cluster), build)
    testbed.check()
    try:
        testbed.lay()
        yield Course(testbed, cluster, testbed.start_engines())
    finally:
        testbed.remove()


def predict(live_spec: LiveComparisonSpec, background: Sequence[float]) -> Half:
    """Simulate the same round, with background traffic on the links that is not reported to the router."""
    return predicted(simulated(live_spec, Background(per_tier=tuple(background))))


def _reset(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b""), timeout=10):
            return True
    except OSError:  # status 503 while blocks are in use
        return False
