"""A decision as the dashboard shows it: the choice, and the cost terms of the cheapest candidates."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.types import (
    CopyPrefix,
    Decision,
    Decode,
    FleetDecision,
    Offload,
    Prefill,
    ReadKv,
    Reject,
    Replicas,
    Role,
    ScaleIn,
    ScaleOut,
    Shadowed,
    SwitchRole,
    Terms,
)

CANDIDATES_MOST = 8


class CandidateView(msgspec.Struct, frozen=True):
    """One candidate's cost terms at the time of the decision."""

    name: str
    feasible: bool
    cost: float
    terms: dict[str, float]


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with its cheapest candidates; the chosen one is always among them."""

    id: int
    at: float
    request_id: int
    kind: str
    policy: str
    chosen: str
    source: str = ""
    """Instance from which KV is transferred: the prompt's KV cache for a decode, a cached prefix for a prefill;
    "store" for a read, of which `chosen` reads the longer part."""
    tier: int | None = None
    kv_bytes: float = 0.0
    hit_tokens: int = 0
    reason: str = ""
    unit: str = ""
    candidates: tuple[CandidateView, ...] = ()
    shadow: Shadowed | None = None
    """What the shadow policy would have chosen."""
    others: int = 0
    """Number of candidates that are not listed."""
    aggregated: tuple[CandidateView, ...] = ()
    """The cheapest instances that could have served the request aggregated, and the pair that was preferred to them."""
    offload: Offload | None = None
    """Reason for the choice of the prefill datacenter, if there is a choice."""
    role: Role | None = None
    """New role of an instance whose role is switched."""


def judgement_of(number: int, at: float, policy: str, decision: Decision) -> DecisionView:
    """Return a decision as the dashboard shows it, with at most CANDIDATES_MOST candidates."""
    terms = decision.terms
    chosen = source = ""
    kv_bytes = 0.0
    match decision:
        case Prefill(instance=chosen, copy_from=source, copy_bytes=kv_bytes):
            kind = "prefill"
        case Decode(target=chosen, source=source, kv_bytes=kv_bytes):
            kind = "decode"
        case ReadKv(kv_bytes=kv_bytes):
            kind, source = "read", "store"
            longer = decision.prefill_tokens >= decision.decode_tokens
            chosen = decision.prefill_instance if longer else decision.decode_instance
        case Reject():
            kind = "reject"
        case SwitchRole(instance=chosen):
            kind = "switch_role"
        case CopyPrefix(target=chosen):
            kind = "copy"
        case Replicas(model=chosen):
            kind = "replicas"
        case ScaleIn(instance=chosen):
            kind = "scale_in"
        case ScaleOut(instance=chosen):
            kind = "scale_out"
    candidates = _candidates(terms, chosen) if terms is not None else ()
    return DecisionView(
        id=number,
        at=round(at, 3),
        request_id=-1 if isinstance(decision, FleetDecision) else decision.request_id,
        kind=kind,
        policy=policy,
        chosen=chosen,
        source=source,
        tier=decision.tier if isinstance(decision, Decode) else None,
        kv_bytes=kv_bytes,
        hit_tokens=_hit_tokens(decision),
        reason=decision.reason if isinstance(decision, Reject) else "",
        unit=terms.unit if terms is not None else "",
        candidates=candidates,
        shadow=decision.shadow if isinstance(decision, Decode) else None,
        others=len(terms.names) - len(candidates) if terms is not None else 0,
        aggregated=_aggregated(decision),
        offload=decision.offload if isinstance(decision, Prefill) else None,
        role=decision.role if isinstance(decision, SwitchRole | ScaleIn | ScaleOut) else None,
    )


def _aggregated(decision: Decision) -> tuple[CandidateView, ...]:
    terms = decision.aggregated if isinstance(decision, Prefill) else None
    return () if terms is None else _candidates(terms, terms.names[-1])


def _hit_tokens(decision: Decision) -> int:
    match decision:
        case Prefill(cached_tokens=tokens) | Decode(hit_tokens=tokens):
            return tokens
        case ReadKv(prefill_tokens=prefill_tokens, decode_tokens=decode_tokens):
            return prefill_tokens + decode_tokens
        case _:
            return 0


def _candidates(terms: Terms, chosen: str) -> tuple[CandidateView, ...]:
    """Return the candidates to show: feasible ones first, then by cost, then by position; always the chosen one."""
    order = np.lexsort((terms.cost, ~terms.feasible)).tolist()
    shown = order[:CANDIDATES_MOST]
    if chosen and all(terms.names[k] != chosen for k in shown):
        shown[-1] = terms.names.index(chosen)
    return tuple(
        CandidateView(
            terms.names[k],
            bool(terms.feasible[k]),
            short(float(terms.cost[k])),
            {name: short(float(values[k])) for name, values in terms.parts.items()},
        )
        for k in shown
    )


def short(value: float) -> float:
    """Round to six significant digits, for display."""
    return float(f"{value:.6g}")
