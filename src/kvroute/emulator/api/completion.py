"""One request in an engine: a prefill leg, a decode leg that pulls the KV, or both in one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from kvroute.emulator.api import conversations
from kvroute.emulator.api.connection import KvAddress, Notifier, fail
from kvroute.emulator.api.conversations import ConversationWriter
from kvroute.emulator.api.response import ResponseHeader, StreamWriter, choice, of_prompt, usage
from kvroute.emulator.engine.engine import Engine
from kvroute.emulator.engine.engine_request import EmulatedRequest, KvHandle
from kvroute.emulator.engine.faults import Fault, Faults
from kvroute.emulator.engine.sequence import EngineSequence
from kvroute.emulator.errors import ApiError, EngineError
from kvroute.emulator.generation.answer import GeneratedOutput, answer_to
from kvroute.emulator.kv.kv_wire import PullRequest, pull, staged_key
from kvroute.emulator.request_body import KeptBlocksBody, Kind, StorageParams, StoragePart

JSON = "application/json"
TRACED_DIGITS_MOST = 12
"""An X-Request-Id with at most this many digits is the number of the request in a trace."""
_TRACED = re.compile(rf"([0-9]{{1,{TRACED_DIGITS_MOST}}})(?:-[0-9a-f]{{16}})?")
"""Matches such an id, with what the gateway appends to that of another attempt."""
ID_PREFIX: dict[Kind, str] = {
    "chat": "chatcmpl",
    "completions": "cmpl",
    "responses": "resp",
    "messages": "msg",
    "transcriptions": "trsc",
}
_CONVERSATIONS: frozenset[Kind] = frozenset({"responses", "messages"})
"""Kinds with one answer and with formats of their own."""


async def complete(
    request: web.BaseRequest, ask: EmulatedRequest, engine: Engine, faults: Faults, origin: KvAddress
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
    completion = EmulatedCompletion.of(ask, engine, fault, request.headers.get("X-Request-Id", ""))
    try:
        if ask.leg == "prefill":
            return await completion.prefill_leg(origin)
        return await (completion.stream(request) if ask.stream else completion.whole())
    finally:
        for sequence in completion.jobs:
            engine.leave(sequence)


def _check_length(ask: EmulatedRequest, engine: Engine) -> None:
    least = ask.sampling.limit or max(ask.sampling.min_tokens, 1)
    for prompt in ask.prompts:
        if not engine.fits(len(prompt.tokens), least):
            what = f"{len(prompt.tokens)} prompt and {least} output tokens exceed the KV memory"
            raise ApiError(f"This model's maximum context length is {engine.context_tokens} tokens; {what}")


@dataclass(slots=True)
class EmulatedCompletion:
    """The sequences of one request, one per answer, and the responses built from them."""

    ask: EmulatedRequest
    engine: Engine
    heading: ResponseHeader
    fault: Fault | None
    notifier: Notifier = field(default_factory=Notifier)
    answers: list[GeneratedOutput] = field(default_factory=list)
    jobs: list[EngineSequence] = field(default_factory=list)
    cached_tokens: int = 0
    kept: KeptBlocksBody | None = None
    """Staged blocks that the decode instance takes from the buffer of its node."""

    @classmethod
    def of(cls, ask: EmulatedRequest, engine: Engine, fault: Fault | None, request_id: str) -> EmulatedCompletion:
        """Create a completion. Its id is the client's plus a number, so that a retried request has a different id."""
        heading_id = f"{ID_PREFIX[ask.kind]}-{request_id or engine.instance.name}-{next(engine.numbers)}"
        completion = cls(ask, engine, ResponseHeader(ask.kind, heading_id, int(time.time()), ask.model), fault)
        if ask.kind == "responses":
            room = engine.output_room(len(ask.prompts[0].tokens), engine.context_tokens)
            completion.ask = ask = replace(ask, details=replace(ask.details, output_tokens_max=room))
        sampling = ask.sampling if ask.leg != "prefill" else replace(ask.sampling, limit=1, min_tokens=0)
        completion.answers = [
            answer_to(prompt, number, sampling, partial(engine.output_room, len(prompt.tokens)))
            for prompt in ask.prompts
            for number in range(ask.n)
        ]
        watched = ask.stream or fault is not None
        completion.jobs = [
            engine.arrive(answer.prompt, answer.tokens, streaming=watched, news=completion.notifier.ring)
            for answer in completion.answers
        ]
        if traced := _TRACED.fullmatch(request_id):
            for sequence in completion.jobs:
                sequence.traced = int(traced[1])
        return completion

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all answers so far."""
        return sum(sequence.emitted for sequence in self.jobs)

    def _usage(self) -> dict[str, Any]:
        """Return token counts. The tokens of a prompt with several answers count once."""
        inputs = sum(len(prompt.tokens) for prompt in self.ask.prompts)
        return usage(inputs, self.output_tokens, self.cached_tokens)

    def _answered(self) -> bool:
        return all(sequence.stage == "answered" for sequence in self.jobs)

    async def _prefill(self) -> None:
        jobs = self.jobs
        if self.ask.storage is not None:
            await self._prefill_staged(jobs[0], self.ask.storage)
        else:
            for sequence in jobs:
                self.engine.prefill(sequence)
            await self.notifier.until(lambda: all(sequence.stage == "prefilled" for sequence in jobs))
        self.cached_tokens = sum(sequence.cached_tokens for sequence in jobs)

    async def prefill_leg(self, origin: KvAddress) -> web.Response:
        """Compute the KV, hold it for a decode leg and respond with one token, which is not used."""
        jobs, ask = self.jobs, self.ask
        for sequence, handle in zip(jobs, ask.tickets, strict=False):
            sequence.name = handle.key
        if ask.prefix is not None:
            await self._import_prefix(jobs[0], ask.prefix)
        await self._prefill()
        self._write_back()
        handles = ask.tickets or (KvHandle(f"{origin.engine_id}/{self.heading.id}"),)
        for sequence, handle in zip(jobs, handles, strict=True):
            if not self.engine.hold(sequence, handle.key):
                what = f"the KV of another prompt is held under {handle.key}"
                raise ApiError(f"{what}; give every request its own name", status=409, kind="ConflictError")
        if handles[0].awaited:  # SGLang's prefill responds when the decode instance has the KV
            await self.notifier.until(self._answered)
        known = ask.prefix.prefill_cached_tokens if ask.prefix is not None else None
        cached_tokens = self.cached_tokens if known is None else known  # vLLM's rule, also for prefixes
        tokens = usage(sum(sequence.input_tokens for sequence in jobs), len(jobs), cached_tokens)
        with_params = ask.wants_params and self.engine.instance.traits.returns_params
        more = {"kv_transfer_params": self._kv_params(jobs[0], handles[0].key, origin)} if with_params else {}
        return self._response(tokens, **more)

    def _response(self, tokens: dict[str, Any], **more: Any) -> web.Response:
        """Return a whole response. Args: `tokens`: token counts; `more`: other fields."""
        ask, details = self.ask, self.ask.details
        if ask.audio is not None:
            answer = self.answers[0]
            document = ask.audio.document(answer.text(), list(answer.ids()))
        elif ask.kind in _CONVERSATIONS:
            document = conversations.whole(self.heading, self.answers[0], details, tokens, **more)
        else:
            choices = [choice(ask.kind, index, answer, details) for index, answer in enumerate(self.answers)]
            more = {"service_tier": None, "system_fingerprint": None, "usage": tokens, **more}
            if ask.kind == "chat":
                ids = self.answers[0].prompt.tokens.tolist() if details.token_ids else None
                more |= {"prompt_logprobs": of_prompt(self.answers[0], details), "prompt_token_ids": ids}
            document = self.heading.document(choices, stream=False, **more)
        return web.Response(body=msgspec.json.encode(document), content_type=JSON)

    async def _prefill_staged(self, sequence: EngineSequence, storage: StorageParams) -> None:
        """Compute a prompt while its staged blocks arrive layer by layer. If they do not arrive, compute all of it."""
        engine, tier, parts = self.engine, self.engine.storage, storage.parts
        staged = 0
        if tier is not None:
            blocks = sum(part.blocks for part in parts)
            staged = tier.staged_tokens(sequence.prompt, storage.first_block, blocks, storage.key)
        if engine.cached_tokens(sequence.prompt) < storage.first_block * engine.block_tokens:
            staged = 0  # the blocks before were evicted since the router's decision
        pulls = asyncio.gather(*(self._pull_part(part) for part in parts if staged), return_exceptions=True)
        try:
            engine.prefill(sequence, staged)
            await self.notifier.until(lambda: sequence.stage == "prefilled")
            arrived = await pulls
        finally:
            pulls.cancel()
        if not all(result is True for result in arrived):
            engine.counters.kv_failed += 1
            engine.recompute(sequence)
            await self.notifier.until(lambda: sequence.stage == "prefilled")
        elif staged:
            self.kept = storage.kept

    async def _pull_part(self, part: StoragePart) -> bool:
        """Fetch staged blocks from their node; return whether they have arrived. Those of the own node are here."""
        engine = self.engine
        tier = engine.storage
        if tier is not None and tier.node.complete_read(part.id) is not None:
            if not part.keep:
                tier.node.release(part.id)
            return True
        host, _, port = part.data.rpartition(":")
        asked_s = engine.clock.now()
        pull_request = PullRequest(staged_key(part.id), engine.instance.name, keep=part.keep)
        try:
            header = await pull(host, int(port), pull_request, patience_s=engine.kv_patience_s)
        except (EngineError, ValueError):
            return False
        engine.counters.transferred(header.source, header.kv_bytes, engine.clock.now() - asked_s)
        return True

    def _write_back(self, *, output: bool = False) -> None:
        """Write full blocks of the prompts to the store. Args: `output`: also those of the output."""
        if self.engine.storage is not None:
            for answer in self.answers:
                self.engine.storage.write_back(answer.prompt, list(answer.texts()) if output else ())

    async def _import_prefix(self, sequence: EngineSequence, handle: KvHandle) -> None:
        """Pull the prompt prefix that the source has. Blocks that do not arrive are computed here."""
        engine = self.engine
        whole = sequence.input_tokens // engine.block_tokens * engine.block_tokens
        tokens = whole if handle.tokens is None else min(handle.tokens, whole)
        prefix_import = engine.import_prefix(sequence.prompt, tokens)
        lacking_tokens = prefix_import.lacking * engine.block_tokens
        pull_request = PullRequest(handle.key, engine.instance.name, tokens - lacking_tokens)
        asked_s = engine.clock.now()
        try:
            header = await pull(handle.host, handle.port, pull_request, patience_s=engine.kv_patience_s)
            prefix_import.transfer_done()
            engine.counters.transferred(header.source, header.kv_bytes, engine.clock.now() - asked_s)
        except EngineError:
            engine.counters.kv_failed += 1
        finally:
            prefix_import.give_up()

    def _kv_params(self, sequence: EngineSequence, key: str, origin: KvAddress) -> dict[str, Any]:
        """Return the parameters for the decode leg, in the format of NIXL's connector plus kvroute's
        `remote_instance`."""
        engine = self.engine
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(-(-sequence.input_tokens // engine.block_tokens)))],
            "remote_engine_id": origin.engine_id,
            "remote_request_id": key,
            "remote_host": origin.host,
            "remote_port": origin.kv_port,
            "tp_size": engine.instance.tp,
            "pp_size": engine.instance.pp,
            "dcp_size": 1,
            "remote_num_tokens": sequence.input_tokens,
            "remote_blocks_expiry_time": time.time() + engine.kv_expiry_s,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": sequence.cached_tokens,
            "remote_instance": engine.instance.name,
            **({"kept": self.kept} if self.kept is not None else {}),
        }

    async def _start(self) -> None:
        """Bring every sequence into the batch."""
        jobs = self.jobs
        if self.ask.leg == "whole" and self.engine.chunks_prompts and not jobs[0].prompt.adapter:
            await self._prefill_beside()
            return
        if self.ask.leg == "whole":
            await self._prefill()
        for sequence in jobs:
            self.engine.reserve(sequence)
        if self.ask.leg == "whole":
            for sequence in jobs:
                await self._reserved(sequence)
                self.engine.go_on(sequence)
        elif len(jobs) == 1:
            await self._fetch(jobs[0], self.ask.tickets[0])
        else:
            await self._fetch_all()

    async def _prefill_beside(self) -> None:
        """Compute the prompts beside the batch, one after the other, so that equal ones are computed once."""
        for sequence in self.jobs:
            self.engine.reserve(sequence)
            await self._reserved(sequence)
            self.engine.prefill_beside(sequence)
            self.cached_tokens += sequence.cached_tokens
            await self.notifier.until(partial(getattr, sequence, "computed"))

    async def _fetch_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for sequence, handle in zip(self.jobs, self.ask.tickets, strict=True):
                    group.create_task(self._fetch(sequence, handle))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _reserved(self, sequence: EngineSequence) -> None:
        await self.notifier.until(lambda: sequence.stage == "reserved")

    async def _fetch(self, sequence: EngineSequence, handle: KvHandle) -> None:
        """Pull the KV of a sequence and put the sequence into the batch."""
        engine = self.engine
        await self._reserved(sequence)
        known = handle.prefill_cached_tokens  # vLLM reports this count to the client
        self.cached_tokens += sequence.cached_tokens if known is None else known
        asked_s = engine.clock.now()
        loaded_tokens = self._loaded_tokens(sequence, handle.kept)
        pull_request = PullRequest(
            handle.key, engine.instance.name, sequence.cached_tokens + loaded_tokens, handle.awaited, handle.early
        )
        try:
            header = await pull(handle.host, handle.port, pull_request, patience_s=engine.kv_patience_s)
        except EngineError:
            engine.counters.kv_failed += 1
            raise
        seconds = engine.clock.now() - asked_s
        engine.counters.transferred(header.source, header.kv_bytes, seconds, early=handle.early)
        if engine.storage is not None and handle.kept is not None:
            engine.storage.node.release(handle.kept.id)
        engine.transfer_done(sequence)

    def _loaded_tokens(self, sequence: EngineSequence, kept: KeptBlocksBody | None) -> int:
        """Return the number of tokens that are not cached here and are in the buffer of this node."""
        storage, size = self.engine.storage, self.engine.block_tokens
        if kept is None or storage is None or storage.node.complete_read(kept.id) is None:
            return 0
        first, end = kept.first_block * size, (kept.first_block + kept.blocks) * size
        return max(end - max(first, sequence.cached_tokens), 0)

    async def _news(self, sent: int) -> None:
        """Wait until all answers together have more than `sent` tokens or are complete."""
        await self.notifier.until(lambda: self.output_tokens > sent or self._answered())

    async def _fail_if_due(self) -> None:
        if self.fault is not None and self.output_tokens >= self.fault.after_tokens:
            await fail(self.fault)

    async def whole(self) -> web.Response:
        """Return the response in one piece."""
        await self._start()
        await self._fail_if_due()  # an event loop that is late may find all tokens computed
        while not self._answered():
            await self._news(self.output_tokens)
            await self._fail_if_due()
        self._write_back(output=True)
        return self._response(self._usage(), kv_transfer_params=None)

    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Stream the response while it is computed. As in vLLM, headers are sent first: a later failure is an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        writers, talks = self._writers(), self.ask.kind in _CONVERSATIONS
        try:
            for writer in writers:
                if isinstance(writer, ConversationWriter) and (opening := writer.before()):
                    await response.write(opening)
            await self._start()
            await self._send_pieces(response, writers)
            if self._answered():
                self._write_back(output=True)
        except ApiError as refusal:
            await response.write((b"event: error\n" if talks else b"") + b"data: " + refusal.body() + b"\n\n")
        await response.write_eof(b"" if talks else b"data: [DONE]\n\n")
        return response

    def _writers(self) -> list[StreamWriter | ConversationWriter]:
        """Return what writes each answer."""
        if self.ask.kind in _CONVERSATIONS:
            return [ConversationWriter(self.heading, answer, self.ask.details) for answer in self.answers]
        numbered = enumerate(self.answers)
        return [StreamWriter(self.heading, index, answer, self.ask.details) for index, answer in numbered]

    async def _send_pieces(
        self, response: web.StreamResponse, pieces: Sequence[StreamWriter | ConversationWriter]
    ) -> None:
        jobs = self.jobs
        sent, total = 0, sum(sequence.output_tokens for sequence in jobs)
        # A stream with a fault sends no token beyond it, also if the event loop is late and more are computed.
        last = total if self.fault is None else self.fault.after_tokens
        while sent < total:
            await self._news(sent)
            sent = self.output_tokens
            await response.write(
                b"".join(
                    [piece.until(min(sequence.emitted, last)) for piece, sequence in zip(pieces, jobs, strict=True)]
                )
            )
            await self._fail_if_due()
        for piece in pieces:
            if isinstance(piece, ConversationWriter):
                await response.write(piece.after(self._usage()))
        if self.ask.usage:
            await response.write(self.heading.event([], usage=self._usage()))
