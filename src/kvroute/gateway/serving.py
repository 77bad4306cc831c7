"""A cluster being served: the control core on the wall clock, its stations, and who is told of what happens.

A reloaded cluster file makes a new one; the old one lives on until its last request has left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from kvroute.control import Control
from kvroute.gateway.budget import RetryBudget
from kvroute.gateway.dialects import answered
from kvroute.gateway.exchange import Headers
from kvroute.gateway.fallback import Fallbacks
from kvroute.gateway.legs import Leg
from kvroute.gateway.logs import access, note
from kvroute.gateway.metrics import Metrics
from kvroute.gateway.openai import Completion
from kvroute.gateway.prompt import Prompts
from kvroute.gateway.state import ClusterState
from kvroute.gateway.station import Station
from kvroute.gateway.tracing import Tracer
from kvroute.gateway.view import Ttft
from kvroute.topology import Cluster
from kvroute.types import (
    Arrived,
    CongestionMeasured,
    Decision,
    Decode,
    Event,
    FloatArray,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvCleared,
    KvProtocol,
    LinksMeasured,
    TransferMeasured,
)

if TYPE_CHECKING:
    from kvroute.gateway.journey import Journey
    from kvroute.gateway.recording import Recording
    from kvroute.gateway.settings import GatewaySettings

ANSWER_BYTES_MAX = 64 * 2**20
"""A collected answer that is longer is a fault of its engine."""


class Caller(NamedTuple):
    """Who asked, for the event log and the access log."""

    request_id: str
    """The X-Request-Id."""
    client: str
    """Its address."""
    key: str
    """Its key's name, where there are keys."""


