"""`kvroute simulate --scenario FILE`: what happens to links in a run, how KV crosses them, what is offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from kvroute.cachepool import CopySpec, HotspotSpec
from kvroute.gateway.offload_settings import OffloadSection
from kvroute.policies.offload import OffloadSpec
from kvroute.policies.threshold import Rule
from kvroute.sim.capacity import links_named
from kvroute.sim.settings import CapacityChange, Fluctuation, SimSettings, TransferMode, WanTransport
from kvroute.topology import Cluster
from kvroute.topology.document import read_mapping
from kvroute.topology.form import Lines
from kvroute.topology.schema import Entry
from kvroute.topology.units import Duration, Size
from kvroute.types import InputError, InputErrors

_BEGIN = "begin with `changes:`, `wan:`, `transfer:` or `offload:`"
Share = Annotated[float, Meta(ge=0, le=1)]
_WAN, _COPIES = WanTransport(), CopySpec()


class ChangeEntry(Entry, frozen=True, kw_only=True):
    """From a time on a link has this share of its capacity; 0 is a cut."""

    at_s: Duration = field(name="at")
    link: str
    share: Share


class FluctuationEntry(Entry, frozen=True, kw_only=True):
    """A link's capacity moves at random."""

    link: str
    every_s: Duration = field(name="every")
    share_min: Share
    share_max: Share = 1.0


class WanEntry(Entry, frozen=True, kw_only=True):
    """How a transfer between datacenters is carried."""

    connections: Annotated[int, Meta(ge=1, le=1024)] = _WAN.connections
    window_bytes: Size = field(name="window", default=Size(_WAN.window_bytes))
    loss: Share = _WAN.loss
    mss_bytes: Size = field(name="mss", default=Size(_WAN.mss_bytes))


class CopiesEntry(Entry, frozen=True, kw_only=True):
    """When hot prefixes are copied ahead of demand."""

    review_s: Duration = field(name="review", default=Duration(_COPIES.review_s))
    across: bool = _COPIES.across
    abundant_below: Share = _COPIES.abundant_below
    budget_s: Duration = field(name="budget", default=Duration(_COPIES.budget_s))
    window_reads: Annotated[int, Meta(ge=1)] = _COPIES.hotspots.window_reads
    factor: Annotated[float, Meta(gt=1, le=1e6)] = _COPIES.hotspots.factor
    reads_min: Annotated[int, Meta(ge=1)] = _COPIES.hotspots.reads_min

    def spec(self) -> CopySpec:
        """The same as the core takes it. Raises InputError for a time of zero."""
        return CopySpec(
            review_s=float(self.review_s),
            across=self.across,
            abundant_below=self.abundant_below,
            budget_s=float(self.budget_s),
            hotspots=HotspotSpec(window_reads=self.window_reads, factor=self.factor, reads_min=self.reads_min),
        )


