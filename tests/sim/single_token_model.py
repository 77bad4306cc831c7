"""A slow model of a decode instance: one iteration after the other, one token of a prompt after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import strategies as st

from kvroute.timing import IterationTime, PrefillTime


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at a decode instance: with its KV, or with a prompt that is computed there."""

    at: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None: its KV has been transferred."""
    joins: bool = True
    """Whether the instance that computes its prompt also decodes it."""


@dataclass
class Slot:
    """A request with a slot in the slow model."""

    number: int
    prompt_left: int
    token_s: float
    begun: bool = False
    emitted: int = 0


def modelled(
    arrivals: list[Arrival],
    time: IterationTime,
    prefill: PrefillTime,
    batch_max: int,
    chunk_tokens: int,
    *,
    whole_alone: bool = False,
) -> dict[int, tuple[float, float]]:
    """Make every iteration; return (first token, finish) by request; they are equal for one that does not join.

    `whole_alone`: an iteration in which no request decodes computes the whole of one prompt.
    """
    waiting = deque(sorted(range(len(arrivals)), key=lambda number: (arrivals[number].at, number)))
    slots: list[Slot] = []
    first: dict[int, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    now = 0.0
    while waiting or slots:
        if not slots:
            now = max(now, arrivals[waiting[0]].at)
        while waiting and len(slots) < batch_max and arrivals[waiting[0]].at <= now + 1e-9:
            number = waiting.popleft()
            arrival = arrivals[number]
            if arrival.cached_tokens is None:
                slots.append(Slot(number, 0, 0.0))
                continue
            tokens = max(arrival.input_tokens - arrival.cached_tokens, 1)
            seconds = prefill.seconds(arrival.input_tokens, arrival.cached_tokens)
            slots.append(Slot(number, tokens, (seconds - prefill.seconds(0)) / tokens))
        decoding = [slot for slot in slots if not slot.prompt_left]
        if decoding:
            context = sum(arrivals[slot.number].input_tokens + slot.emitted for slot in decoding)
            now += time.seconds(len(decoding), context)
        computing = deque(slot for slot in slots if slot.prompt_left)
        completed = []
        based = bool(decoding)
        whole = whole_alone and not decoding
        for _ in range(computing[0].prompt_left if whole else max(chunk_tokens - len(decoding), 1)):
            if computing:
                if not computing[0].begun and not based:
                    now += prefill.seconds(0)  # once in an iteration
                    based = True
                computing[0].begun = True
                computing[0].prompt_left -= 1
                now += computing[0].token_s
                if not computing[0].prompt_left:
                    completed.append(computing.popleft())
        for slot in [*completed, *decoding]:
            slot.emitted += 1
            first.setdefault(slot.number, now)
            if not arrivals[slot.number].joins or slot.emitted == arrivals[slot.number].output_tokens:
                slots.remove(slot)
                ends[slot.number] = (first[slot.number], now)
    return ends


def mixed(at: int, tokens: int, output_tokens: int, cached: float | None, *, joins: bool = True) -> Arrival:
    """Return an arrival at a time that is never a boundary, where rounding decides."""
    cached_tokens = None if cached is None else int(cached * (tokens - 1))
    return Arrival(at * 0.001_000_173_7, tokens, output_tokens, cached_tokens, joins)


_sizes = {"at": st.integers(0, 2_000), "tokens": st.integers(1, 500), "output_tokens": st.integers(1, 30)}
arrivals = st.lists(st.builds(mixed, cached=st.none() | st.floats(0, 1), **_sizes), min_size=1, max_size=20)
prompts_of_prefill = st.lists(
    st.builds(mixed, cached=st.floats(0, 1), joins=st.booleans(), **_sizes), min_size=1, max_size=20
)
"""Arrivals at a prefill instance that also decodes."""
