"""Requests of an event log as a workload, with the recorded output lengths; recorded decisions are not read."""

from __future__ import annotations

import math

import msgspec

from kvroute.sim.workload.shaping import own_ids
from kvroute.sim.workload.trace import TracedRequest
from kvroute.types import Arrived, Event, Finished, Request

_LONGEST_TOKENS = 100_000_000
_BLOCK_LIMIT = 1 << 64
_UNKNOWN = -2
"""Used instead of a seed, so that no id equals one of another draw."""


class _Line(msgspec.Struct, frozen=True):
    """One record of the log, without its decisions."""

    event: Event


class RecordedRequests:
    """Reads a log record by record in one pass. The end of a request comes after its arrival; an end without arrival is
    ignored."""

    def __init__(self) -> None:
        self._arrivals: list[Arrived] = []
        self._answers: list[int | None] = []
        self._open: dict[int, int] = {}
        self._decode = msgspec.json.Decoder(_Line).decode

    def take(self, line: bytes) -> None:
        """Store one record. Raises ValueError with the reason if it is invalid."""
        try:
            event = self._decode(line).event
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a record of an event log ({error})") from None
        if isinstance(event, Arrived):
            _check(event)
            self._open[event.request.id] = len(self._arrivals)
            self._arrivals.append(event)
            self._answers.append(None)
        elif isinstance(event, Finished):
            tokens = event.output_tokens
            if tokens is not None and not 0 <= tokens <= _LONGEST_TOKENS:
                raise ValueError(f"field output_tokens: {tokens} is not a valid output length")
            position = self._open.pop(event.request_id, None)
            if position is not None:
                self._answers[position] = tokens

    def requests(self) -> list[TracedRequest]:
        """Return the requests in the log's order, with times from the earliest arrival on.

        If the output of a request was not counted, its reserved length is used, or 1 token if nothing was reserved.
        """
        first_s = min((arrival.at for arrival in self._arrivals), default=0.0)
        return [
            _traced(number, arrival.at - first_s, arrival.request, tokens)
            for number, (arrival, tokens) in enumerate(zip(self._arrivals, self._answers, strict=True))
        ]

    def remarks(self) -> list[str]:
        """Return what the trace does not preserve of these requests, in sentences for the user."""
        count, found = len(self._arrivals), []
        unknown = self._answers.count(None)
        if unknown:
            found.append(
                f"the output of {unknown} of {count} requests was not counted (rejected, failed or cut off); "
                "the reserved output length is used instead"
            )
        lone = sum(arrival.request.one_leg for arrival in self._arrivals)
        if lone:
            found.append(f"{lone} of {count} requests had several prompts or choices; a trace has one of each")
        models = sorted({arrival.request.model or "unnamed" for arrival in self._arrivals})
        if len(models) > 1:
            found.append(f"requests use {len(models)} models, which a trace does not distinguish: {', '.join(models)}")
        return found


def _check(arrival: Arrived) -> None:
    request = arrival.request
    for name, number, least in (
        ("input_tokens", request.input_tokens, 1),
        ("max_output_tokens", request.max_output_tokens, 0),
        ("block_tokens", request.block_tokens, 1),
    ):
        if not least <= number <= _LONGEST_TOKENS:
            raise ValueError(f"field {name}: {number} is not a whole number from {least} to {_LONGEST_TOKENS}")
    if not math.isfinite(arrival.at):
        raise ValueError(f"field at: {arrival.at} is not a valid time")
    if request.blocks and not (min(request.blocks) >= 0 and max(request.blocks) < _BLOCK_LIMIT):
        raise ValueError("field blocks: an id is negative or exceeds 64 bits")


def _traced(number: int, at_s: float, request: Request, tokens: int | None) -> TracedRequest:
    answer = (request.max_output_tokens or 1) if tokens is None else tokens
    return TracedRequest(at_s, request.input_tokens, answer, _chain(number, request), request.block_tokens)


def _chain(number: int, request: Request) -> tuple[int, ...]:
    """Return as many blocks as the prompt has.

    A gateway without a tokenizer estimates lengths, and for several prompts it has only the blocks of the first one.
    Missing blocks get ids that no other request has.
    """
    blocks, full = request.blocks, request.input_tokens // request.block_tokens
    if not blocks or len(blocks) == full:
        return blocks
    return blocks[: -(-request.input_tokens // request.block_tokens)] + tuple(
        own_ids(number, len(blocks), full, _UNKNOWN)
    )
