"""Which datacenter prefills a request: the threshold routing of PrfaaS 3.4.3, scarce and abundant bandwidth apart.

It chooses a site; the instance within it, and the decode instance at home, are the other policies' business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np

from kvroute.policies.allocation import LongTerm
from kvroute.policies.threshold import Rule, Scarcity, ShortTerm, Threshold, check_band
from kvroute.types import BoolArray, FloatArray, InputError, IntArray, Offload, Terms

HOME = 0
"""Position of the home among the sites: the datacenter where the request is decoded."""

Reason = Literal["short", "long", "home_down", "away_down", "not_worth_it", "nobody_up"]
"""Why a site was chosen: what is not cached is at most the threshold (`short`) or above it (`long`); the home has
nobody up who prefills, or no other site has; the transfer would take far longer than to stay; nobody is up at all."""


class OffloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When a prefill leaves its home. Sites are datacenters: one with decode instances is a home (a PD cluster), one
    with prefill instances alone is a PrfaaS site."""

    threshold_tokens: float | None = None
    """Base of the routing threshold; None: searched from the observed traffic."""
    rule: Rule = "auto"
    """Whether bandwidth counts as scarce; `auto`: by the utilisation of each link."""
    scarce_above: float = 0.7
    """Utilisation above which a link's bandwidth becomes scarce."""
    abundant_below: float = 0.5
    """Utilisation up to which it becomes abundant again."""
    layerwise: bool = True
    """KV leaves layer by layer while the prefill goes on: an estimated finish takes the longer of prefill and transfer,
    else their sum."""
    stay_factor: float | None = None
    """A site whose transfer would take more than so many times the whole prefill at home (its queue included) is
    passed by. None: never, as in the publication."""
    copy_min_tokens: int = 1
    """Cached prefixes cross to another site where they are longer than its own by so many tokens or more."""
    copy_asks: bool = False
    """Who has a prefix is asked for it as for a prompt, as live engines are: its queue and the base of a prefill come
    before the bytes. False: bytes leave at once, as in the publication."""
    short_term: ShortTerm = ShortTerm()
    long_term: LongTerm = LongTerm()

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            mend = f"known: {', '.join(get_args(Rule))}"
            raise InputError(f"unknown rule {self.rule!r}", where="offload.rule", mend=mend)
        check_band("offload, scarce_above and abundant_below", self.abundant_below, self.scarce_above, 1.0)
        if self.stay_factor is not None and not 0.0 < self.stay_factor < math.inf:
            raise InputError(f"{self.stay_factor} is no factor", where="offload.stay_factor", mend="try 3, or leave it")
        if self.copy_min_tokens < 1:
            what = f"{self.copy_min_tokens} tokens are no copy"
            raise InputError(what, where="offload.copy_min_tokens", mend="give 1 or more")
        tokens, bounds = self.threshold_tokens, self.short_term
        if tokens is not None and not bounds.threshold_min_tokens <= tokens <= bounds.threshold_max_tokens:
            what = f"{tokens} is outside [{bounds.threshold_min_tokens:g}, {bounds.threshold_max_tokens:g}]"
            mend = "change it, or the bounds in offload.short_term"
            raise InputError(what, where="offload.threshold_tokens", mend=mend)

    def threshold(self) -> Threshold:
        """A fresh threshold for one PrfaaS site. Where none is given it starts at the upper bound, so that nothing
        leaves before a search has seen `start_requests` of the traffic."""
        given = self.threshold_tokens
        return Threshold(self.short_term, self.short_term.threshold_max_tokens if given is None else given)

    def scarcity(self) -> Scarcity:
        """A fresh view of one PrfaaS site's bandwidth."""
        return Scarcity(self.rule, self.scarce_above, self.abundant_below)


