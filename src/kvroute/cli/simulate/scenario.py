"""`kvroute simulate --scenario FILE`: link changes, transport of KV between datacenters, and offloading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from kvroute.control import ControlSpec
from kvroute.control.state.hotspots import CopySpec, HotspotSpec
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.short_term import Rule
from kvroute.serve.config.offload import OffloadSection
from kvroute.sim.network.capacity import links_named
from kvroute.sim.settings import CapacityChange, Fluctuation, SimSpec, TransferMode, WanTransport
from kvroute.topology import Cluster
from kvroute.topology.schema import Entry
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.document import read_mapping
from kvroute_engine.files.form import Lines
from kvroute_engine.files.units import Duration, Size

_BEGIN = "begin with `changes:`, `wan:`, `transfer:` or `offload:`"
Share = Annotated[float, Meta(ge=0, le=1)]
_WAN, _COPIES = WanTransport(), CopySpec()


class ChangeEntry(Entry, frozen=True, kw_only=True):
    """A change of a link's capacity to this share at a time; 0 is a cut."""

    at_s: Duration = field(name="at")
    link: str
    share: Share


class FluctuationEntry(Entry, frozen=True, kw_only=True):
    """Random fluctuation of a link's capacity."""

    link: str
    every_s: Duration = field(name="every")
    share_min: Share
    share_max: Share = 1.0


class WanEntry(Entry, frozen=True, kw_only=True):
    """Transport of transfers between datacenters."""

    connections: Annotated[int, Meta(ge=1, le=1024)] = _WAN.connections
    window_bytes: Size = field(name="window", default=Size(_WAN.window_bytes))
    loss: Share = _WAN.loss
    mss_bytes: Size = field(name="mss", default=Size(_WAN.mss_bytes))


class CopiesEntry(Entry, frozen=True, kw_only=True):
    """Conditions for copying hot prefixes ahead of demand."""

    review_s: Duration = field(name="review", default=Duration(_COPIES.review_s))
    across: bool = _COPIES.across
    abundant_below: Share = _COPIES.abundant_below
    budget_s: Duration = field(name="budget", default=Duration(_COPIES.budget_s))
    window_reads: Annotated[int, Meta(ge=1)] = _COPIES.hotspots.window_reads
    factor: Annotated[float, Meta(gt=1, le=1e6)] = _COPIES.hotspots.factor
    reads_min: Annotated[int, Meta(ge=1)] = _COPIES.hotspots.reads_min

    def spec(self) -> CopySpec:
        """Convert to the core's specification. Raises InputError for a time of zero."""
        return CopySpec(
            review_s=float(self.review_s),
            across=self.across,
            abundant_below=self.abundant_below,
            budget_s=float(self.budget_s),
            hotspots=HotspotSpec(window_reads=self.window_reads, factor=self.factor, reads_min=self.reads_min),
        )


