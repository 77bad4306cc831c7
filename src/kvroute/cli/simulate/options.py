"""Options of `kvroute simulate` that replace settings of the file's `gateway` section, and the log of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from kvroute.cli.output import remarks
from kvroute.cli.simulate.scenario import Scenario
from kvroute.control import LogHeader
from kvroute.control.log import EventLog, check_can_create
from kvroute.files.compressed_lines import written_whole
from kvroute.planner.comparison.question import ComparisonSpec
from kvroute.planner.comparison.served import ServedFile
from kvroute.policies import DEFAULT_DECODE_POLICY
from kvroute.serve.config.field_types import Wait
from kvroute.serve.config.policy import policy_text, without_effect
from kvroute.serve.config.service_classes import DEFAULT_CLASS, ServiceClass, SloSettings
from kvroute.serve.config.settings import SECTION, GatewaySettings, OracleSection
from kvroute.sim.settings import SimSpec, Telemetry
from kvroute.topology import duration_text
from kvroute.types import InputError

SYNC_MS_MAX = 3_600_000
DEFAULT_POLICIES = ("round-robin", "cla", "netkv", "foresight", DEFAULT_DECODE_POLICY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Values of the command line; None: as the cluster file says."""

    policies: tuple[str, ...] | None
    """Without duplicates."""
    prefill: str | None
    constraint: str | None
    scenario: Path | None
    oracle_refresh_s: float | None
    telemetry: Telemetry | None
    prediction: Literal["none", "smooth", "trend"] | None
    stale_after_s: float | None
    separates_own: bool | None
    slo_ttft_s: float | None
    refuses_late: bool

    def compared(self, gateway: GatewaySettings) -> list[str]:
        """Return the policies that run: those of the command line, or the usual ones and the file's own."""
        return list(self.policies or dict.fromkeys((*DEFAULT_POLICIES, gateway.policy)))

    def applied(self, served: ServedFile) -> ServedFile:
        """Return the file with the settings that a gateway would have with these options."""
        gateway = served.gateway
        gateway = replace(
            gateway,
            prefill=self.prefill or gateway.prefill,
            constraint=gateway.constraint if self.constraint is None else self.constraint,
            oracle=self._oracle(gateway.oracle),
            classes=self._classes(gateway.classes, served.settings.slo.ttft_s),
        )
        return ServedFile(served.cluster, gateway)

    def _oracle(self, oracle: OracleSection) -> OracleSection:
        own, stale_after_s, prediction = oracle.separates_own_traffic, oracle.stale_after_s, oracle.prediction
        if self.prediction is not None:
            prediction = None if self.prediction == "none" else self.prediction
        return replace(
            oracle,
            separates_own_traffic=own if self.separates_own is None else self.separates_own,
            stale_after_s=stale_after_s if self.stale_after_s is None else Wait(self.stale_after_s),
            prediction=prediction,
        )

    def _classes(self, classes: Mapping[str, ServiceClass], ttft_s: float) -> dict[str, ServiceClass]:
        """Let the requests of a trace have the limit of --slo-ttft, if requests that miss theirs are refused. Args:
        `ttft_s`: the limit of the file."""
        own = classes.get(DEFAULT_CLASS, ServiceClass())
        slo = own.slo or SloSettings()
        if self.refuses_late:
            slo = replace(slo, ttft_s=Wait(self.slo_ttft_s or ttft_s), late="refuse")
        elif self.slo_ttft_s is not None and slo.ttft_s is not None:
            slo = replace(slo, ttft_s=Wait(self.slo_ttft_s))
        else:
            return dict(classes)
        return {**classes, DEFAULT_CLASS: replace(own, slo=slo)}

    def settings(self, settings: SimSpec) -> SimSpec:
        """Apply what no setting of a gateway says."""
        return replace(
            settings,
            telemetry=self.telemetry or settings.telemetry,
            oracle_refresh_s=self.oracle_refresh_s or settings.oracle_refresh_s,
            slo=replace(settings.slo, ttft_s=self.slo_ttft_s or settings.slo.ttft_s),
        )

    def replaced(self, served: ServedFile, scenario: Scenario) -> Iterator[str]:
        """Yield a sentence for each setting that the file has and an option changes. Args: `served`: the file without
        the options."""
        others = self.policies is not None and served.gateway.policy not in self.policies
        rows: tuple[tuple[str, object, str], ...] = (
            ("--policy", ", ".join(self.policies or ()) if others else None, "policy"),
            ("--prefill-policy", self.prefill, "prefill"),
            ("--constraint", self.constraint, "constraint"),
            ("--prediction", self.prediction, "oracle.prediction"),
            ("--stale-after", self.stale_after_s, "oracle.stale_after"),
            ("--separate-own", self.separates_own, "oracle.separates_own_traffic"),
            ("--telemetry", self.telemetry if self.telemetry != served.settings.telemetry else None, "oracle.source"),
            ("--oracle-refresh", self.oracle_refresh_s, "oracle.prometheus.interval"),
            ("--slo-ttft", self.slo_ttft_s, "classes.default.slo.ttft"),
            ("--scenario", self.scenario if scenario.offload is not None else None, "offload"),
        )
        for option, value, key in rows:
            text = _written(served.cluster.file.gateway, key)
            if key == "policy" and text == "":
                text = policy_text(served.gateway.policy, served.gateway.parameters)
            if value is not None and text is not None and _text(value) != text:
                yield f"{option} {_text(value)} replaces {SECTION}.{key}" + (f": {text}" if text else "")