class Serving:
    """What a journey needs: decisions, stations and somebody to tell. Nothing here waits."""

    def __init__(
        self,
        cluster: Cluster,
        control: Control,
        settings: GatewaySettings,
        *,
        now: Callable[[], float],
        prompts: Prompts,
        budget: RetryBudget,
        metrics: Metrics,
        state: ClusterState,
        tracer: Tracer,
        events: Recording | None,
        rooms: random.Random,
        engine_key: bytes | None,
        on_end: Callable[[Journey], None],
        first_number: int = 0,
    ) -> None:
        self.cluster, self.settings, self.now = cluster, settings, now
        self.prompts, self.budget, self.metrics, self.state = prompts, budget, metrics, state
        self.tracer, self.events = tracer, events
        self.stations: dict[str, Station] = {}
        self.journeys: dict[int, Journey] = {}
        self.callers: dict[int, Caller] = {}
        """By journey, where somebody logs them."""
        self.measured: dict[str, InstanceMeasured] = {}
        """The last word of each engine on its load."""
        self.telemetry: CongestionMeasured | LinksMeasured | None = None
        """The last word on the network."""
        self.answer_bytes_max = ANSWER_BYTES_MAX
        self.reserve_output_tokens = settings.reserve_output_tokens
        self._control, self._rooms, self._on_end, self._engine_key = control, rooms, on_end, engine_key
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = first_number - 1
        self._fallbacks = Fallbacks(settings.constraint) if settings.constraint else None
        models = {instance.model for instance in cluster.instances}
        self._one_model = len(models) == 1
        self._timing = {i.name: cluster.timing[i.timing].decode for i in cluster.instances}
        self._protocols: dict[str, set[KvProtocol]] = {}
        for instance in cluster.instances:
            self._protocols.setdefault(instance.model, set()).add(instance.protocol)
        self._any_protocol = {protocol for known in self._protocols.values() for protocol in known}

    # Decisions

    def decide(self, event: Event) -> tuple[Decision, ...]:
        """Tell the core something that asks for a decision."""
        start = time.perf_counter()
        decisions = self._control.handle(event)
        if decisions:
            took_s = time.perf_counter() - start
            for decision in decisions:
                self.metrics.decided(decision, took_s)
            if self._fallbacks is not None:
                self._fallbacks.decided(event.at, decisions[-1])
        if self.events is not None:
            caller = self.callers.get(event.request.id) if type(event) is Arrived else None
            self.metrics.logged(self.events.write(event, decisions, caller.request_id if caller else ""))
        return decisions

    def tell(self, event: Event) -> None:
        """Tell the core something that asks for none."""
        decisions = self._control.handle(event)
        assert not decisions
        if self.events is not None:
            self.metrics.logged(self.events.write(event, decisions))

    @property
    def control(self) -> Control:
        """The core; only `decide` and `tell` may change it."""
        return self._control

    def changed(self, name: str, up: bool, now: float) -> None:
        """A guard's word."""
        note("warning", "instance_up" if up else "instance_down", instance=name)
        self.tell(InstanceUp(now, name) if up else InstanceDown(now, name))

    def heard(self, event: Event) -> None:
        """A watcher's word: engines' load, caches and transfers, the network's congestion."""
        match event:
            case TransferMeasured(target=target):
                if self.settings.measure == "first-byte":
                    return
                # The engine itself knows better than the gateway's watch from outside.
                self.stations[target].measures = False
            case InstanceMeasured(instance=name):
                self.measured[name] = event
            case CongestionMeasured() | LinksMeasured():
                self.telemetry = event
            case KvCleared(instance=name):
                # It may be another engine by now, which does not count its transfers.
                self.stations[name].measures = self.settings.measure != "engine"
                self.stations[name].forget()
        self.tell(event)

    # What a journey asks

    def next_number(self) -> int:
        """The request's id in the event log."""
        self._numbers += 1
        return self._numbers

    @property
    def last_number(self) -> int:
        """What `next_number` gave last."""
        return self._numbers

    def draw(self) -> int:
        """63 random bits."""
        return self._rooms.getrandbits(63)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the callbacks; kept until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call_later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        """A timer of the loop."""
        return asyncio.get_running_loop().call_later(seconds, then)

    def model_of(self, served: str) -> str:
        """The cluster's name of a model; with one model engines judge the name themselves."""
        return self.settings.models.get(served, "" if self._one_model else served)

    def must_stay(self, completion: Completion) -> bool:
        """Whether some protocol of its model cannot hand this request's KV over: one instance must do it all then."""
        if not completion.one_leg:
            return False
        protocols = self._protocols.get(self.model_of(completion.model), self._any_protocol)
        return protocols != {"sglang"}

    def served_models(self) -> list[str]:
        """Names that clients use, where the settings give any, or there are several models."""
        names = sorted(self.settings.models)
        return names if names or self._one_model else sorted({i.model for i in self.cluster.instances})

    def engine_headers(self, headers: Headers) -> Headers:
        """A client's headers on the way to an engine: a key for the gateway is no key for engines."""
        if self._engine_key is None:
            return headers
        kept = [header for header in headers if header[0] != b"authorization"]
        if self._engine_key:
            kept.append((b"authorization", b"Bearer " + self._engine_key))
        return kept

    def answer_headers(self, headers: Headers, request_id: bytes) -> Headers:
        """An engine's headers on the way to the client."""
        kept = [header for header in answered(headers) if header[0] not in (b"server", b"date", b"x-request-id")]
        kept.append((b"x-request-id", request_id))
        return kept

    def steps_s(self, decision: Decode) -> tuple[float, float]:
        """Expected seconds of the first decode step and of the wait for a slot, by the decision's own terms."""
        parts, index = _parts(decision)
        if parts is not None and "decode_s" in parts:
            return float(parts["decode_s"][index]), float(parts["queue_s"][index])
        spec = self._timing[decision.target]
        return spec.base_s + spec.per_request_s, 0.0

    def expected_landing_s(self, decision: Decode) -> float:
        """Expected seconds until the request decodes, for answers that do not show it."""
        step_s, queue_s = self.steps_s(decision)
        return self.expected_transfer_s(decision) + queue_s + step_s

    def expected_transfer_s(self, decision: Decode) -> float:
        """By the decision's own terms, else by the tier alone."""
        parts, index = _parts(decision)
        if parts is not None and "transfer_s" in parts:
            return float(parts["transfer_s"][index])
        if decision.source == decision.target:
            return 0.0
        tier = decision.tier
        return decision.kv_bytes / float(self.cluster.tier_bytes_per_s[tier]) + float(self.cluster.tier_latency_s[tier])

    # What a journey tells

    def transfer_started(self, decision: Decode, now: float) -> None:
        """A decode leg that fetches KV was sent."""
        self.metrics.transfer_started(decision.tier)
        self.state.transfer_started(decision, now, self.expected_transfer_s(decision))

    def transfer_ended(self, decision: Decode, now: float, seconds: float | None) -> None:
        """It has landed (in so many seconds), or (None) come to nothing."""
        self.metrics.transfer_ended(decision.tier, decision.kv_bytes, seconds)
        self.state.transfer_ended(decision.request_id, now)

    def first_token(self, decision: Decode, ttft: Ttft, now: float, exemplar: tuple[str, str] | None) -> None:
        """The client has its first byte."""
        alone = decision.source == decision.target
        protocol = self.stations[decision.target].instance.protocol
        self.metrics.first_token("aggregated" if alone else protocol, ttft, exemplar)
        self.state.first_token(ttft, now, tier=None if alone else decision.tier, kv_bytes=decision.kv_bytes)

    def leg_failed(self, leg: Leg, kind: str, why: str, request_id: bytes) -> None:
        """A leg came to nothing."""
        self.metrics.leg_failed(leg.kind, leg.station.name, kind)
        name = request_id.decode("latin-1")
        note("warning", "leg_failed", request_id=name, instance=leg.station.name, leg=leg.kind, kind=kind, reason=why)

    def ended(self, journey: Journey, kind: str, status: int, seconds: float, relayed_bytes: int) -> None:
        """A journey is over."""
        self.metrics.finished(kind, status, seconds, relayed_bytes)
        self.state.finished(self.now(), status)
        self.journeys.pop(journey.number, None)
        if self.callers and (caller := self.callers.pop(journey.number, None)) is not None:
            name, client, key = caller
            access(name, kind, status, seconds, number=journey.number, client=client, key_name=key)
        self._on_end(journey)

    @property
    def idle(self) -> bool:
        """Whether no request is under way, passed-on ones included."""
        return not self.journeys and not any(station.under_way for station in self.stations.values())

    def close(self) -> None:
        """No more requests."""
        for task in self._tasks:
            task.cancel()
        for station in self.stations.values():
            station.close()
        if self.events is not None:
            self.events.close()


def _parts(decision: Decode) -> tuple[dict[str, FloatArray] | None, int]:
    """The decision's cost parts and where its target stands among them."""
    terms = decision.terms
    return (None, 0) if terms is None else (terms.parts, terms.names.index(decision.target))
