"""Replays a trace against a live OpenAI-compatible server: open loop, streaming, with the arrival time of every token.

A request is sent when it is due, however many are in progress. Only times and errors are measured; the content of a
response is not checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec

from kvroute.load.client import LoadClient

VOCABULARY = 32_000
LEAD_S = 0.05
"""Delay from the call to the trace's time 0, in seconds, so that the first requests are not late."""


class Traced(Protocol):
    """Fields of a traced request that are replayed. `TracedRequest` of a simulation has them."""

    @property
    def at_s(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...
    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request to send `at_s` seconds after the start."""

    at_s: float
    body: bytes
    path: str = "/v1/completions"
    request_id: str = ""
    """Sent as X-Request-Id. Emulated engines use a numeric id as the request's number in its trace."""


class ReplayedResponse(msgspec.Struct, kw_only=True):
    """Response to one request. Times are in seconds since the start of the replay; None: it did not get so far."""

    due_s: float
    sent_s: float | None = None
    """Time when the request was written; later than due if connecting or this process was slow."""
    status: int | None = None
    token_s: list[float] = []
    """Arrival time of every streamed event with a token. Events of one chunk have the same time."""
    finished_s: float | None = None
    error: str = ""
    """Error message; empty if the response ended properly."""

    @property
    def ttft_s(self) -> float | None:
        """Time from due to the first token, in seconds."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def ok(self) -> bool:
        """True if the response is complete."""
        return not self.error and self.status == 200 and self.finished_s is not None


def prompt_tokens(request: Traced, number: int) -> list[int]:
    """Return the token ids of a prompt, `request.input_tokens` of them. Equal blocks of a trace have equal tokens.

    Args:
        request: the traced request.
        number: number of the request. The tokens beyond its blocks are unique to it.
    """
    blocks = [_block(block, request.block_tokens) for block in request.blocks]
    ids = list(chain.from_iterable(blocks))[: request.input_tokens]
    left = request.input_tokens - len(ids)
    return ids + _block(-1 - number, left) if left else ids


def timed_requests(trace: Iterable[Traced], model: str) -> Iterator[TimedRequest]:
    """Build, lazily, a streamed completion per request of a trace. Requests without output tokens are left out."""
    for number, request in enumerate(trace):
        if request.output_tokens:
            fields = {
                "model": model,
                "prompt": prompt_tokens(request, number),
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            yield TimedRequest(request.at_s, msgspec.json.encode(fields), request_id=str(number))


async def replay_trace(
    url: str,
    requests: Iterable[TimedRequest],
    *,
    on_answer: Callable[[ReplayedResponse], None] = lambda answer: None,
    timeout_s: float = 600.0,
) -> list[ReplayedResponse]:
    """Send every request when it is due, wait for all responses and return them in the order of the requests.

    Args:
        url: `http://host:port` of the server.
        requests: ascending by time. All are built before the first one is sent, so that building delays none.
        on_answer: called with each response when it ends.
        timeout_s: maximum duration of a response, in seconds.

    Raises:
        InputError: the URL is not plain http with a host.
    """
    client, ready = LoadClient(url), list(requests)
    started = time.monotonic() + LEAD_S
    answers: list[ReplayedResponse] = []
    try:
        async with asyncio.TaskGroup() as group:
            for request in ready:
                await asyncio.sleep(max(0.0, started + request.at_s - time.monotonic()))
                answer = ReplayedResponse(due_s=request.at_s)
                answers.append(answer)
                group.create_task(_fetch(client, request, answer, started, timeout_s, on_answer))
    finally:
        client.close()
    return answers


async def _fetch(
    client: LoadClient,
    request: TimedRequest,
    answer: ReplayedResponse,
    started: float,
    timeout_s: float,
    on_answer: Callable[[ReplayedResponse], None],
) -> None:
    events = EventStreamParser(answer, started)
    try:
        async with asyncio.timeout(timeout_s):
            named = f"x-request-id: {request.request_id}\r\n".encode() if request.request_id else b""
            answer.status = await client.post(request.path, request.body, events.feed, events.sent, named)
        answer.error = answer.error or events.verdict(answer.status)
    except TimeoutError:
        answer.error = f"no complete response within {timeout_s:g} s"
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.finished_s = time.monotonic() - started
    on_answer(answer)


@dataclass(slots=True)
class EventStreamParser:
    """Server-sent events of one response, parsed only as far as timing requires."""

    answer: ReplayedResponse
    started: float
    done: bool = False
    _pending: bytes = b""

    def sent(self) -> None:
        """Record that the request has been written."""
        self.answer.sent_s = time.monotonic() - self.started

    def feed(self, data: bytes) -> None:
        """Process body bytes as they arrive."""
        now = time.monotonic() - self.started
        *events, self._pending = (self._pending + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: [DONE]"):
                self.done = True
            elif event.startswith(b'data: {"error"'):
                self.answer.error = event[6:].decode(errors="replace")
            elif event.startswith(b"data: "):
                self.answer.token_s.append(now)

    def verdict(self, status: int) -> str:
        """Return what is wrong with a response that has ended; empty if nothing."""
        if status != 200:
            return f"status {status}: {self._pending[:200].decode(errors='replace')}"
        return "" if self.done else "the stream ended without [DONE]"


def _block(block: int, size: int) -> list[int]:
    """Return `size` token ids that represent a block. Its number comes first, so that blocks differ at once."""
    number, ids = block % 2**64, []
    for _ in range(min(5, size)):
        number, digit = divmod(number, VOCABULARY)
        ids.append(digit)
    first = (block * 7_919) % VOCABULARY
    ids.extend((first + 31 * place) % VOCABULARY for place in range(size - len(ids)))
    return ids
