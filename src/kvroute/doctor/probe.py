"""One request through a prefill and a decode engine, in the gateway's own protocol, and the KV that it moved."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvroute.doctor.counters import Movement, PageCounters, external_tokens, failures, movement, read_counters
from kvroute.doctor.engine import Examined
from kvroute.doctor.fetch import Fetched, fetch
from kvroute.doctor.report import PairReport
from kvroute.http.client.pool import UpstreamPool
from kvroute.llm import Model
from kvroute.serve.api.requests import Completion, read_completion
from kvroute.serve.engines.pd_protocol import KvHandshake, ProtocolError
from kvroute.serve.engines.protocols import ROOM_LIMIT

COMPLETIONS_PATH = b"/v1/completions"
ANSWER_TOKENS = 8
"""Several, so that an engine that updates its counters once per step updates them before the response ends."""
TOKEN_IDS = range(32, 256)
"""Ids that every tokenizer has and none uses as control tokens."""
MARGIN_TOKENS = 64
"""Number of context tokens that are left free."""
COUNTERS_WAIT_S = 3.0
"""Maximum delay of the counters after the response, in seconds."""
_POLL_S = 0.1
_ERROR_CHARS = 200
_ERROR_START = b'data: {"error"'


class PairError(Exception):
    """A leg failed. The text contains the engine and the reason."""


@dataclass(slots=True)
class Outcome:
    """Results of one request through a pair."""

    moved: Movement | None = None
    moved_tokens: float | None = None
    """Prompt tokens that a connector transferred, if the decode engine counts them."""
    failed: list[str] = field(default_factory=list)
    """Reasons of failed transfers."""
    counted: bool = False
    """True if one of the engines has counters of transfers."""
    transfer_tp: int | None = None
    """Tensor parallelism in the prefill engine's response."""
    prefill_s: float | None = None
    first_token_s: float | None = None
    sent_s: float = 0.0


class _TransferParams(msgspec.Struct):
    tp_size: int | None = None


def prompt_of(draw: random.Random, tokens: int) -> list[int]:
    """Return token ids that no engine has cached."""
    return draw.choices(TOKEN_IDS, k=tokens)


def prompt_tokens(wanted: int, prefill: Examined, decode: Examined, model: Model) -> int:
    """Return the number of tokens to send: `wanted`, limited by both contexts and an eighth of both KV memories."""
    bounds = [wanted]
    for engine in (prefill, decode):
        if engine.report.context_tokens:
            bounds.append(engine.report.context_tokens - MARGIN_TOKENS)
        per_token = model.kv_bytes_per_token
        if per_token:
            bounds.append(int(engine.client.instance.kv_capacity_bytes / per_token / 8))
    return max(1, min(bounds))


