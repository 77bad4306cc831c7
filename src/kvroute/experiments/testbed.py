"""The simulator's word against the kernel's: one trace, predicted for a cluster and played on its testbed, whose links
are real and carry real TCP; it refuses to bend either side towards the other."""

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
from kvroute.experiments.live import Half, Question, Served, observed, played, predicted
from kvroute.gateway.preflight import deployment_of
from kvroute.sim.run import simulate
from kvroute.sim.settings import Background, SimSettings
from kvroute.sim.workload import Trace
from kvroute.testbed import Build, Run, Testbed
from kvroute.testbed.processes import cpu_s
from kvroute.topology.assembly import read_text
from kvroute.types import Endpoint, InputError

POLICIES = ("round-robin", "cla", "netkv", "foresight")
IDLE_S = 20.0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one policy, on the kernel's network and in the simulator."""

    policy: str
    kernel: Half
    simulated: Half
    cpu_share: float
    """Of the machine's cores, used by engines, gateway and others' traffic while requests were under way."""


@dataclass(slots=True)
class Course:
    """A testbed that is up with its engines; a gateway comes and goes with every round."""

    testbed: Testbed
    cluster: Path
    endpoints: Mapping[str, Endpoint]
    _rounds: int = field(default=0)

    def play(self, policy: str, prefill: str, trace: Trace, on_answer: Callable[[], None] = lambda: None) -> Round:
        """One round, with engines that hold nothing.

        Raises:
            InputError: engines or gateway do not start, or nothing is answered.
        """
        testbed, build = self.testbed, self.testbed.build
        if self._rounds:
            self._forget()
        self._rounds += 1
        options = ["--policy", policy, "--prefill", prefill, "--seed", str(build.seed)]
        state = testbed.start_gateway(self.endpoints, options)
        served = Served(state.url, state.admin)
        before_s, began = cpu_s(testbed.run.name), time.monotonic()
        answers, _ = played(served, trace, on_answer)
        share = (cpu_s(testbed.run.name) - before_s) / (time.monotonic() - began) / len(os.sched_getaffinity(0))
        kernel = observed(answers, served.page("/metrics").decode())
        testbed.stop_gateway()
        if not kernel.answered:
            raise InputError(f"no request was answered under {policy}: {' '.join(kernel.errors) or 'none was sent'}")
        question = Question(self.cluster, trace, policy, prefill, build.seed)
        return Round(policy=policy, kernel=kernel, simulated=predict(question, build.background), cpu_share=share)

    def _forget(self) -> None:
        """Every engine drops what it has cached; it refuses while a request is under way."""
        deadline = time.monotonic() + IDLE_S
        for name, endpoint in self.endpoints.items():
            while not _reset(endpoint.url):
                if time.monotonic() > deadline:
                    raise InputError(f"{name} is still at work {IDLE_S:g} s after the last answer")
                time.sleep(0.1)


@contextmanager
def course(run: Run, cluster: Path, build: Build) -> Iterator[Course]:
    """A testbed for as long as the block lasts. Raises InputError where it cannot be had."""
    testbed = Testbed(run, topology.load(cluster), build)
    testbed.check()
    try:
        testbed.lay()
        yield Course(testbed, cluster, testbed.start_engines())
    finally:
        testbed.remove()


def predict(question: Question, background: Sequence[float]) -> Half:
    """What the simulator says of the same, with others' traffic on the links that nobody tells the router of."""
    cluster, settings = deployment_of(read_text(question.cluster), str(question.cluster), embedded=True)
    settings = msgspec.structs.replace(settings, policy=question.policy, prefill=question.prefill)
    spec = msgspec.structs.replace(settings.control_spec(), cache_block_tokens=0)
    assumed = SimSettings(
        telemetry="none",
        measures_transfers=True,
        oracle_refresh_s=float(settings.scrape.interval_s),
        background=Background(per_tier=tuple(background)),
    )
    return predicted(simulate(cluster, question.trace, spec, assumed, seed=question.seed))


def _reset(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b""), timeout=10):
            return True
    except OSError:  # 503 while blocks are in use
        return False
