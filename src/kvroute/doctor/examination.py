"""The examination of a whole cluster: all engines at once, then one request through each pair, within a time limit."""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvroute import llm
from kvroute.doctor.clock import narrowest
from kvroute.doctor.engine import Examined, ask_engine, examined
from kvroute.doctor.fetch import LATE
from kvroute.doctor.kv_events import SentPrompt, Subscription
from kvroute.doctor.pairs import PAIRS_MAX, chosen_pairs, possible_pairs
from kvroute.doctor.probe import (
    Outcome,
    PairError,
    Probe,
    completion_of,
    posted,
    problem_of,
    prompt_of,
    prompt_tokens,
)
from kvroute.doctor.report import DoctorFinding, ExaminationReport, PairReport
from kvroute.doctor.verdict import engine_findings, judge, pair_findings, silent_events_finding, slow
from kvroute.http.deadlines import Deadlines
from kvroute.http.headers import Headers
from kvroute.serve.engines.factory import engine_clients
from kvroute.serve.lifecycle.deployment import Deployment

ENGINE_WAIT_S = 5.0
"""Time limit for one page of an engine, in seconds."""
EVENTS_WAIT_S = 3.0
"""Time limit for a ZMQ endpoint, and for a batch after its prompt, in seconds."""
AGGREGATED_TOKENS = 64
"""Length of the prompt of an aggregated request."""
AT_ONCE = 64
"""Maximum number of engines that are queried at the same time."""
_LEAST_S = 0.01
"""Nothing is requested with less time left: an engine that cannot respond so fast would count as unhealthy."""
_PAIR_SHARE = 3.0
"""Maximum time of a pair, as a multiple of its share of the time that is left."""
_HIDDEN = "[key]"
_NO_TIME = "no time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationSpec:
    """Options of an examination."""

    pairs: int | None = PAIRS_MAX
    """Maximum number of pairs; None: all."""
    timeout_s: float = 60.0
    """Time limit of the whole examination, in seconds."""
    prompt_tokens: int = 2048
    """Length of the prompts that are sent; less if an engine cannot take so many tokens."""
    seed: int | None = None
    """Seed of prompts and ids; None: a new one each time, so that no engine has cached the prompts."""


async def examine(deployment: Deployment, options: ExaminationSpec, key: str = "") -> ExaminationReport:
    """Query all engines of a cluster, then send one request through each chosen pair.

    Every request has ended, or is aborted, when this returns or is cancelled. `key` is the engines' API key.
    """
    examination = _Examination(deployment, options, key)
    try:
        await examination.run()
    finally:
        await examination.close()
    return examination.report


class _Examination:
    """One examination."""

    def __init__(self, deployment: Deployment, options: ExaminationSpec, key: str) -> None:
        cluster, settings = deployment.cluster, deployment.settings
        self._cluster, self._settings, self._options, self._key = cluster, settings, options, key
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + options.timeout_s
        self._draw = random.Random(options.seed)
        self._clients = engine_clients(cluster, settings, lambda *_: None, Deadlines(), exact=lambda model: False)
        headers: Headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._engines = {name: examined(client, settings, headers) for name, client in self._clients.items()}
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * len(self._engines) + 64)
        self._subscriptions: dict[str, Subscription] = {}
        for name, engine in self._engines.items():
            endpoint = engine.client.instance.endpoint
            if endpoint is not None and endpoint.kv_events:
                self._subscriptions[name] = Subscription(self._context, endpoint)
                engine.report.events = self._subscriptions[name].report
        self._findings: list[DoctorFinding] = []
        self.report = ExaminationReport(
            cluster=cluster.name,
            engines=[self._engines[name].report for name in sorted(self._engines)],
            pairs=chosen_pairs(cluster, options.pairs),
            pairs_possible=possible_pairs(cluster),
            findings=[],
        )

    async def run(self) -> None:
        """Run the whole examination and fill `report`."""
        await self._ask_engines()
        for number, pair in enumerate(self.report.pairs):
            await self._try_pair(pair, len(self.report.pairs) - number)
        await self._try_aggregated()
        await asyncio.gather(
            *(subscription.own_batch(self._wait_s(EVENTS_WAIT_S)) for subscription in self._subscriptions.values())
        )
        self._conclude()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(subscription.close() for subscription in self._subscriptions.values()))
        self._context.destroy(linger=0)
        for client in self._clients.values():
            client.close()
        await asyncio.sleep(0)  # aborted connections are closed in the loop's next iteration

    def _remaining_s(self) -> float:
        left_s = self._ends_s - self._loop.time()
        return left_s if left_s >= _LEAST_S else 0.0

    def _wait_s(self, most_s: float = ENGINE_WAIT_S) -> float:
        return min(most_s, self._remaining_s())

    async def _ask_engines(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.open()
        places = asyncio.Semaphore(AT_ONCE)

        async def query(engine: Examined) -> None:
            async with places:
                if self._remaining_s():
                    await ask_engine(engine, self._settings, self._wait_s)

        async def follow(subscription: Subscription) -> None:
            async with places:
                await subscription.subscribed(self._wait_s(EVENTS_WAIT_S))
                await subscription.check_replay(self._wait_s(EVENTS_WAIT_S))

        async with asyncio.TaskGroup() as group:
            for engine in self._engines.values():
                group.create_task(query(engine))
            for subscription in self._subscriptions.values():
                group.create_task(follow(subscription))

    async def _try_pair(self, pair: PairReport, pairs_left: int) -> None:
        ends = self._engines[pair.prefill], self._engines[pair.decode]
        for engine in ends:
            if not engine.report.usable:
                pair.failure = f"{engine.name} is not usable"
                return
        if not self._remaining_s():
            pair.failure = _NO_TIME
            return
        limit_s = self._loop.time() + self._remaining_s() * min(1.0, _PAIR_SHARE / pairs_left)
        try:
            outcome = await self._best(pair, ends, limit_s)
        except PairError as error:
            pair.moved, pair.failure = "failed", str(error).replace(self._key or _HIDDEN, _HIDDEN)
            hint = "see the logs of both engines, and check their connectors and addresses"
            if LATE in pair.failure:
                hint += "; slow engines need a longer --timeout"
            self._findings.append(DoctorFinding(pair.name, f"the request failed: {pair.failure}", hint))
            return
        if outcome.transfer_tp is not None and ends[0].report.engine_tp is None:
            ends[0].report.engine_tp = outcome.transfer_tp
        self._findings += pair_findings(pair, outcome)

    async def _try_aggregated(self) -> None:
        """Send a short request to each engine that the gateway's policy may let serve one without a transfer."""
        names = self._settings.control_spec().build(self._cluster).aggregated_instances
        places = asyncio.Semaphore(AT_ONCE)

        async def ask(engine: Examined) -> None:
            async with places:
                if not self._remaining_s():
                    return
                completion = completion_of(engine, prompt_of(self._draw, AGGREGATED_TOKENS))
                name = uuid.UUID(int=self._draw.getrandbits(128)).hex
                body = engine.client.protocol.aggregated_body(completion)
                wrong = problem_of(await posted(engine, name, body, self._remaining_s()))
                engine.report.aggregated = wrong.replace(self._key or _HIDDEN, _HIDDEN)

        async with asyncio.TaskGroup() as group:
            for engine in (self._engines[name] for name in names):
                if engine.report.usable:
                    group.create_task(ask(engine))

    async def _best(self, pair: PairReport, ends: tuple[Examined, Examined], limit_s: float) -> Outcome:
        """Return the outcome of a request, or the better of two if the first is slow: it may have set up
        connections."""
        model = llm.model(ends[0].client.instance.model)
        pair.prompt_tokens = prompt_tokens(self._options.prompt_tokens, *ends, model)
        pair.expected_bytes = float(model.kv_bytes(pair.prompt_tokens))
        outcome = await self._probed(pair, ends, limit_s)
        judge(pair, outcome, model)
        if slow(pair) and self._remaining_s():
            again = await self._probed(pair, ends, limit_s)
            outcome = min(outcome, again, key=lambda tried: tried.moved.seconds if tried.moved else math.inf)
            judge(pair, outcome, model)
        return outcome

    async def _probed(self, pair: PairReport, ends: tuple[Examined, Examined], limit_s: float) -> Outcome:
        prompt = prompt_of(self._draw, pair.prompt_tokens)
        followers = [self._subscriptions[end.name] for end in ends if end.name in self._subscriptions]
        sent = SentPrompt(prompt, time.time())
        for subscription in followers:
            subscription.prompts.append(sent)

        def remaining_s() -> float:
            return max(0.0, min(limit_s, self._ends_s) - self._loop.time())

        try:
            return await Probe(pair, *ends, prompt, self._draw, remaining_s).run()
        except PairError:
            for subscription in followers:
                subscription.prompts.remove(sent)  # the engine may not have computed it
            raise

    def _conclude(self) -> None:
        """Write clocks and findings into the report: engines, pairs, then the examination itself."""
        found: list[DoctorFinding] = []
        for report in self.report.engines:
            subscription = self._subscriptions.get(report.name)
            offsets = self._engines[report.name].offsets + (subscription.offsets if subscription else [])
            report.clock = narrowest(offsets).report()
            found += engine_findings(report, self._settings)
            if subscription and report.role == "prefill" and subscription.silent:
                found.append(silent_events_finding(report))
        late = sum(pair.failure == _NO_TIME for pair in self.report.pairs)
        found += self._findings
        if late:
            what = f"the timeout expired before {late} of {len(self.report.pairs)} pairs were tested"
            found.append(DoctorFinding("examination", what, "use a longer --timeout or fewer --pairs"))
        self.report.findings += found