class Scenario(Entry, frozen=True, kw_only=True):
    """The complete file; an empty one changes nothing."""

    transfer: TransferMode | None = None
    """None: as the cluster file's `gateway` section says."""
    wan: WanEntry | None = None
    changes: list[ChangeEntry] = field(default_factory=list)
    fluctuations: list[FluctuationEntry] = field(default_factory=list)
    stall_s: Duration | None = field(name="stall", default=None)
    role_switch_s: Duration = field(name="role_switch_time", default=Duration(30.0))
    review_s: Duration | None = field(name="review", default=None)
    offload: OffloadSection | Literal["none"] | None = None
    """In place of the cluster file's `gateway.offload`; `rule` may also be `auto` or `abundant`, and `none` offloads
    nothing. None: as the file says."""
    role_switches: bool = False
    """True if a review may switch prefill instances to decode, or decode instances to prefill."""
    prefix_pool: bool = False
    """True if prefill instances fetch cached prefixes from other instances in their datacenter."""
    copies: CopiesEntry | None = None

    def settings(self, settings: SimSpec) -> SimSpec:
        """Apply the scenario to a run's settings. Raises InputError for values that do not fit together."""
        wan = self.wan
        return msgspec.structs.replace(
            settings,
            transfer=self.transfer or settings.transfer,
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
                    link=fluctuation.link,
                    every_s=float(fluctuation.every_s),
                    share_min=fluctuation.share_min,
                    share_max=fluctuation.share_max,
                )
                for fluctuation in self.fluctuations
            ),
            stall_s=None if self.stall_s is None else float(self.stall_s),
            role_switch_s=float(self.role_switch_s),
            review_s=self._review_s(settings.review_s),
        )

    def _review_s(self, of_file_s: float | None) -> float | None:
        """Return the review interval; a threshold search and hotspot copies need regular reviews. Args: `of_file_s`:
        that of the cluster file."""
        if self.review_s is not None:
            return float(self.review_s)
        if self.offload is not None:
            of_file_s = float(self.offload.check_interval_s) if isinstance(self.offload, OffloadSection) else None
        intervals_s = [] if of_file_s is None else [of_file_s]
        intervals_s += [] if self.copies is None else [float(self.copies.review_s)]
        return min(intervals_s, default=None)

    def control(self, spec: ControlSpec) -> ControlSpec:
        """Apply the scenario to the core's configuration. Raises InputError for values that do not fit together."""
        offload = spec.offload if self.offload is None else self.offload_spec()
        if self.offload is None and offload is not None and self.role_switches:
            long_term = msgspec.structs.replace(offload.long_term, role_switches=True)
            offload = msgspec.structs.replace(offload, long_term=long_term)
        return msgspec.structs.replace(spec, offload=offload, prefix_pool=self.prefix_pool, copies=self.copy_spec())

    def copy_spec(self) -> CopySpec | None:
        """Return the specification of copies ahead of demand. Raises InputError for invalid values."""
        return None if self.copies is None else self.copies.spec()

    def offload_spec(self) -> OffloadSpec | None:
        """Return the scenario's own offload policy. Raises InputError for values that do not fit together."""
        if not isinstance(self.offload, OffloadSection):
            return None
        live: Rule = "scarce"  # spec() rejects what live engines lack; simulated ones have it
        spec = msgspec.structs.replace(self.offload, rule=live, layerwise=False).spec()
        long_term = msgspec.structs.replace(spec.long_term, role_switches=self.role_switches)
        layerwise = self.transfer == "layerwise"
        return msgspec.structs.replace(spec, rule=self.offload.rule, layerwise=layerwise, long_term=long_term)


def read_scenario(path: Path, cluster: Cluster | None = None) -> Scenario:
    """Read a scenario file; with a cluster, check that its links exist there.

    Raises:
        InputError: the file cannot be read.
        InputErrors: all syntax errors, or all unknown links, each with line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot be read ({why})", where=str(path), hint="give a YAML file") from None
    scenario, lines = read_mapping(text, str(path), Scenario, _BEGIN)
    try:
        scenario.copy_spec()
        scenario.offload_spec()
        scenario.settings(SimSpec())
    except InputError as error:
        raise InputError(error.what, where=f"{path}: {error.where}".removesuffix(": "), hint=error.hint) from None
    if cluster is not None:
        _check_links(scenario, lines, cluster)
    return scenario


def _check_links(scenario: Scenario, lines: Lines, cluster: Cluster) -> None:
    faults: list[InputError] = []
    changed = {("changes", number, "link"): change.link for number, change in enumerate(scenario.changes)}
    fluctuating = {
        ("fluctuations", number, "link"): fluctuation.link for number, fluctuation in enumerate(scenario.fluctuations)
    }
    for key, link in (changed | fluctuating).items():
        try:
            links_named(cluster, link)
        except InputError as error:
            faults.append(lines.error(error.what, key, error.hint))
    if not faults:
        faults += _endless_cuts(scenario, lines, cluster)
    if faults:
        raise InputErrors(faults)


def _endless_cuts(scenario: Scenario, lines: Lines, cluster: Cluster) -> Iterator[InputError]:
    """Return errors for cuts that no later change ends: a run with such a cut never ends."""
    last: dict[int, int] = {}
    for number in sorted(range(len(scenario.changes)), key=lambda number: scenario.changes[number].at_s):
        last.update(dict.fromkeys(links_named(cluster, scenario.changes[number].link).tolist(), number))
    for number in sorted(set(last.values())):
        change = scenario.changes[number]
        if change.share == 0:
            what = f"{change.link!r} is cut permanently, so a transfer that uses it never ends"
            hint = f"add a change of {change.link!r} after it, with a share above 0"
            yield lines.error(what, ("changes", number, "share"), hint)