class Scenario(Entry, frozen=True, kw_only=True):
    """The whole file; an empty one changes nothing."""

    transfer: TransferMode = "serial"
    wan: WanEntry | None = None
    changes: list[ChangeEntry] = field(default_factory=list)
    fluctuations: list[FluctuationEntry] = field(default_factory=list)
    stall_s: Duration | None = field(name="stall", default=None)
    convert_s: Duration = field(name="convert", default=Duration(30.0))
    review_s: Duration | None = field(name="review", default=None)
    offload: OffloadSection | None = None
    """As `gateway.offload` in a cluster file; here `rule` may also be `auto` or `abundant`."""
    conversions: bool = False
    """Whether a review may turn prefill instances into decode instances, or back."""
    prefix_pool: bool = False
    """Whether prefill instances fetch cached prefixes from others of their datacenter."""
    copies: CopiesEntry | None = None

    def settings(self, settings: SimSettings) -> SimSettings:
        """A run's assumptions with these. Raises InputError for values that do not go together."""
        wan = self.wan
        return msgspec.structs.replace(
            settings,
            transfer=self.transfer,
            wan=None
            if wan is None
            else WanTransport(
                connections=wan.connections,
                window_bytes=float(wan.window_bytes),
                loss=wan.loss,
                mss_bytes=float(wan.mss_bytes),
            ),
            changes=tuple(
                CapacityChange(at_s=float(change.at_s), link=change.link, share=change.share) for change in self.changes
            ),
            fluctuations=tuple(
                Fluctuation(
                    link=each.link, every_s=float(each.every_s), share_min=each.share_min, share_max=each.share_max
                )
                for each in self.fluctuations
            ),
            stall_s=None if self.stall_s is None else float(self.stall_s),
            convert_s=float(self.convert_s),
            review_s=self._review_s(),
        )

    def _review_s(self) -> float | None:
        """Thresholds that are searched, and hotspots, need somebody to ask."""
        if self.review_s is not None:
            return float(self.review_s)
        looks_s = [] if self.offload is None else [float(self.offload.look_s)]
        looks_s += [] if self.copies is None else [float(self.copies.review_s)]
        return min(looks_s, default=None)

    def copy_spec(self) -> CopySpec | None:
        """What is copied ahead of demand. Raises InputError for values that cannot be."""
        return None if self.copies is None else self.copies.spec()

    def offload_spec(self) -> OffloadSpec | None:
        """The offload policy. Raises InputError for values that do not go together."""
        if self.offload is None:
            return None
        live: Rule = "scarce"  # what a live engine cannot do is refused there; a simulated one can
        spec = msgspec.structs.replace(self.offload, rule=live, layerwise=False).spec()
        long_term = msgspec.structs.replace(spec.long_term, conversions=self.conversions)
        layerwise = self.transfer == "layerwise"
        return msgspec.structs.replace(spec, rule=self.offload.rule, layerwise=layerwise, long_term=long_term)


def read_scenario(path: Path, cluster: Cluster | None = None) -> Scenario:
    """Read a scenario file; with a cluster, its links are looked up there.

    Raises:
        InputError: it cannot be read; InputErrors: every fault of form, or every unknown link, with its line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InputError(f"cannot be read ({why})", where=str(path), mend="give a YAML file") from None
    scenario, lines = read_mapping(text, str(path), Scenario, _BEGIN)
    try:
        scenario.copy_spec()
        scenario.offload_spec()
        scenario.settings(SimSettings())
    except InputError as error:
        raise InputError(error.what, where=f"{path}: {error.where}".removesuffix(": "), mend=error.mend) from None
    if cluster is not None:
        _check_links(scenario, lines, cluster)
    return scenario


def _check_links(scenario: Scenario, lines: Lines, cluster: Cluster) -> None:
    faults: list[InputError] = []
    changed = {("changes", number, "link"): each.link for number, each in enumerate(scenario.changes)}
    fluctuating = {("fluctuations", number, "link"): each.link for number, each in enumerate(scenario.fluctuations)}
    for key, link in (changed | fluctuating).items():
        try:
            links_named(cluster, link)
        except InputError as error:
            faults.append(lines.error(error.what, key, error.mend))
    if not faults:
        faults += _endless_cuts(scenario, lines, cluster)
    if faults:
        raise InputErrors(faults)


def _endless_cuts(scenario: Scenario, lines: Lines, cluster: Cluster) -> Iterator[InputError]:
    """Cuts that no later change ends: a run with one never ends."""
    last: dict[int, int] = {}
    for number in sorted(range(len(scenario.changes)), key=lambda number: scenario.changes[number].at_s):
        last.update(dict.fromkeys(links_named(cluster, scenario.changes[number].link).tolist(), number))
    for number in sorted(set(last.values())):
        change = scenario.changes[number]
        if change.share == 0:
            what = f"{change.link!r} is cut for good, and a transfer that needs it never ends"
            mend = f"add a change of {change.link!r} after it, with a share above 0"
            yield lines.error(what, ("changes", number, "share"), mend)
