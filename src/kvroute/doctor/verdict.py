"""Evaluation of the results: the state of an engine or of a pair, and its findings."""

from __future__ import annotations

from collections.abc import Iterator

from kvroute.doctor.clock import wrong
from kvroute.doctor.probe import Outcome
from kvroute.doctor.report import DoctorFinding, EngineReport, EventsReport, MetricsReport, PairReport
from kvroute.llm import Model
from kvroute.serve.config.settings import GatewaySettings
from kvroute.types import TRAITS

SLOW_FACTOR = 3.0
"""A transfer that takes this many times the promised duration, plus SLOW_MIN_S, is a finding."""
SLOW_MIN_S = 0.02
"""Allowance in seconds: engines take a few milliseconds for any transfer, whatever its size."""
SIZE_FACTOR = 1.5
"""KV that is larger or smaller than the model's geometry gives by this factor is a finding."""
FASTER_FACTOR = 0.5
"""A first token within this share of the prefill time indicates that KV has moved."""
_NEEDED_SHARE = 0.5
"""Share of the prompt's tokens that must have been transferred."""
_EVENTS_HINT = (
    'start the engine with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", ...}\', or '
    "correct `kv_events` in the cluster file"
)


def engine_findings(report: EngineReport, settings: GatewaySettings) -> Iterator[DoctorFinding]:
    """Yield everything that is wrong with one engine."""
    if report.health != "ok":
        yield _health_finding(report)
        return
    if report.model_ok is False:
        yield _model_finding(report)
    if report.engine_tp is not None and report.engine_tp != report.tp:
        what = f"the engine runs with tensor parallelism {report.engine_tp}, but the cluster file has tp: {report.tp}"
        yield DoctorFinding(
            report.name, what, "correct `tp` and `gpus` in the file, or the engine's --tensor-parallel-size"
        )
    if report.metrics is not None:
        yield from _metrics_findings(report, report.metrics)
    if report.events is not None:
        yield from _events_findings(report, report.events, settings.prompt.block_tokens)
    if report.aggregated:
        what = (
            f"a request without a KV transfer, which the gateway's policy may send to it, failed: {report.aggregated}"
        )
        yield DoctorFinding(
            report.name, what, "see its log, or set `gateway.policy: foresight`, which always uses a pair"
        )
    if report.clock is not None and wrong(report.clock):
        offset_s = report.clock.offset_s
        ahead = "ahead of" if offset_s > 0 else "behind"
        what = f"its clock is {abs(offset_s):.1f} s (+- {report.clock.error_s:.1f} s) {ahead} this machine's"
        yield DoctorFinding(report.name, what, "synchronise both machines with NTP; logs and traces cannot be compared")


def _health_finding(report: EngineReport) -> DoctorFinding:
    if report.health == "not checked":
        return DoctorFinding(report.name, "the timeout expired before the engine was queried", "use a longer --timeout")
    if report.health.startswith(("HTTP status 401", "HTTP status 403")):
        hint = "give the environment variable that holds its key: `gateway.upstream_key_env` or --key-env"
        return DoctorFinding(report.name, f"the engine rejects the key ({report.health})", hint)
    what = f"{report.url} is not healthy ({report.health})"
    return DoctorFinding(report.name, what, "start the engine, or correct `endpoint.url` in the cluster file")


def _model_finding(report: EngineReport) -> DoctorFinding:
    if not report.served_models:
        what = "GET /v1/models lists no model"
        return DoctorFinding(report.name, what, "check that an OpenAI-compatible server listens at its `endpoint.url`")
    served = ", ".join(report.served_models)
    what = f"the engine serves {served}, but clients request {report.request_model}"
    hint = f"start it with --served-model-name {report.request_model}, or correct `model` or `gateway.models`"
    return DoctorFinding(report.name, what, hint)


def _metrics_findings(report: EngineReport, metrics: MetricsReport) -> Iterator[DoctorFinding]:
    hint = f"{TRAITS[report.protocol].metrics_hint}, and set its path in `gateway.scrape.path`"
    if metrics.failure:
        yield DoctorFinding(report.name, f"the metrics page cannot be read ({metrics.failure})", hint)
    elif metrics.missing:
        what = f"the metrics page lacks {', '.join(metrics.missing)}, so the gateway does not know its load"
        yield DoctorFinding(report.name, what, hint)


def _events_findings(report: EngineReport, events: EventsReport, block_tokens: int) -> Iterator[DoctorFinding]:
    if not events.subscribed:
        why = f" ({events.broken})" if events.broken else ""
        yield DoctorFinding(report.name, f"no KV events: no response from {events.url}{why}", _EVENTS_HINT)
        return
    if events.broken:
        yield DoctorFinding(
            report.name, f"its KV events cannot be read ({events.broken})", "use an engine version with vLLM's format"
        )
    if events.replay is False:
        what = "the replay endpoint of its KV events does not respond"
        yield DoctorFinding(report.name, what, "add `replay_endpoint` to --kv-events-config, or correct `kv_replay`")
    size = report.metrics.block_tokens if report.metrics is not None else None
    if size is not None and size % block_tokens:
        what = (
            f"its KV blocks have {size} tokens, not a multiple of the gateway's {block_tokens}, so it ignores KV events"
        )
        yield DoctorFinding(report.name, what, f"set `gateway.prompt.block_tokens: {size}`")


