"""The results of an examination: one entry per engine, one per pair, and findings in sentences."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvroute.types import KvProtocol, Role

Moved: TypeAlias = Literal["yes", "likely", "no", "unknown", "failed", "not tried"]
"""`likely`: the engines have no counters, and their answers speak for it. `failed`: the request has no answer."""
Evidence: TypeAlias = Literal["counters", "prefix counters", "time", "answer", "none"]
"""What `moved` rests on: counters of transfers; counters of prompt tokens that a connector brought; the time to the
first token; the answer itself (an SGLang decode engine computes no prompts); or nothing."""


class Finding(msgspec.Struct, frozen=True):
    """One fault."""

    where: str
    """An engine `NAME`, a pair `PREFILL -> DECODE`, or `examination`."""
    what: str
    hint: str
    """How to fix it."""

    @property
    def sentence(self) -> str:
        """The whole finding."""
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
    """Why the page cannot be used; empty: it can."""
    missing: tuple[str, ...] = ()
    """Series that the gateway reads and the page lacks."""
    block_tokens: int | None = None
    kv_blocks: int | None = None
    running: int | None = None
    counts_transfers: bool = False
    """The page has counters of KV transfers that are known here."""


class EventsReport(msgspec.Struct):
    """KV events over ZMQ."""

    url: str
    subscribed: bool = False
    batches: int = 0
    """Batches that came during the examination."""
    broken: str = ""
    """Why a batch could not be read."""
    own_batches: int = 0
    """Batches that name a prompt of this examination."""
    replay: bool | None = None
    """Whether the replay endpoint answers; None: the cluster file names none."""


class EngineReport(msgspec.Struct, kw_only=True):
    """One engine. A text is empty, and a number is None, where the engine does not tell."""

    name: str
    role: Role
    protocol: KvProtocol
    url: str
    health: str = "not asked"
    """`ok`, or what is wrong."""
    model: str
    """As the cluster file calls it."""
    model_ok: bool | None = None
    served_models: tuple[str, ...] = ()
    request_model: str = ""
    """Name by which the examination asks for the model."""
    context_tokens: int | None = None
    tp: int
    """Tensor parallelism by the cluster file."""
    engine_tp: int | None = None
    connector: str = ""
    events: EventsReport | None = None
    metrics: MetricsReport | None = None
    clock: ClockReport | None = None

    @property
    def usable(self) -> bool:
        """Whether requests can be sent there."""
        return self.health == "ok" and self.model_ok is not False


class PairReport(msgspec.Struct, kw_only=True):
    """One request through a prefill and a decode engine."""

    prefill: str
    decode: str
    tier: int
    tier_name: str
    promised_bytes_per_s: float
    """By the cluster file, for one transfer alone in the tier."""
    promised_latency_s: float
    moved: Moved = "not tried"
    evidence: Evidence = "none"
    failure: str = ""
    """Why the request failed or was not sent."""
    prompt_tokens: int = 0
    expected_bytes: float = 0.0
    """KV cache of the prompt by the model's geometry."""
    kv_bytes: float | None = None
    transfer_s: float | None = None
    """Time of the transfer; with evidence other than `counters` it includes the wait for the first token."""
    prefill_s: float | None = None
    """From the prefill leg's start to the end of its answer; None where both legs start together."""
    first_token_s: float | None = None
    """From the decode leg's start to its first token."""

    @property
    def name(self) -> str:
        """For findings."""
        return f"{self.prefill} -> {self.decode}"

    @property
    def promised_s(self) -> float:
        """Time of the transfer by the cluster file."""
        return self.promised_latency_s + (self.kv_bytes or self.expected_bytes) / self.promised_bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """Pace of the transfer."""
        return self.kv_bytes / self.transfer_s if self.kv_bytes and self.transfer_s else None


class Report(msgspec.Struct, kw_only=True):
    """The whole examination."""

    cluster: str
    engines: list[EngineReport]
    pairs: list[PairReport]
    pairs_possible: int
    findings: list[Finding]

    @property
    def well(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings
