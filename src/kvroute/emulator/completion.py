"""One request in an engine: a prefill leg, a decode leg that pulls the KV, or both in one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from kvroute.emulator.engine import Engine
from kvroute.emulator.engine_request import EngineRequest, KvHandle
from kvroute.emulator.errors import ApiError, EngineError
from kvroute.emulator.faults import Fault, Faults
from kvroute.emulator.kv_wire import PullRequest, pull
from kvroute.emulator.response import ResponseHeader, StreamWriter, choice, generated_tokens, usage
from kvroute.emulator.sequence import EngineSequence

JSON = "application/json"
TRACED_DIGITS_MOST = 12
"""An X-Request-Id with at most this many digits is the number of the request in a trace."""
ID_PREFIX = {"chat": "chatcmpl", "completions": "cmpl"}


class ConnectionAborted(Exception):
    """The connection must be closed without a response, because a fault was injected."""


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Address from which an instance's KV is fetched."""

    host: str
    kv_port: int
    engine_id: str


class Notifier:
    """Notifies the coroutine that waits for changes in the sequences of one request."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Signal a change."""
        self._event.set()

    async def until(self, heard: Callable[[], bool]) -> None:
        """Wait until `heard` returns True. It is checked after every change."""
        while not heard():
            self._event.clear()
            await self._event.wait()


async def complete(
    request: web.BaseRequest, ask: EngineRequest, engine: Engine, faults: Faults, origin: KvAddress
) -> web.StreamResponse:
    """Serve a request and release its resources on every exit path, except KV that is held for a decode leg.

    Raises:
        Refusal: the request cannot be served, or failed before the response began.
        CutOff: an injected fault.
    """
    fault = faults.should_fail("prefill" if ask.leg == "prefill" else "decode", await request.read())
    if fault is not None and not (fault.after_tokens and ask.leg != "prefill"):
        await fail(fault)
    _check_length(ask, engine)
    if ask.leg == "decode" and faults.should_fail("recompute") is not None:
        ask = replace(ask, leg="whole", tickets=())
    completion = Completion.of(ask, engine, fault, request.headers.get("X-Request-Id", ""))
    try:
        if ask.leg == "prefill":
            return await completion.prefill_leg(origin)
        return await (completion.stream(request) if ask.stream else completion.whole())
    finally:
        for job in completion.jobs:
            engine.leave(job)


def _check_length(ask: EngineRequest, engine: Engine) -> None:
    for prompt in ask.prompts:
        if not engine.fits(len(prompt.tokens), ask.output_tokens):
            what = f"{len(prompt.tokens)} prompt and {ask.output_tokens} output tokens exceed the KV memory"
            raise ApiError(f"This model's maximum context length is {engine.context_tokens} tokens; {what}")


async def fail(fault: Fault) -> None:
    """Fail as the fault specifies. A request that hangs does so until its client disconnects."""
    if fault.status == "hang":
        await asyncio.get_running_loop().create_future()
    if fault.status == "reset":
        raise ConnectionAborted
    assert isinstance(fault.status, int)
    raise EngineError("an injected failure", status=fault.status)


@dataclass(slots=True)
class Completion:
    """The sequences of one request, one per answer, and the responses built from them."""

    ask: EngineRequest
    engine: Engine
    heading: ResponseHeader
    fault: Fault | None
    bell: Notifier = field(default_factory=Notifier)
    jobs: list[EngineSequence] = field(default_factory=list)
    cached_tokens: int = 0

    @classmethod
    def of(cls, ask: EngineRequest, engine: Engine, fault: Fault | None, request_id: str) -> Completion:
        """Create a completion. Its id is the client's plus a number, so that a retried request has a different id."""
        heading_id = f"{ID_PREFIX[ask.kind]}-{request_id or engine.instance.name}-{engine.next_number()}"
        completion = cls(ask, engine, ResponseHeader(ask.kind, heading_id, int(time.time()), ask.model), fault)
        watched = ask.stream or fault is not None
        completion.jobs = [
            engine.arrive(prompt, ask.output_tokens, streaming=watched, news=completion.bell.ring)
            for prompt in ask.prompts
            for _ in range(ask.n)
        ]
        if request_id.isascii() and request_id.isdecimal() and len(request_id) <= TRACED_DIGITS_MOST:
            for job in completion.jobs:
                job.traced = int(request_id)
        return completion

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all answers so far."""
        return sum(job.emitted for job in self.jobs)

    def _usage(self) -> dict[str, Any]:
        """Return token counts. The tokens of a prompt with several answers count once."""
        inputs = sum(len(prompt.tokens) for prompt in self.ask.prompts)
        return usage(inputs, self.output_tokens, self.cached_tokens)

    def _answered(self) -> bool:
        return all(job.stage == "answered" for job in self.jobs)

    async def _prefill(self) -> None:
        jobs = self.jobs
        for job in jobs:
            self.engine.prefill(job)
        await self.bell.until(lambda: all(job.stage == "prefilled" for job in jobs))
        self.cached_tokens = sum(job.cached_tokens for job in jobs)

    async def prefill_leg(self, origin: KvAddress) -> web.Response:
        """Compute the KV, hold it for a decode leg and respond with one token, which is not used."""
        jobs, ask = self.jobs, self.ask
        for job, ticket in zip(jobs, ask.tickets, strict=False):
            job.name = ticket.key
        if ask.prefix is not None:
            await self._take_in(jobs[0], ask.prefix)
        await self._prefill()
        tickets = ask.tickets or (KvHandle(f"{origin.engine_id}/{self.heading.id}"),)
        for job, ticket in zip(jobs, tickets, strict=True):
            if not self.engine.hold(job, ticket.key):
                what = f"the KV of another prompt is held under {ticket.key}"
                raise ApiError(f"{what}; give every request its own name", status=409, kind="ConflictError")
        if tickets[0].awaited:  # SGLang's prefill responds when the decode instance has the KV
            await self.bell.until(self._answered)
        choices = [
            choice(ask.kind, i, next(generated_tokens(job.prompt.seed, i % ask.n))) for i, job in enumerate(jobs)
        ]
        known = ask.prefix.prefill_cached_tokens if ask.prefix is not None else None
        cached_tokens = self.cached_tokens if known is None else known  # vLLM's rule, also for prefixes
        tokens = usage(sum(job.input_tokens for job in jobs), len(jobs), cached_tokens)
        told = ask.told and self.engine.instance.protocol == "vllm"  # Mooncake's engines return no params
        more = {"kv_transfer_params": self._kv_params(jobs[0], tickets[0].key, origin)} if told else {}
        document = self.heading.document(choices, stream=False, usage=tokens, **more)
        return web.Response(body=msgspec.json.encode(document), content_type=JSON)

    async def _take_in(self, job: EngineSequence, ticket: KvHandle) -> None:
        """Pull the prompt prefix that the source has. Blocks that do not arrive are computed here."""
        engine = self.engine
        whole = job.input_tokens // engine.block_tokens * engine.block_tokens
        tokens = whole if ticket.tokens is None else min(ticket.tokens, whole)
        intake = engine.take_in(job.prompt, tokens)
        lacking_tokens = intake.lacking * engine.block_tokens
        order = PullRequest(ticket.key, engine.instance.name, tokens - lacking_tokens)
        asked_s = engine.clock.now()
        try:
            parcel = await pull(ticket.host, ticket.port, order, patience_s=engine.kv_patience_s)
            intake.land()
            engine.counters.transferred(parcel.source, parcel.kv_bytes, engine.clock.now() - asked_s)
        except EngineError:
            engine.counters.kv_failed += 1
        finally:
            intake.give_up()

    def _kv_params(self, job: EngineSequence, key: str, origin: KvAddress) -> dict[str, Any]:
        """Return the parameters for the decode leg, in the format of NIXL's connector plus kvroute's
        `remote_instance`."""
        engine = self.engine
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-job.input_tokens // engine.block_tokens)))],
            "remote_engine_id": origin.engine_id,
            "remote_request_id": key,
            "remote_host": origin.host,
            "remote_port": origin.kv_port,
            "tp_size": engine.instance.tp,
            "pp_size": engine.instance.pp,
            "dcp_size": 1,
            "remote_num_tokens": job.input_tokens,
            "remote_blocks_expiry_time": time.time() + engine.kv_expiry_s,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": job.cached_tokens,
            "remote_instance": engine.instance.name,
        }

    async def _start(self) -> None:
        """Bring every sequence into the batch."""
        jobs = self.jobs
        if self.ask.leg == "whole":
            await self._prefill()
        for job in jobs:
            self.engine.reserve(job)
        if self.ask.leg == "whole":
            for job in jobs:
                await self._reserved(job)
                self.engine.land(job)
        elif len(jobs) == 1:
            await self._fetch(jobs[0], self.ask.tickets[0])
        else:
            await self._fetch_all()

    async def _fetch_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for job, ticket in zip(self.jobs, self.ask.tickets, strict=True):
                    group.create_task(self._fetch(job, ticket))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _reserved(self, job: EngineSequence) -> None:
        await self.bell.until(lambda: job.stage == "reserved")

    async def _fetch(self, job: EngineSequence, ticket: KvHandle) -> None:
        """Pull the KV of a sequence and put the sequence into the batch."""
        engine = self.engine
        await self._reserved(job)
        known = ticket.prefill_cached_tokens  # vLLM reports this count to the client
        self.cached_tokens += job.cached_tokens if known is None else known
        asked_s = engine.clock.now()
        order = PullRequest(ticket.key, engine.instance.name, job.cached_tokens, ticket.awaited, ticket.early)
        try:
            parcel = await pull(ticket.host, ticket.port, order, patience_s=engine.kv_patience_s)
        except EngineError:
            engine.counters.kv_failed += 1
            raise
        seconds = engine.clock.now() - asked_s
        engine.counters.transferred(parcel.source, parcel.kv_bytes, seconds, early=ticket.early)
        engine.land(job)

    async def _news(self, sent: int) -> None:
        """Wait until all answers together have more than `sent` tokens or are complete. Fail if a fault is due."""
        fault = self.fault
        await self.bell.until(lambda: self.output_tokens > sent or self._answered())
        if fault is not None and self.output_tokens >= fault.after_tokens:
            await fail(fault)

    async def whole(self) -> web.Response:
        """Return the response in one piece."""
        await self._start()
        ask = self.ask
        while not self._answered():
            await self._news(self.output_tokens)
        choices = []
        for index, job in enumerate(self.jobs):
            text = b"".join(itertools.islice(generated_tokens(job.prompt.seed, index % ask.n), job.output_tokens))
            choices.append(choice(ask.kind, index, text))
        document = self.heading.document(choices, stream=False, usage=self._usage(), kv_transfer_params=None)
        return web.Response(body=msgspec.json.encode(document), content_type=JSON)

    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Stream the response while it is computed. As in vLLM, headers are sent first: a later failure is an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            await self._start()
            await self._send_pieces(response)
        except ApiError as refusal:
            await response.write(b"data: " + refusal.body() + b"\n\n")
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    async def _send_pieces(self, response: web.StreamResponse) -> None:
        jobs, n = self.jobs, self.ask.n
        pieces = [
            StreamWriter(self.heading, index, job.output_tokens, generated_tokens(job.prompt.seed, index % n))
            for index, job in enumerate(jobs)
        ]
        sent, total = 0, sum(job.output_tokens for job in jobs)
        while sent < total:
            await self._news(sent)
            sent = self.output_tokens
            await response.write(b"".join([piece.until(job.emitted) for piece, job in zip(pieces, jobs, strict=True)]))
        if self.ask.usage:
            await response.write(self.heading.event([], usage=self._usage()))