def silent_events_finding(report: EngineReport) -> DoctorFinding:
    """Return the finding for an engine that has computed a prompt but published no event about it."""
    what = "it computed a prompt without publishing a KV event"
    return DoctorFinding(report.name, what, "check enable_kv_cache_events and the `topic` in its --kv-events-config")


def judge(pair: PairReport, outcome: Outcome, model: Model) -> None:
    """Write the results of a request into the pair's report."""
    pair.prefill_s, pair.first_token_s = outcome.prefill_s, outcome.first_token_s
    if outcome.moved is not None:
        pair.moved, pair.evidence = "yes", "counters"
        pair.kv_bytes, pair.transfer_s = outcome.moved.totals.kv_bytes, outcome.moved.seconds
    elif outcome.moved_tokens is not None:
        moved = outcome.moved_tokens >= _NEEDED_SHARE * pair.prompt_tokens
        pair.moved, pair.evidence = "yes" if moved else "no", "prefix counters"
        if moved:
            pair.kv_bytes, pair.transfer_s = float(model.kv_bytes(int(outcome.moved_tokens))), outcome.first_token_s
    elif outcome.counted or outcome.failed:
        pair.moved, pair.evidence = "no", "counters"
    elif outcome.prefill_s is None:
        pair.moved, pair.evidence = "likely", "answer"
    elif outcome.first_token_s is not None and outcome.first_token_s < FASTER_FACTOR * outcome.prefill_s:
        pair.moved, pair.evidence = "likely", "time"
        pair.kv_bytes, pair.transfer_s = pair.expected_bytes, outcome.first_token_s
    else:
        pair.moved, pair.evidence = "unknown", "time"


def slow(pair: PairReport) -> bool:
    """Return whether counters show a transfer that is much slower than the cluster file promises."""
    if pair.evidence != "counters" or not pair.kv_bytes or not pair.transfer_s:
        return False
    return pair.transfer_s > SLOW_FACTOR * pair.promised_s + SLOW_MIN_S


def pair_findings(pair: PairReport, outcome: Outcome) -> Iterator[DoctorFinding]:
    """Yield everything that is wrong with one pair that has responded."""
    if pair.moved == "no":
        yield _not_moved_finding(pair, outcome)
        return
    if outcome.moved is not None and outcome.moved.source not in ("", pair.prefill):
        what = f"the decode engine counts this transfer for source {outcome.moved.source!r}"
        hint = f"set `instance` to {pair.prefill} in the prefill engine's kv_connector_extra_config"
        yield DoctorFinding(pair.name, f"{what}, which is not an instance of the cluster file", hint)
    if slow(pair):
        rate, promised = rate_text(pair.bytes_per_s or 0.0), rate_text(pair.promised_bytes_per_s)
        what = f"the KV cache moves at {rate}, but the cluster file states {promised} ({pair.tier_name})"
        hint = (
            "check for other traffic, a wrong network device or TCP instead of RDMA, or correct the file's capacities"
        )
        yield DoctorFinding(pair.name, what, hint)
    if pair.evidence == "counters" and pair.kv_bytes and pair.expected_bytes:
        ratio = pair.kv_bytes / pair.expected_bytes
        if not 1.0 / SIZE_FACTOR <= ratio <= SIZE_FACTOR:
            sizes = f"{bytes_text(pair.kv_bytes)} of KV for {pair.prompt_tokens} tokens"
            what = f"the engines move {sizes}, {ratio:.2g} times the size of the file's model"
            yield DoctorFinding(
                pair.name, what, "correct `model` in the cluster file, or the engines' --kv-cache-dtype"
            )


def _not_moved_finding(pair: PairReport, outcome: Outcome) -> DoctorFinding:
    reasons = f" (its failure counters: {', '.join(outcome.failed)})" if outcome.failed else ""
    what = f"the request succeeded without a KV transfer{reasons}, so {pair.decode} computed the prompt again"
    hint = (
        f"see the log of {pair.decode}, and check that both engines run the same connector, model and tensor "
        f"parallelism, and that {pair.decode} reaches the KV port of {pair.prefill}"
    )
    return DoctorFinding(pair.name, what, hint)


_RATE_UNITS = ("bps", "Kbps", "Mbps", "Gbps", "Tbps")


def rate_text(bytes_per_s: float) -> str:
    """Format a rate, e.g. `94.2 Gbps`."""
    return _scaled(8.0 * bytes_per_s, _RATE_UNITS)


def rates_text(measured_bytes_per_s: float | None, promised_bytes_per_s: float) -> str:
    """Format two rates in the unit of the second, e.g. `94.2 / 100 Gbps`; `-` for a rate that is not known."""
    number, _, unit = rate_text(promised_bytes_per_s).partition(" ")
    factor = 1000.0 ** _RATE_UNITS.index(unit)
    measured = "-" if measured_bytes_per_s is None else f"{8.0 * measured_bytes_per_s / factor:.3g}"
    return f"{measured} / {number} {unit}"


def bytes_text(nbytes: float) -> str:
    """Format a size, e.g. `671 MB`."""
    return _scaled(nbytes, ("B", "KB", "MB", "GB", "TB"))


def seconds_text(seconds: float) -> str:
    """Format a duration, e.g. `53.7 ms`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000.0
    return f"{value:.3g} {units[-1]}"
