"""Fault injection: which of an instance's next requests fail, and how. Random choices use a seeded generator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from kvroute.timing import PrefillTime

Where: TypeAlias = Literal["prefill", "decode", "transfer", "recompute", "health", "any"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /emulator/fault. A body that selects no request removes the fault of its leg."""

    fail_next: int = 0
    """Number of next requests that all fail."""
    share: float = 0.0
    """Share of all later requests that fail."""
    status: int | Literal["reset", "hang"] = 500
    """HTTP status, `reset` (the connection is closed) or `hang` (no response)."""
    leg: Where = "any"
    """Requests that fail: prefill legs, decode legs (which produce the output), or KV transfers from here, which break
    halfway. With `recompute`, decode legs fetch nothing and compute the prompt here, as vLLM does with
    `kv_load_failure_policy: recompute`. Health checks fail with `health` only, never with `any`."""
    after_tokens: int = 0
    """Output tokens after which a decode leg fails; 0: at once."""
    prompt_contains: str = ""
    """Every request whose body contains this text fails, regardless of `fail_next` and `share`; empty: no request."""


class Faults:
    """The injected faults of one instance. A new fault replaces the previous one of the same leg."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._orders: dict[Where, Fault] = {}

    def schedule(self, fault: Fault) -> None:
        """Inject a fault. A fault that selects no request removes the fault of its leg."""
        if fault.fail_next or fault.share or fault.prompt_contains:
            self._orders[fault.leg] = fault
        else:
            self._orders.pop(fault.leg, None)

    def should_fail(self, leg: Where, body: bytes = b"") -> Fault | None:
        """Return the fault of the request that arrives now, or None, and count the request."""
        for where in (leg, "any"):
            fault = self._orders.get(where)
            if fault is None or (where == "any" and leg in ("transfer", "recompute", "health")):
                continue
            if fault.prompt_contains and fault.prompt_contains.encode() in body:
                return fault
            if fault.fail_next > 0:
                self._orders[where] = msgspec.structs.replace(fault, fail_next=fault.fail_next - 1)
                return fault
            if fault.share and self._random.random() < fault.share:
                return fault
        return None


@dataclass(frozen=True, slots=True)
class SlowedPrefill:
    """A prefill time multiplied by a factor."""

    time: PrefillTime
    factor: float

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        return self.factor * self.time.seconds(tokens, cached_tokens)
