"""Checks of one engine over HTTP: health, model, tensor parallelism, connector, metrics page, clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvroute.doctor.clock import Offset, from_date
from kvroute.doctor.counters import read_counters
from kvroute.doctor.fetch import Fetched, fetch
from kvroute.doctor.report import EngineReport, MetricsReport
from kvroute.http.headers import Headers
from kvroute.http.slices import whole
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.engines.client import EngineClient
from kvroute.serve.observe.metrics.prometheus_text import PageError
from kvroute.serve.telemetry.metrics_page import read_metrics, series_missing
from kvroute.serve.telemetry.rank_pages import pages_by_rank
from kvroute.types import TRAITS, Instance

MODELS_PATH = b"/v1/models"
EMULATED = "emulated"


class _Card(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Card] = []


class _Parallel(msgspec.Struct):
    tensor_parallel_size: int | None = None


class _Transfer(msgspec.Struct):
    kv_connector: str | None = None


class _VllmConfig(msgspec.Struct):
    parallel_config: _Parallel | None = None
    kv_transfer_config: _Transfer | None = None


class _Info(msgspec.Struct):
    """Fields of the configuration pages of vLLM and SGLang. Nothing else is read: SGLang's page contains its key."""

    vllm_config: _VllmConfig | None = None
    tp_size: int | None = None
    disaggregation_transfer_backend: str | None = None


@dataclass(slots=True)
class Examined:
    """One engine under examination: its connections, its report, and bounds of its clock."""

    client: EngineClient
    report: EngineReport
    headers: Headers
    """Headers of requests below /v1, including the key."""
    metrics_path: bytes
    metrics_bytes_max: int
    offsets: list[Offset] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The instance's name."""
        return self.client.name

    async def get(self, path: bytes, wait_s: float, headers: Headers | None = None) -> Fetched:
        """GET a path. The response's Date header bounds the engine's clock."""
        answer = await fetch(
            self.client.pool, path, wait_s=wait_s, headers=headers, body_bytes_max=self.metrics_bytes_max
        )
        self.dated(answer)
        return answer

    async def metrics_page(self, wait_s: float) -> bytes:
        """Return the metrics page; empty if it is not available."""
        answer = await self.get(self.metrics_path, wait_s)
        return answer.body if answer.ok else b""

    def dated(self, answer: Fetched) -> None:
        """Record the bounds of the engine's clock that a response gives."""
        if answer.head_s and (date := answer.header(b"date")):
            self.offsets.append(from_date(date, answer.sent_s, answer.head_s))


def examined(client: EngineClient, settings: GatewaySettings, headers: Headers) -> Examined:
    """Return an engine without results."""
    instance = client.instance
    assert instance.endpoint is not None
    report = EngineReport(
        name=instance.name,
        role=instance.role,
        protocol=instance.endpoint.protocol,
        url=instance.endpoint.url,
        model=instance.model,
        tp=instance.tp,
    )
    scrape = settings.scrape
    return Examined(client, report, headers, scrape.path.encode(), int(scrape.body_bytes))


async def ask_engine(engine: Examined, settings: GatewaySettings, wait_s: Callable[[], float]) -> None:
    """Query an engine's health and, if it is healthy, the other pages, and fill its report. `wait_s` returns the time
    limit of the next response, in seconds."""
    report = engine.report
    health = await engine.get(settings.health.path.encode(), wait_s())
    report.health = health.problem or "ok"
    if report.health != "ok":
        return
    models, page, _ = await asyncio.gather(
        engine.get(MODELS_PATH, wait_s(), engine.headers),
        engine.get(engine.metrics_path, wait_s()),
        _ask_configuration(engine, wait_s),
    )
    emulated = _read_models(report, models, _names(report.model, settings))
    report.metrics = _metrics(page, engine.client.instance)
    if emulated:
        report.connector = EMULATED
    elif not report.connector:
        report.connector = _connector(report, page.body)


async def _ask_configuration(engine: Examined, wait_s: Callable[[], float]) -> None:
    """Read tensor parallelism and connector from the engine's own configuration page, if it has one."""
    report = engine.report
    for path in TRAITS[report.protocol].config_paths:
        answer = await engine.get(path.encode(), wait_s(), engine.headers)
        if not answer.ok:
            continue
        try:
            info = msgspec.json.decode(answer.body, type=_Info)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        config = info.vllm_config or _VllmConfig()
        report.engine_tp = info.tp_size or (config.parallel_config or _Parallel()).tensor_parallel_size
        transfer = (config.kv_transfer_config or _Transfer()).kv_connector
        report.connector = transfer or info.disaggregation_transfer_backend or ""
        return


def _names(model: str, settings: GatewaySettings) -> list[str]:
    """Return the names by which clients may request a model: its aliases, else the cluster file's own."""
    aliases = sorted(alias for alias, name in settings.models.items() if name == model)
    return aliases or [model]


def _read_models(report: EngineReport, answer: Fetched, names: Sequence[str]) -> bool:
    """Record which models are served. Return whether the engine is an emulated one."""
    cards: list[_Card] = []
    if answer.ok:
        try:
            cards = msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            cards = []
    report.served_models = tuple(card.id for card in cards)
    report.model_ok = all(name in report.served_models for name in names)
    report.request_model = names[0]
    lengths = [card.max_model_len for card in cards if card.id == names[0] and card.max_model_len]
    report.context_tokens = min(lengths, default=None)
    if answer.status in (401, 403):
        report.model_ok, report.served_models = None, ()
        report.health = f"HTTP status {answer.status} for /v1/models"
    return any(card.owned_by == "kvroute" for card in cards)


def _metrics(answer: Fetched, instance: Instance) -> MetricsReport:
    if not answer.ok:
        return MetricsReport(failure=answer.problem)
    try:
        pages = {instance.name: answer.body}
        if instance.engine:
            pages = whole(pages_by_rank(answer.body, {instance.name: instance.rank}))
        metrics = read_metrics(pages[instance.name])
    except PageError as error:
        return MetricsReport(failure=str(error))
    counters = read_counters(answer.body)
    return MetricsReport(
        missing=series_missing(answer.body),
        block_tokens=metrics.block_tokens,
        kv_blocks=metrics.kv_blocks,
        running=metrics.running,
        counts_transfers=bool(counters.kinds) or counters.external_tokens is not None,
    )


def _connector(report: EngineReport, page: bytes) -> str:
    """Return the connector by its counters, else by the protocol; empty: unknown."""
    kinds = sorted(read_counters(page).kinds)
    return kinds[0] if kinds else TRAITS[report.protocol].connector
