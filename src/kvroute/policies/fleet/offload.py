"""Chooses the datacenter that prefills a request: threshold routing of PrfaaS 3.4.3, for scarce and abundant bandwidth.

It chooses only the site. Other policies choose the prefill instance within it and the decode instance at home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np

from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.policies.fleet.short_term import Rule, ShortTerm, check_band
from kvroute.types import BoolArray, FloatArray, InputError, IntArray, Offload, Terms

HOME = 0
"""Position of the home among the sites: the datacenter where the request is decoded."""

Reason = Literal["short", "long", "home_down", "away_down", "not_worth_it", "no_instance_up"]
"""Reason for the choice of a site. `short`, `long`: the tokens not cached are at most, or above, the threshold.
`home_down`, `away_down`: no prefill instance is up at home, or at any other site. `not_worth_it`: the transfer would
take far longer than staying. `no_instance_up`: no prefill instance is up at any site."""


class OffloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When a prefill leaves its home. Sites are datacenters: one with decode instances is a home (a PD cluster), one
    with only prefill instances is a PrfaaS site."""

    threshold_tokens: float | None = None
    """Base of the routing threshold; None: searched from the observed traffic."""
    rule: Rule = "auto"
    """Whether bandwidth counts as scarce; `auto`: decided by the utilisation of each link."""
    scarce_above: float = 0.7
    """Utilisation above which a link's bandwidth becomes scarce."""
    abundant_below: float = 0.5
    """Utilisation at or below which it becomes abundant again."""
    layerwise: bool = True
    """Whether KV is sent layer by layer while the prefill runs. The estimated finish then uses the longer of prefill
    and transfer, otherwise their sum."""
    stay_factor: float | None = None
    """A site is skipped if its transfer would take more than this multiple of the whole prefill at home (queue
    included). None: no site is skipped, as in the publication."""
    copy_min_tokens: int = 1
    """A cached prefix is copied to another site if it is longer than that site's own by at least this many tokens."""
    copy_queues: bool = False
    """Whether the instance that holds a prefix serves it like a prompt, as live engines do: its queue and the base time
    of a prefill come before the bytes. False: the bytes leave at once, as in the publication."""
    short_term: ShortTerm = ShortTerm()
    long_term: LongTerm = LongTerm()

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            hint = f"known: {', '.join(get_args(Rule))}"
            raise InputError(f"unknown rule {self.rule!r}", where="offload.rule", hint=hint)
        check_band("offload, scarce_above and abundant_below", self.abundant_below, self.scarce_above, 1.0)
        if self.stay_factor is not None and not 0.0 < self.stay_factor < math.inf:
            raise InputError(
                f"{self.stay_factor} is not a positive factor", where="offload.stay_factor", hint="try 3 or remove it"
            )
        if self.copy_min_tokens < 1:
            what = f"{self.copy_min_tokens} tokens are too few for a copy"
            raise InputError(what, where="offload.copy_min_tokens", hint="give 1 or more")
        tokens, bounds = self.threshold_tokens, self.short_term
        if tokens is not None and not bounds.threshold_min_tokens <= tokens <= bounds.threshold_max_tokens:
            what = f"{tokens} is outside [{bounds.threshold_min_tokens:g}, {bounds.threshold_max_tokens:g}]"
            hint = "change it, or the bounds in offload.short_term"
            raise InputError(what, where="offload.threshold_tokens", hint=hint)


@dataclass(frozen=True, slots=True)
class SiteCandidates:
    """The datacenters that could prefill one request, as arrays of length n: the home first, then PrfaaS sites
    ascending by name; a lower index wins a tie. All numbers are finite, also those of sites that are down.

    `warm_prefill_s` and `copy_s` refer to a copy of the prefix that `longest` returns. They are ignored if that prefix
    is no longer than the site's own.
    """

    names: tuple[str, ...]
    up: BoolArray
    """Whether a prefill instance is up there and the link to the home works."""
    scarce: BoolArray
    """Whether bandwidth of the link to the home is scarce; the home's own entry is ignored."""
    threshold_tokens: FloatArray
    """Threshold of each PrfaaS site; the home's own entry is ignored."""
    utilisation: FloatArray
    """Utilisation of each site's egress, for the record only; it determined the two fields above."""
    cached_tokens: IntArray
    """Longest cached prefix of the request on any one instance there (l_prfaas, l_pd)."""
    queue_s: FloatArray
    """Prefill work ahead of the request, in seconds."""
    prefill_s: FloatArray
    """Time to compute the request with the site's own cached prefix."""
    warm_prefill_s: FloatArray
    """Time to compute it with the longest available prefix."""
    transfer_s: FloatArray
    """Time to transfer to the home the KV that the home has not cached; 0 for the home."""
    copy_s: FloatArray
    """Time to copy the longest available prefix there."""


