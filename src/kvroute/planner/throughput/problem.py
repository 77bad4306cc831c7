"""The interpreted plan file: curves instead of tables, instances instead of GPUs. It rejects plans that cannot be
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from kvroute.llm import model
from kvroute.planner.throughput.lengths import Lengths
from kvroute.planner.throughput.schema import (
    ClusterEntry,
    Form,
    HardwareEntry,
    MeasuredPrefill,
    ModelKv,
    PlanFile,
    ProfiledPrefill,
)
from kvroute.planner.throughput.traffic_lengths import traffic_lengths
from kvroute.policies.fleet.throughput import Curve, Reading, decode_per_s, kv_curve, prefill_curve
from kvroute.timing import Fit, fit_prefill, fit_profile, prefill_time, read_profile
from kvroute.topology.schema import DecodeEntry, TimingEntry
from kvroute.types import InputError, PiecewisePrefill, PrefillSpec, QuadraticPrefill
from kvroute_engine.files.document import read_mapping_file
from kvroute_engine.files.form import Key, Lines, nearest

T = TypeVar("T")
_BEGINS = "begin with `name: my-plan`, `traffic:`, `kv:`, `hardware:` and `clusters:`"
_READINGS: dict[Reading, str] = {
    "representative": "each stage uses the prefill time of its mean prompt length, T(E[L]), as in the paper "
    "(`reading: representative`; `reading: exact` uses the mean prefill time of its prompts)",
    "exact": "each stage uses the mean prefill time of its prompts, E[T(L)] (`reading: exact`; the paper's "
    "`reading: representative` uses the prefill time of the mean prompt length)",
}
_NO_DECODE = DecodeEntry(base_s=1.0)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One instance on one kind of GPU."""

    name: str
    prefill_s: Curve
    decode_per_s: float
    """Requests per second of a decode instance; 0 if it cannot decode."""
    gpu_price: float
    """Price per GPU and hour."""


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster in the planner's model: identical instances behind one egress."""

    name: str
    hardware: Hardware
    instances: int
    gpus: int
    egress_bytes_per_s: float = 0.0
    """Egress of a PrfaaS cluster; 0 for a PD cluster, which sends no KV cache."""

    @property
    def price(self) -> float:
        """Price of all GPUs per hour."""
        return self.gpus * self.hardware.gpu_price


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of a search: traffic, model and hardware. The search finds the threshold and the split."""

    name: str
    lengths: Lengths
    kv_bytes: Curve
    prfaas: tuple[Site, ...]
    pd: tuple[Site, ...]
    homogeneous: Site
    gpus_per_instance: int
    reading: Reading
    choices: tuple[str, ...]
    """Choices made where the paper leaves one open, and caveats, as sentences."""


def read_problem(path: Path) -> Problem:
    """Read and check a plan file.

    Raises:
        InputError: the file cannot be read, or a value in it is wrong or out of range; gives file and line.
    """
    file, lines = read_mapping_file(path, PlanFile, _BEGINS)
    return _Reader(file, lines, path.parent).problem()


@dataclass(slots=True)
class _Reader:
    file: PlanFile
    lines: Lines
    folder: Path
    choices: list[str] = field(default_factory=list)

    def problem(self) -> Problem:
        lengths = self._lengths()
        kv_bytes = self._kv()
        hardware = {name: self._hardware(name, entry, lengths) for name, entry in self.file.hardware.items()}
        sites = [self._site(number, entry, hardware) for number, entry in enumerate(self.file.clusters)]
        self._check_names()
        of_role = {
            role: tuple(site for site, entry in zip(sites, self.file.clusters, strict=True) if entry.role == role)
            for role in ("prefill", "pd")
        }
        for role, what in (("prefill", "no cluster prefills for other clusters"), ("pd", "no cluster decodes")):
            if not of_role[role]:
                raise self.lines.error(what, ("clusters",), f"add one with `role: {role}`")
        self.choices.append(_READINGS[self.file.reading])
        return Problem(
            name=self.file.name,
            lengths=lengths,
            kv_bytes=kv_bytes,
            prfaas=of_role["prefill"],
            pd=of_role["pd"],
            homogeneous=self._homogeneous(sites, of_role["pd"][0], hardware),
            gpus_per_instance=self.file.gpus_per_instance,
            reading=self.file.reading,
            choices=tuple(self.choices),
        )

    def _lengths(self) -> Lengths:
        traffic = self.file.traffic
        lengths, remarks = self._placed(
            ("traffic", "lengths"), lambda: traffic_lengths(traffic.lengths, traffic.step_tokens, self.folder)
        )
        self.choices += remarks
        self.choices.append(f"prompt lengths: {lengths.about}; mean {lengths.mix.mean_tokens:,.0f} tokens")
        return lengths

    def _kv(self) -> Curve:
        entry = self.file.kv
        if isinstance(entry, ModelKv):
            found = self._placed(("kv", "model"), lambda: model(entry.model))
            self.choices.append(f"KV sizes: computed from the layers of {found.name}")
            return kv_curve(found)
        sizes = [float(size) for size in entry.sizes]
        if any(after < before for before, after in pairwise(sizes)):
            hint = "give the sizes of whole prompts, in the order of `tokens`"
            raise self.lines.error("a longer prompt has a smaller KV cache than a shorter one", ("kv", "sizes"), hint)
        # A size as a function of the length has the same forms as a time, so the same fit serves both.
        fit = self._placed(("kv",), lambda: _fitted(entry.tokens, sizes, entry.form))
        self.choices.append(f"KV sizes: {_how(fit, entry.form)}")
        return prefill_curve(prefill_time(fit.spec))

    def _hardware(self, name: str, entry: HardwareEntry, lengths: Lengths) -> Hardware:
        key: Key = ("hardware", name, "prefill")
        spec, how = self._placed(key, lambda: self._prefill(entry))
        prefill_s = prefill_curve(self._placed(key, lambda: prefill_time(spec)))
        self.choices.append(f"prefill on {name}: {how}{_beyond(spec, lengths)}")
        if not prefill_s(lengths.mix.tokens).min() > 0:
            raise self.lines.error(
                "the prefill time of some prompts is not above 0", key, "give measured times above 0"
            )
        rate_per_s = 0.0
        if entry.decode is not None:
            rate_per_s = self._decode_per_s(name, entry)
        return Hardware(name, prefill_s, rate_per_s, entry.gpu_price)

    def _prefill(self, entry: HardwareEntry) -> tuple[PrefillSpec, str]:
        match entry.prefill:
            case MeasuredPrefill(tokens=tokens, times_s=times, form=form):
                fit = _fitted(tokens, [float(time) for time in times], form)
                return fit.spec, _how(fit, form)
            case ProfiledPrefill(file=file, form=form):
                found, _ = fit_profile(read_profile(self.folder / file), form)
                if found is None:
                    raise InputError(
                        "the file has no measured prompts", where=file, hint="give the columns tokens,seconds"
                    )
                return found.spec, _how(found, form)
            case given:
                spec = TimingEntry(prefill=given, decode=_NO_DECODE).spec().prefill
                forms = {
                    PiecewisePrefill: "linear interpolation between the given points",
                    QuadraticPrefill: "quadratic",
                }
                return spec, f"{forms.get(type(spec), 'linear')}, as given"

    def _decode_per_s(self, name: str, entry: HardwareEntry) -> float:
        assert entry.decode is not None
        key: Key = ("hardware", name, "decode", "iteration")
        iteration_s = float(entry.decode.iteration_s)
        if not iteration_s > 0:
            raise self.lines.error("the iteration time is not above 0", key, "give the measured time of a full batch")
        slo = self.file.traffic.slo_tokens_per_s
        if slo is not None and iteration_s * slo > 1 + 1e-9:
            what = (
                f"iterations of {iteration_s * 1e3:g} ms give {1 / iteration_s:.1f} tokens/s; the SLO requires {slo:g}"
            )
            raise self.lines.error(what, key, "use a smaller `batch_max` with its shorter iteration")
        return decode_per_s(entry.decode.batch_max, iteration_s, self.file.traffic.output_tokens)

    def _site(self, number: int, entry: ClusterEntry, hardware: dict[str, Hardware]) -> Site:
        key: Key = ("clusters", number)
        found = self._known(entry.hardware, hardware, (*key, "hardware"))
        instances = self._instances(entry.gpus, (*key, "gpus"))
        if entry.role == "pd":
            self._decodes(found, (*key, "hardware"))
            if entry.egress_bytes_per_s is not None:
                raise self.lines.error("a pd cluster sends no KV cache", (*key, "egress"), "remove `egress`")
            return Site(entry.name, found, instances, entry.gpus)
        if entry.egress_bytes_per_s is None:
            raise self.lines.error(f"{entry.name} has no egress", key, "add `egress: 100 Gbps`")
        return Site(entry.name, found, instances, entry.gpus, float(entry.egress_bytes_per_s))

    def _homogeneous(self, sites: list[Site], pd: Site, hardware: dict[str, Hardware]) -> Site:
        entry = self.file.homogeneous
        if entry is None:
            gpus = sum(site.gpus for site in sites)
            self.choices.append(f"homogeneous alternative: the same number of GPUs, {gpus:,}, all {pd.hardware.name}")
            return Site("homogeneous", pd.hardware, gpus // self.file.gpus_per_instance, gpus)
        found = self._known(entry.hardware, hardware, ("homogeneous", "hardware"))
        self._decodes(found, ("homogeneous", "hardware"))
        return Site("homogeneous", found, self._instances(entry.gpus, ("homogeneous", "gpus")), entry.gpus)

    def _instances(self, gpus: int, key: Key) -> int:
        per_instance = self.file.gpus_per_instance
        if gpus % per_instance:
            what = f"{gpus} GPUs cannot be divided into instances of {per_instance}"
            raise self.lines.error(what, key, f"use a multiple of {per_instance}, or change `gpus_per_instance`")
        return gpus // per_instance

    def _decodes(self, found: Hardware, key: Key) -> None:
        if not found.decode_per_s:
            hint = f"add `decode: {{batch_max: 20, iteration: 25 ms}}` to {found.name}"
            raise self.lines.error(f"the hardware {found.name} has no decode times", key, hint)

    def _known(self, name: str, hardware: dict[str, Hardware], key: Key) -> Hardware:
        if name not in hardware:
            raise self.lines.error(f"there is no hardware {name!r}", key, nearest(name, sorted(hardware)))
        return hardware[name]

    def _check_names(self) -> None:
        seen: set[str] = set()
        for number, entry in enumerate(self.file.clusters):
            if entry.name in seen:
                raise self.lines.error(
                    f"two clusters are named {entry.name!r}", ("clusters", number, "name"), "rename one"
                )
            seen.add(entry.name)

    def _placed(self, key: Key, find: Callable[[], T]) -> T:
        """Return the result of `find`; add the location in the file to any InputError."""
        try:
            return find()
        except InputError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            raise self.lines.error(what, key, error.hint) from error


def _fitted(tokens: list[int], values: list[float], form: Form) -> Fit[PrefillSpec]:
    if any(after <= before for before, after in pairwise(tokens)):
        raise InputError("the token counts are not in ascending order", hint="sort the points and use each count once")
    return fit_prefill(tokens, values, form)


def _how(fit: Fit[PrefillSpec], form: Form) -> str:
    if form == "piecewise":
        text = f"linear interpolation between {fit.error.n} measured points"
    else:
        text = f"{form} fit of {fit.error.n} measured points, mean error {fit.error.mean_abs_relative:.1%}"
    return "; ".join((text, *fit.remarks))


def _beyond(spec: PrefillSpec, lengths: Lengths) -> str:
    """Describe the share of requests whose lengths lie outside the measured points."""
    if not isinstance(spec, PiecewisePrefill):
        return ""
    tokens = lengths.mix.tokens
    outside = float(lengths.mix.share[(tokens < spec.tokens[0]) | (tokens > spec.tokens[-1])].sum())
    return f"; {outside:.1%} of the requests lie outside the points and are extrapolated" if outside > 0.0005 else ""
