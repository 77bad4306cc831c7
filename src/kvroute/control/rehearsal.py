"""Synthetic requests through a core that serves nothing: what is compiled or imported at first use is then ready."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvroute.control.core import Control
from kvroute.types import (
    TIER_COUNT,
    Admitted,
    Arrived,
    CongestionMeasured,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceMeasured,
    InstanceUp,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Request,
    TransferFinished,
    TransferMeasured,
)

_TOKENS, _BLOCK_TOKENS, _OUTPUT_TOKENS = 64, 16, 16
_BLOCKS = (1, 2, 3)
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"blocks": _BLOCKS},
    {"blocks": _BLOCKS, "session": 1},
    {"blocks": _BLOCKS, "adapter": "warm-up"},
    {"one_leg": True},
    {"copyable": True, "blocks": (*_BLOCKS, 4)},
)
"""Requests that take different paths through the core. The cache and transfers of the earlier ones are there for the
later ones."""


def warm_up(control: Control) -> None:
    """Let requests of each kind for each model arrive, move on, fail, and end. The core is unusable afterwards."""
    number = 0
    for model in sorted({instance.model for instance in control.cluster.instances}):
        for both_on_arrival in (False, True):
            for kind in _KINDS:
                number += 1
                request = Request(
                    id=number,
                    input_tokens=_TOKENS,
                    block_tokens=_BLOCK_TOKENS,
                    max_output_tokens=_OUTPUT_TOKENS,
                    model=model,
                    **({"blocks": ()} | kind),
                )
                _serve(control, request, both_on_arrival=both_on_arrival)
    for _ in control.dismantle():
        pass  # otherwise only the cyclic garbage collector would free the cached prefixes


def _serve(control: Control, request: Request, *, both_on_arrival: bool) -> None:
    """Report the steps of one request; every third stays in flight, so that later ones find its load."""
    number, at = request.id, float(request.id)
    decisions = _handle(control, Arrived(at, request, both_on_arrival=both_on_arrival, ttft_max_s=1e6))
    if number % 3 == 1:
        decisions = _handle(control, PrefillFailed(at, number)) or decisions
    _query(control, request, at)
    decisions = (*decisions, *_handle(control, PrefillFinished(at, number)))
    if number % 3 == 2:
        decisions = (*decisions, *_handle(control, DecodeFailed(at, number)))
    source = next((decision.instance for decision in decisions if isinstance(decision, Prefill)), "")
    target = next((decision.target for decision in decisions if isinstance(decision, Decode)), "")
    for name in filter(None, (source, target)):
        _handle(control, InstanceMeasured(at, name, 1, 1, 0.5))
        _handle(control, InstanceUp(at, name, returned=True))
        _handle(control, KvStored(at, name, request.blocks or _BLOCKS, _BLOCK_TOKENS))
    _handle(control, TransferFinished(at, number))
    _handle(control, TransferMeasured(at, source, target, 1e9, 0.1))
    _handle(control, CongestionMeasured(at, (0.1,) * TIER_COUNT))
    _handle(control, Admitted(at, number))
    if number % 3:
        _handle(control, Finished(at, number, output_tokens=_OUTPUT_TOKENS))


def _query(control: Control, request: Request, at: float) -> None:
    """Read what metrics, displays and other gateways show of the core."""
    control.loads(at)
    control.learned(at)
    control.knowledge(at)
    control.backlog(request.model, at)
    control.work_s(request, at, _OUTPUT_TOKENS)
    control.prefill_left_s(request.id, at)


def _handle(control: Control, event: Event) -> Sequence[Decision]:
    """Return the decisions; none if the event is not possible in the state of the core."""
    with suppress(InputError):
        return control.handle(event)
    return ()