@dataclass(slots=True)
class Probe:
    """A request through one pair."""

    pair: PairReport
    prefill: Examined
    decode: Examined
    prompt: list[int]
    draw: random.Random
    remaining_s: Callable[[], float]

    async def run(self) -> Outcome:
        """Send both legs, and read the counters before and after.

        Raises:
            PairError: a leg failed.
        """
        before = await self._counters()
        outcome = Outcome(counted=any(sample.kinds or sample.external_tokens is not None for sample in before))
        await self._legs(outcome)
        await self._wait_for_counters(before, outcome)
        return outcome

    async def _counters(self) -> tuple[PageCounters, PageCounters]:
        """Return the counters of the decode engine and of the prefill engine."""
        pages = await asyncio.gather(
            *(engine.metrics_page(self.remaining_s()) for engine in (self.decode, self.prefill))
        )
        return read_counters(pages[0]), read_counters(pages[1])

    async def _wait_for_counters(self, before: tuple[PageCounters, PageCounters], outcome: Outcome) -> None:
        waited_s = 0.0
        while True:
            after = await self._counters()
            moves = (movement(old, new) for old, new in zip(before, after, strict=True))
            outcome.moved = next((move for move in moves if move is not None), None)
            outcome.moved_tokens = external_tokens(before[0], after[0])
            outcome.failed = failures(before[0], after[0])
            if outcome.moved or outcome.failed or not outcome.counted or waited_s >= COUNTERS_WAIT_S:
                return
            await asyncio.sleep(min(_POLL_S, self.remaining_s()))
            waited_s += _POLL_S

    async def _legs(self, outcome: Outcome) -> None:
        protocol = self.prefill.client.protocol
        completion, handshake = completion_of(self.prefill, self.prompt), await self._handshake()
        name = uuid.UUID(int=self.draw.getrandbits(128)).hex
        try:
            prefill_body = protocol.prefill_body(completion, handshake)
            if protocol.concurrent_legs and not protocol.returns_params:
                decode_body = protocol.decode_body(completion, handshake, None)
                prefilled, decoded = await self._both(name, prefill_body, decode_body)
            else:
                prefilled = await self._send("prefill", name, prefill_body)
                transfer_params = protocol.transfer_params(prefilled.body)
                outcome.transfer_tp = _tp_of(transfer_params)
                outcome.prefill_s = prefilled.end_s - prefilled.sent_s
                decoded = await self._send("decode", name, protocol.decode_body(completion, handshake, transfer_params))
        except ProtocolError as error:
            raise PairError(f"prefill engine {self.pair.prefill} {error}") from None
        outcome.sent_s = prefilled.sent_s
        outcome.first_token_s = decoded.first_byte_s - decoded.sent_s

    async def _both(self, name: str, prefill_body: bytes, decode_body: bytes) -> tuple[Fetched, Fetched]:
        """Send both legs at once. If one fails, the other one is aborted."""
        try:
            async with asyncio.TaskGroup() as group:
                legs = [
                    group.create_task(self._send("prefill", name, prefill_body)),
                    group.create_task(self._send("decode", name, decode_body)),
                ]
        except* PairError as failed:
            raise PairError(str(failed.exceptions[0])) from None
        return legs[0].result(), legs[1].result()

    async def _handshake(self) -> KvHandshake:
        client = self.prefill.client
        found = client.handshake(self._drawn)
        if found is None:
            answered = asyncio.Event()
            client.resolve_engine_id(answered.set)
            await answered.wait()
            found = client.handshake(self._drawn)
        if found is None:
            raise PairError(f"the bootstrap server of prefill engine {client.name} does not respond")
        return found

    def _drawn(self) -> int:
        return self.draw.randrange(ROOM_LIMIT)

    async def _send(self, leg: str, name: str, body: bytes) -> Fetched:
        engine = self.prefill if leg == "prefill" else self.decode
        answer = await posted(engine, name, body, self.remaining_s())
        if wrong := problem_of(answer):
            raise PairError(f"{leg} engine {engine.name}: {wrong}")
        return answer


def completion_of(engine: Examined, prompt: list[int]) -> Completion:
    """Return a request for a few tokens with this prompt."""
    body = {
        "model": engine.report.request_model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return read_completion(COMPLETIONS_PATH, msgspec.json.encode(body))


async def posted(engine: Examined, name: str, body: bytes, wait_s: float) -> Fetched:
    """Send a completion to an engine as the gateway does, and return the response. Args: `name`: its X-Request-Id."""
    pool: UpstreamPool = engine.client.pool
    headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode()), *engine.headers]
    headers += engine.client.rank_headers
    answer = await fetch(pool, COMPLETIONS_PATH, wait_s=wait_s, headers=headers, body=body)
    engine.dated(answer)
    return answer


def problem_of(answer: Fetched) -> str:
    """Return what is wrong with the response to a completion; empty if nothing."""
    if not answer.ok:
        return f"{answer.problem}{_message(answer.body)}"
    return f"it sent an error event{_message(answer.body)}" if answer.body.startswith(_ERROR_START) else ""


def _tp_of(transfer_params: msgspec.Raw | None) -> int | None:
    try:
        return None if transfer_params is None else msgspec.json.decode(transfer_params, type=_TransferParams).tp_size
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None
    message: str = ""


def _message(body: bytes) -> str:
    """Return the reason in an OpenAI error, shortened; empty if there is none."""
    text = body.removeprefix(b"data: ").partition(b"\n")[0]
    try:
        answer = msgspec.json.decode(text, type=_ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    message = " ".join((answer.error.message if answer.error else answer.message).split())
    if not message:
        return ""
    return f" ({message[:_ERROR_CHARS]}{'...' if len(message) > _ERROR_CHARS else ''})"