@dataclass(frozen=True, slots=True)
class SiteCandidates:
    """The datacenters that could prefill one request, as arrays of length n: the home first, then PrfaaS sites
    ascending by name; a lower index wins a tie. All numbers are finite, also of sites that are down.

    `warm_prefill_s` and `copy_s` tell of a copy of the prefix that `longest` names; nobody reads them where that
    prefix is no longer than the site's own.
    """

    names: tuple[str, ...]
    up: BoolArray
    """A prefill instance is up there, and the link to the home carries something."""
    scarce: BoolArray
    """Bandwidth of the link to the home is scarce (`Scarcity`); the home's own entry is not read."""
    threshold_tokens: FloatArray
    """Of each PrfaaS site (`Threshold`); the home's own entry is not read."""
    utilisation: FloatArray
    """Of each site's egress, for the record: it has moved the two fields above."""
    cached_tokens: IntArray
    """Longest cached prefix of the request on any one instance there (l_prfaas, l_pd)."""
    queue_s: FloatArray
    """Prefill work ahead of the request."""
    prefill_s: FloatArray
    """Time to compute the request with the site's own cached prefix."""
    warm_prefill_s: FloatArray
    """The same with the longest prefix at hand."""
    transfer_s: FloatArray
    """Time to bring home what it has not cached itself; 0 for the home."""
    copy_s: FloatArray
    """Time to bring the longest prefix there."""


@dataclass(frozen=True, slots=True)
class SiteChoice:
    """A chosen site (index into `SiteCandidates`) and what led there."""

    index: int
    reason: Reason
    decisive: int
    """The site on whose link the decision hung: the chosen one, or the one that was next to be chosen; the home where
    there is no other."""
    scarce: bool
    """Which of the two rules held on that link."""
    incremental_tokens: int
    """What would have to be computed at home with the longest prefix at hand: this is compared with the threshold."""
    threshold_tokens: float
    """Of the decisive site; 0 where there is no site but the home."""
    cached_tokens: int
    """Prefix that is there when the prefill starts, a copy included."""
    copy_from: int | None
    """Site whose longer cached prefix is copied to the chosen one; None: nothing is."""
    copied_tokens: int
    """What of it crosses: the part that the chosen site lacks."""
    terms: Terms
    """Of every site; the cost is its estimated finish, seconds."""

    def offload(self) -> Offload:
        """The record for log and `explain`: figures of the request, then of each site as `site.figure`, zeros left
        out."""
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
    """Where the longest prefix at hand is, and its tokens: at home, or at a site with bandwidth to spare (the
    l_prefix of PrfaaS 3.4.3; with one link that is scarce, l_pd). Arrays as in `SiteCandidates`."""
    reach = _at_hand(up, scarce)
    held = np.where(reach, cached_tokens, 0)
    holder = int(held.argmax())
    return holder, int(held[holder])


def choose_site(spec: OffloadSpec, total_tokens: int, sites: SiteCandidates) -> SiteChoice:
    """The home if what is not cached is at most the threshold, else the PrfaaS site with the earliest finish.

    PrfaaS 3.4.3. Scarce: l_total - l_pd <= t stays, and each site uses its own cache. Abundant: l_total - l_prefix <= t
    stays, and the longer cache is copied to where the prefill is, if it is elsewhere. With several PrfaaS sites each
    has its own threshold and its own bandwidth: prefixes are exchanged with those that have some to spare.
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
    """Sites that exchange prefixes: the home, and those with bandwidth to spare."""
    reach: BoolArray = up & ~scarce
    reach[HOME] = up[HOME]
    return reach


def _terms(spec: OffloadSpec, sites: SiteCandidates, copies: BoolArray) -> Terms:
    """When each site would be done: the queue, during which a copy arrives, then prefill and transfer."""
    start_s = np.where(copies, np.maximum(sites.queue_s, sites.copy_s), sites.queue_s)
    prefill_s = np.where(copies, sites.warm_prefill_s, sites.prefill_s)
    way_s = np.maximum(prefill_s, sites.transfer_s) if spec.layerwise else prefill_s + sites.transfer_s
    parts = {
        "queue_s": sites.queue_s,
        "copy_s": np.where(copies, sites.copy_s, 0.0),
        "prefill_s": prefill_s,
        "transfer_s": sites.transfer_s,
        "cached_tokens": sites.cached_tokens.astype(np.float64),
        "utilisation": sites.utilisation,
    }
    return Terms(sites.names, start_s + way_s, sites.up, parts)


def _chosen(spec: OffloadSpec, sites: SiteCandidates, terms: Terms, above: BoolArray) -> tuple[int, Reason]:
    away = sites.up.copy()
    away[HOME] = False
    if not away.any():
        return HOME, "away_down" if sites.up[HOME] else "nobody_up"
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
    """The PrfaaS site with the lowest threshold, those that are up before others; the home where there is none."""
    if len(sites.names) == 1:
        return HOME
    return min(range(1, len(sites.names)), key=lambda index: (not sites.up[index], sites.threshold_tokens[index]))