@dataclass(frozen=True, slots=True)
class SiteChoice:
    """The chosen site (index into `SiteCandidates`) and the reasons."""

    index: int
    reason: Reason
    decisive: int
    """The site whose link decided the choice: the chosen one, else the one that was closest to being chosen; the home
    if there is no other."""
    scarce: bool
    """Whether the rule for scarce bandwidth was applied on that link."""
    incremental_tokens: int
    """Tokens to compute at home with the longest available prefix; compared with the threshold."""
    threshold_tokens: float
    """Threshold of the decisive site; 0 if there is no site but the home."""
    cached_tokens: int
    """Tokens of the prefix that are cached when the prefill starts, a copy included."""
    copy_from: int | None
    """Site whose longer cached prefix is copied to the chosen one; None: no copy."""
    copied_tokens: int
    """Tokens that are copied: the part of the prefix that the chosen site lacks."""
    terms: Terms
    """Terms of every site; the cost is its estimated finish, in seconds."""

    def offload(self) -> Offload:
        """The record for log and `explain`: figures of the request, then of each site as `site.figure`, no zeros."""
        figures = {
            "incremental_tokens": float(self.incremental_tokens),
            "threshold_tokens": self.threshold_tokens,
            "scarce": float(self.scarce),
            "copied_tokens": float(self.copied_tokens),
        }
        columns = {"finish_s": self.terms.cost, **self.terms.parts}
        for index, name in enumerate(self.terms.names):
            of_site = {f"{name}.{part}": float(column[index]) for part, column in columns.items()}
            figures |= {key: value for key, value in of_site.items() if value}
        return Offload(self.terms.names[self.index], self.reason, figures)


def longest(up: BoolArray, scarce: BoolArray, cached_tokens: IntArray) -> tuple[int, int]:
    """The site with the longest available prefix, and its tokens: the home, or a site with bandwidth to spare (l_prefix
    of PrfaaS 3.4.3; l_pd with a single link that is scarce). Arrays as in `SiteCandidates`."""
    reach = _at_hand(up, scarce)
    held = np.where(reach, cached_tokens, 0)
    holder = int(held.argmax())
    return holder, int(held[holder])


def choose_site(spec: OffloadSpec, total_tokens: int, sites: SiteCandidates) -> SiteChoice:
    """Choose the home if the tokens not cached are at most the threshold, else the PrfaaS site that finishes first.

    PrfaaS 3.4.3. Scarce: a request with l_total - l_pd <= t stays, and each site uses its own cache. Abundant: a
    request with l_total - l_prefix <= t stays, and the longest prefix is copied to the site of the prefill if it is
    elsewhere. With several PrfaaS sites, each has its own threshold and bandwidth; only those with bandwidth to spare
    exchange prefixes.
    """
    holder, prefix_tokens = longest(sites.up, sites.scarce, sites.cached_tokens)
    incremental_tokens = max(total_tokens - prefix_tokens, 0)
    lacking = prefix_tokens - sites.cached_tokens
    copies = _at_hand(sites.up, sites.scarce) & (lacking >= spec.copy_min_tokens)
    terms = _terms(spec, sites, copies)
    above = incremental_tokens > sites.threshold_tokens
    index, reason = _chosen(spec, sites, terms, above)
    decisive = index if index != HOME else _nearest(sites)
    own_tokens = int(sites.cached_tokens[index])
    copied = bool(copies[index])
    return SiteChoice(
        index=index,
        reason=reason,
        decisive=decisive,
        scarce=decisive == HOME or bool(sites.scarce[decisive]),
        incremental_tokens=incremental_tokens,
        threshold_tokens=float(sites.threshold_tokens[decisive]) if decisive != HOME else 0.0,
        cached_tokens=prefix_tokens if copied else own_tokens,
        copy_from=holder if copied else None,
        copied_tokens=prefix_tokens - own_tokens if copied else 0,
        terms=terms,
    )


def _at_hand(up: BoolArray, scarce: BoolArray) -> BoolArray:
    """Sites that exchange prefixes: the home, and the sites with bandwidth to spare."""
    reach: BoolArray = up & ~scarce
    reach[HOME] = up[HOME]
    return reach


def _terms(spec: OffloadSpec, sites: SiteCandidates, copies: BoolArray) -> Terms:
    """Estimated finish of each site: the queue, during which a copy arrives, then prefill and transfer."""
    start_s = np.where(copies, np.maximum(sites.queue_s, sites.copy_s), sites.queue_s)
    prefill_s = np.where(copies, sites.warm_prefill_s, sites.prefill_s)
    serve_s = np.maximum(prefill_s, sites.transfer_s) if spec.layerwise else prefill_s + sites.transfer_s
    parts = {
        "queue_s": sites.queue_s,
        "copy_s": np.where(copies, sites.copy_s, 0.0),
        "prefill_s": prefill_s,
        "transfer_s": sites.transfer_s,
        "cached_tokens": sites.cached_tokens.astype(np.float64),
        "utilisation": sites.utilisation,
    }
    return Terms(sites.names, start_s + serve_s, sites.up, parts)


def _chosen(spec: OffloadSpec, sites: SiteCandidates, terms: Terms, above: BoolArray) -> tuple[int, Reason]:
    away = sites.up.copy()
    away[HOME] = False
    if not away.any():
        return HOME, "away_down" if sites.up[HOME] else "no_instance_up"
    if not sites.up[HOME]:
        return _earliest(terms, away), "home_down"
    if not (away & above).any():
        return HOME, "short"
    eligible = away & above
    if spec.stay_factor is not None:
        eligible &= terms.parts["transfer_s"] <= spec.stay_factor * terms.cost[HOME]
        if not eligible.any():
            return HOME, "not_worth_it"
    return _earliest(terms, eligible), "long"


def _earliest(terms: Terms, eligible: BoolArray) -> int:
    return int(np.where(eligible, terms.cost, np.inf).argmin())


def _nearest(sites: SiteCandidates) -> int:
    """The PrfaaS site with the lowest threshold, sites that are up first; the home if there is none."""
    if len(sites.names) == 1:
        return HOME
    return min(range(1, len(sites.names)), key=lambda index: (not sites.up[index], sites.threshold_tokens[index]))
