"""An emulated engine in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, cycle

import numpy as np

from kvroute import llm
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.sequence import EngineSequence, Stage
from kvroute.emulator.prompt import EmulatedPrompt
from kvroute.types import DecodeSpec, Instance, LinearPrefill, Role, TimingSpec

MODEL = llm.model("llama-3-70b")
DECODE = DecodeSpec(base_s=0.01, per_request_s=0.001, per_context_token_s=1e-6)
SPEC = TimingSpec(prefill=LinearPrefill(per_token_s=1e-3, base_s=0.02), decode=DECODE)
BLOCK_TOKENS = 4


@dataclass
class VirtualAlarm:
    """A timer that fires unless it is cancelled."""

    ring: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class VirtualClock:
    """A clock that fires timers in order of time; `errors_s` gives the delay (or advance) of each one in turn."""

    errors_s: Sequence[float] = (0.0,)
    now_s: float = 0.0
    alarms: list[tuple[float, int, VirtualAlarm]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers, self.error_s = count(), cycle(self.errors_s)

    def now(self) -> float:
        return self.now_s

    def at(self, when_s: float, ring: Callable[[], None]) -> VirtualAlarm:
        alarm = VirtualAlarm(ring)
        heappush(self.alarms, (max(when_s + next(self.error_s), self.now_s), next(self.numbers), alarm))
        return alarm

    def call(self, when_s: float, ring: Callable[[], object]) -> None:
        """Call at exactly this time, for actions of the test."""
        heappush(self.alarms, (when_s, next(self.numbers), VirtualAlarm(ring)))

    def run(self) -> None:
        """Run until no timer is left."""
        for _ in range(100_000):
            if not self.alarms:
                return
            when_s, _, alarm = heappop(self.alarms)
            if not alarm.cancelled:
                self.now_s = max(when_s, self.now_s)
                alarm.ring()
        raise AssertionError("it never ends")


def engine_on(
    clock: VirtualClock,
    capacity_blocks: int = 10_000,
    batch_max: int = 4,
    *,
    role: Role = "both",
    chunk_tokens: int = 2048,
) -> Engine:
    """Return an engine with this number of KV blocks, batch limit, role, and tokens per iteration with prompts."""
    instance = Instance(
        name="e0", role=role, model="llama-3-70b", node="n", rack="r", pod="p", datacenter="d", gpus=("n/0",),
        batch_max=batch_max, chunk_tokens=chunk_tokens,
        kv_capacity_bytes=capacity_blocks * BLOCK_TOKENS * MODEL.kv_bytes_per_token,
    )  # fmt: skip
    return Engine(instance, SPEC, MODEL, clock, BLOCK_TOKENS, lambda *change: None)


def prompt_of(*tokens: int) -> EmulatedPrompt:
    return EmulatedPrompt.of(np.array(tokens, np.int64), BLOCK_TOKENS)


def timed(
    clock: VirtualClock,
    job: EngineSequence,
    times: list[float],
    steps: Mapping[Stage, Callable[[EngineSequence], None]],
) -> EngineSequence:
    """Let a sequence go on by the step for each stage that it reaches; `times` gets the time of each token."""

    def on_change() -> None:
        if job.stage in steps:
            steps[job.stage](job)
        while len(times) < job.emitted:
            times.append(clock.now())

    job.on_change = on_change
    return job