def _written(section: Mapping[str, Any], key: str) -> str | None:
    """Return the text of a setting of the file, empty for a section with several; None if the file has none."""
    found: Any = section
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return "" if isinstance(found, Mapping) else _text(found)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return duration_text(value) if isinstance(value, float) else str(value)


def file_remarks(path: Path, served: ServedFile, policies: Sequence[str], gateways: int) -> Iterator[str]:
    """Yield what the user should know of a simulated file: its own policy, and what is not modelled."""
    written, gateway = served.cluster.file.gateway, served.gateway
    if gateway.policy in policies and (written.get("policy") or gateway.parameters):
        yield f"{path} serves with {policy_text(gateway.policy, gateway.parameters)}"
    yield from without_effect(gateway.policy, gateway.parameters, policies)
    left_out = served.not_modelled
    if gateways > 1 and "limits" in written:
        left_out = [*left_out, f"{SECTION}.limits, with several gateways"]
    if left_out:
        yield f"{path}: not modelled: {', '.join(left_out)}"


def sync_s(text: str) -> float | None:
    """Seconds of `--sync-ms`; None: no exchange."""
    if text == "none":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= SYNC_MS_MAX:
        hint = f"write a number from 0 to {SYNC_MS_MAX:,}, or none"
        raise InputError(f"{text!r} is not a number of milliseconds", where="--sync-ms", hint=hint)
    return milliseconds / 1e3


def weights(text: str) -> dict[str, float]:
    """Weights of `--cla-weights`."""
    try:
        cache, load = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{text!r} is not a pair of weights", where="--cla-weights", hint="write cache,load, e.g. 1,0.7"
        ) from None
    return {"cache_weight": cache, "load_weight": load}


def check_log(comparison: ComparisonSpec, policies: list[str], seeds: int, log: Path) -> None:
    """Raise an InputError if --log cannot record these runs in this file."""
    if comparison.settings.gateways > 1:
        raise InputError("a log has the decisions of one gateway", where="--log", hint="leave --gateways out")
    if len(policies) != 1 or seeds != 1:
        raise InputError("a log can hold only one run", where="--log", hint="use one --policy and --seeds 1")
    if comparison.workload.trace and log.exists() and log.samefile(comparison.workload.trace):
        raise InputError("the log would overwrite the trace", where="--log", hint="give another file")
    check_can_create(log)


def record_run(comparison: ComparisonSpec, policy: str, seed: int, log: Path) -> None:
    """Run one policy with one seed, and record its events and decisions."""
    comparison.check([policy], seed)
    text = Path(comparison.cluster).read_text(encoding="utf-8")
    header = LogHeader(cluster=text, spec=comparison.spec_of(policy))
    with written_whole(log) as part, EventLog(part, header) as records:
        comparison.run(policy, seed, records)
    remarks().print(f"Log: {log}")
