"""The results of an examination: one entry per engine, one per pair, and findings in sentences."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.types import KvProtocol, Role

Moved: TypeAlias = Literal["yes", "likely", "no", "unknown", "failed", "not tried"]
"""`likely`: the engines have no counters, but their responses indicate a transfer. `failed`: the request has no
response."""
Evidence: TypeAlias = Literal["counters", "prefix counters", "time", "answer", "none"]
"""Basis of `moved`: counters of transfers; counters of prompt tokens that a connector transferred; the time to the
first token; the response itself (an SGLang decode engine computes no prompts); or nothing."""


class DoctorFinding(msgspec.Struct, frozen=True):
    """One fault."""

    where: str
    """An engine `NAME`, a pair `PREFILL -> DECODE`, or `examination`."""
    what: str
    hint: str
    """How to fix it."""

    @property
    def sentence(self) -> str:
        """The whole finding as text."""
        return f"{self.where}: {self.what}; {self.hint}"


class ClockReport(msgspec.Struct, frozen=True):
    """An engine's clock minus this machine's clock, in seconds; the true offset is within both bounds."""

    offset_s: float
    """Middle of the bounds."""
    error_s: float
    """Half the distance between the bounds."""


class MetricsReport(msgspec.Struct, frozen=True):
    """The metrics page as the gateway reads it."""

    failure: str = ""
    """Why the page cannot be used; empty if it can."""
    missing: tuple[str, ...] = ()
    """Series that the gateway reads and the page lacks."""
    block_tokens: int | None = None
    kv_blocks: int | None = None
    running: int | None = None
    counts_transfers: bool = False
    """True if the page has known counters of KV transfers."""


class EventsReport(msgspec.Struct):
    """KV events over ZMQ."""

    url: str
    subscribed: bool = False
    batches: int = 0
    """Number of batches that arrived during the examination."""
    broken: str = ""
    """Why a batch, or one of its events, could not be read."""
    own_batches: int = 0
    """Number of batches about a prompt of this examination."""
    replay: bool | None = None
    """True if the replay endpoint responds; None: the cluster file has none."""


class EngineReport(msgspec.Struct, kw_only=True):
    """One engine. A text is empty, and a number is None, if the engine does not report it."""

    name: str
    role: Role
    protocol: KvProtocol
    url: str
    health: str = "not checked"
    """`ok`, or what is wrong."""
    model: str
    """Name of the model in the cluster file."""
    model_ok: bool | None = None
    served_models: tuple[str, ...] = ()
    request_model: str = ""
    """Name by which the examination requests the model."""
    context_tokens: int | None = None
    tp: int
    """Tensor parallelism in the cluster file."""
    engine_tp: int | None = None
    connector: str = ""
    events: EventsReport | None = None
    metrics: MetricsReport | None = None
    clock: ClockReport | None = None
    aggregated: str | None = None
    """Why the engine did not serve an aggregated request; empty: it did; None: it does not have to, or was not
    asked."""

    @property
    def usable(self) -> bool:
        """True if requests can be sent to the engine."""
        return self.health == "ok" and self.model_ok is not False


class PairReport(msgspec.Struct, kw_only=True):
    """One request through a prefill and a decode engine."""

    prefill: str
    decode: str
    tier: int
    tier_name: str
    promised_bytes_per_s: float
    """Rate by the cluster file, for one transfer alone in the tier."""
    promised_latency_s: float
    moved: Moved = "not tried"
    evidence: Evidence = "none"
    failure: str = ""
    """Why the request failed or was not sent."""
    prompt_tokens: int = 0
    expected_bytes: float = 0.0
    """Size of the prompt's KV cache by the model's geometry."""
    kv_bytes: float | None = None
    transfer_s: float | None = None
    """Duration of the transfer; with evidence other than `counters` it includes the wait for the first token."""
    prefill_s: float | None = None
    """Time from the prefill leg's start to the end of its response; None if both legs start together."""
    first_token_s: float | None = None
    """Time from the decode leg's start to its first token."""

    @property
    def name(self) -> str:
        """Name of the pair in findings."""
        return f"{self.prefill} -> {self.decode}"

    @property
    def promised_s(self) -> float:
        """Duration of the transfer by the cluster file, in seconds."""
        return self.promised_latency_s + (self.kv_bytes or self.expected_bytes) / self.promised_bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the transfer."""
        return self.kv_bytes / self.transfer_s if self.kv_bytes and self.transfer_s else None


class ExaminationReport(msgspec.Struct, kw_only=True):
    """The whole examination."""

    cluster: str
    engines: list[EngineReport]
    pairs: list[PairReport]
    pairs_possible: int
    findings: list[DoctorFinding]

    @property
    def well(self) -> bool:
        """True if there are no findings."""
        return not self.findings
