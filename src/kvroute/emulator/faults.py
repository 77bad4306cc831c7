"""Faults to order: which of an instance's next requests fail, and how; chance is drawn from a seeded generator."""

from __future__ import annotations

import random
from typing import Literal, TypeAlias

import msgspec

Where: TypeAlias = Literal["prefill", "decode", "transfer", "recompute", "health", "any"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /emulator/fault; the default takes all faults back."""

    fail_next: int = 0
    """So many requests from now on, each."""
    share: float = 0.0
    """And of all later ones this share."""
    status: int | Literal["reset", "hang"] = 500
    """An HTTP status, a connection cut off, or no answer at all."""
    leg: Where = "any"
    """Prefill legs, legs that answer tokens (decode), or KV transfers from here, which break off in the middle. By
    `recompute` decode legs fetch nothing and compute the prompt here, as vLLM does with `kv_load_failure_policy:
    recompute`. Health checks fail by `health` alone, never by `any`."""
    after_tokens: int = 0
    """Of a decode leg: only then, in place of at once."""
    prompt_contains: str = ""
    """Every request whose body contains this text fails, whatever the two numbers above say; empty: none does."""


class Faults:
    """One instance's orders; a new one replaces the last one for the same leg."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._orders: dict[Where, Fault] = {}

    def order(self, fault: Fault) -> None:
        """Fail as told from now on; nothing to fail takes the order back."""
        if fault.fail_next or fault.share or fault.prompt_contains:
            self._orders[fault.leg] = fault
        else:
            self._orders.pop(fault.leg, None)

    def strikes(self, leg: Where, body: bytes = b"") -> Fault | None:
        """Whether the request that comes now fails, and how; counts it."""
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
