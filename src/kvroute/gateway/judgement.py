"""A decision for people to look at: what was chosen and the terms of the candidates that came closest."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.types import Convert, CopyPrefix, Decision, Decode, Offload, Prefill, Reject, Role, Shadowed, Terms

CANDIDATES_MOST = 8


class Candidate(msgspec.Struct, frozen=True):
    """One candidate's terms as they were when it was judged."""

    name: str
    feasible: bool
    cost: float
    terms: dict[str, float]


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with its cheapest candidates; the chosen one is always among them."""

    id: int
    at: float
    request_id: int
    kind: str
    policy: str
    chosen: str
    source: str = ""
    """Where KV comes from: a decode's prompt, or the cached prefix that a prefill waits for."""
    tier: int | None = None
    kv_bytes: float = 0.0
    hit_tokens: int = 0
    reason: str = ""
    unit: str = ""
    candidates: tuple[Candidate, ...] = ()
    shadow: Shadowed | None = None
    """What the policy in the shadow would have done."""
    others: int = 0
    """Candidates left out here."""
    offload: Offload | None = None
    """Why it is prefilled in this datacenter, where there is a choice."""
    role: Role | None = None
    """That a converted instance will serve."""


def judgement_of(number: int, at: float, policy: str, decision: Decision) -> Judgement:
    """A decision as the dashboard shows it, with at most CANDIDATES_MOST candidates."""
    terms = decision.terms
    chosen = source = ""
    kv_bytes = 0.0
    match decision:
        case Prefill(instance=chosen, copy_from=source, copy_bytes=kv_bytes):
            kind = "prefill"
        case Decode(target=chosen, source=source, kv_bytes=kv_bytes):
            kind = "decode"
        case Reject():
            kind = "reject"
        case Convert(instance=chosen):
            kind = "convert"
        case CopyPrefix(target=chosen):
            kind = "copy"
    candidates = _candidates(terms, chosen) if terms is not None else ()
    return Judgement(
        id=number,
        at=round(at, 3),
        request_id=-1 if isinstance(decision, Convert | CopyPrefix) else decision.request_id,
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
        offload=decision.offload if isinstance(decision, Prefill) else None,
        role=decision.role if isinstance(decision, Convert) else None,
    )


def _hit_tokens(decision: Decision) -> int:
    match decision:
        case Prefill(cached_tokens=tokens) | Decode(hit_tokens=tokens):
            return tokens
        case Reject() | Convert() | CopyPrefix():
            return 0


def _candidates(terms: Terms, chosen: str) -> tuple[Candidate, ...]:
    """Feasible before infeasible, then by cost, then by position; the chosen one always."""
    order = np.lexsort((terms.cost, ~terms.feasible)).tolist()
    shown = order[:CANDIDATES_MOST]
    if chosen and all(terms.names[k] != chosen for k in shown):
        shown[-1] = terms.names.index(chosen)
    return tuple(
        Candidate(
            terms.names[k],
            bool(terms.feasible[k]),
            short(float(terms.cost[k])),
            {name: short(float(values[k])) for name, values in terms.parts.items()},
        )
        for k in shown
    )


def short(value: float) -> float:
    """Six significant digits: what a page can show."""
    return float(f"{value:.6g}")
