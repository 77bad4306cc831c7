"""The `gateway:` section of a cluster file as msgspec Structs: every field has a default, so an empty section serves.

Attributes end in their unit; the file's own keys (`connect`, `body`, ...) take text with a unit. What the values mean
together, and whether the files they name are there, is for `preflight`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.control import ControlSpec, TermsKept
from kvroute.gateway.amounts import (
    HeaderName,
    Host,
    Limit,
    LimitOrNone,
    LogSize,
    MemorySize,
    Number,
    Path,
    Port,
    Query,
    Secret,
    Share,
    ShareAboveZero,
    Url,
    Wait,
    WebOrigin,
    Window,
    Word,
)
from kvroute.gateway.cache_salt import CacheSaltMode
from kvroute.gateway.keys import KeySettings
from kvroute.gateway.offload_settings import OffloadSection
from kvroute.gateway.prompt_bounds import MEMORY_BYTES
from kvroute.oracle import OracleSettings
from kvroute.policies import DEFAULT_DECODE_POLICY
from kvroute.topology.schema import Entry
from kvroute.topology.units import Size

Tier: TypeAlias = Literal["node", "rack", "pod", "datacenter", "wan"]
TIERS: tuple[Tier, ...] = ("node", "rack", "pod", "datacenter", "wan")
"""In the order of the tiers 0 to 4."""
OracleSource: TypeAlias = Literal["static", "prometheus", "push"]
PrefixSource: TypeAlias = Literal["auto", "events", "approximate"]
Measure: TypeAlias = Literal["auto", "first-byte", "engine"]


class TlsSettings(Entry, frozen=True, kw_only=True):
    """Files in PEM form; paths are relative to the cluster file."""

    certificate: str
    """The server's certificate and those that lead to its root."""
    key: str


class ListenSettings(Entry, frozen=True, kw_only=True):
    """Where clients come in."""

    host: Host = "127.0.0.1"
    port: Port = 8080
    """0: the system draws one."""
    tls: TlsSettings | None = None
    metrics: bool | None = None
    """/metrics is answered here too, to every client; None: where no keys are asked for. Always on the admin port."""
    hosts: list[Host] = field(default_factory=list)
    """Names that clients may call it by where no keys are asked for, besides those that `origins` knows."""
    origins: list[WebOrigin] = field(default_factory=list)
    """Web pages of other sites that may send requests and read the answers."""


class AdminSettings(Entry, frozen=True, kw_only=True):
    """Where the operator comes in: dashboard, metrics, telemetry."""

    host: Host = "127.0.0.1"
    port: Port = 9090
    push_token: Secret | None = None
    """What POST requests must show as a bearer token; without one they are for this machine alone."""
    read_token: Secret | None = None
    """What GET requests must show, as a bearer token or as the password of Basic authentication; `push_token` does too.
    Without one, every client that reaches the port may read. /health and /ready need none."""
    tls: TlsSettings | None = None
    hosts: list[Host] = field(default_factory=list)
    """Names that it may be called by, beside `localhost` and any IP address."""


class LinkQuery(Entry, frozen=True, kw_only=True):
    """One PromQL query whose result has a series for each link."""

    query: Query
    label: Word = "link"
    """The label that holds the link's name."""


class PrometheusSettings(Entry, frozen=True, kw_only=True):
    """Utilisation by others in [0, 1), asked of a Prometheus server; by tier or by link, not both."""

    url: Url
    per_tier: dict[Tier, Query] | None = None
    """A PromQL query for each tier that has one; the others read 0."""
    per_link: LinkQuery | None = None
    interval_s: Wait = field(name="interval", default=Wait(5.0))
    timeout_s: Wait = field(name="timeout", default=Wait(2.0))


class OracleSection(Entry, frozen=True, kw_only=True):
    """What the gateway believes of the network beyond the cluster file."""

    source: OracleSource = "static"
    self_measured: bool = True
    """The pace of own transfers corrects the static bandwidths."""
    separates_own_traffic: bool = True
    """Telemetry leaves the gateway's own transfers out."""
    stale_after_s: Wait = field(name="stale_after", default=Wait(30.0))
    """Older telemetry and measurements fade to the static view."""
    prediction: Literal["smooth", "trend"] | None = None
    prometheus: PrometheusSettings | None = None

    def oracle_settings(self) -> OracleSettings:
        """The same as the oracle takes it."""
        return OracleSettings(
            separates_own_traffic=self.separates_own_traffic,
            prediction=self.prediction,
            stale_after_s=float(self.stale_after_s),
            self_measured=self.self_measured,
        )


class PromptSettings(Entry, frozen=True, kw_only=True):
    """How prompts become block hashes."""

    tokenizer: str | None = None
    """A `tokenizer.json` or its folder; without one blocks are cut from text."""
    block_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    bytes_per_token: Annotated[int, Meta(ge=1, le=64)] = 4
    """Of text, where there is no tokenizer."""
    context: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Tokens that the model's context holds; None: what `config.json` beside the tokenizer says, if it is there."""
    memory_bytes: MemorySize = field(name="memory", default=MemorySize(MEMORY_BYTES))
    """For all prompts that are tokenized at the same time; bounds the longest one."""


class LimitSettings(Entry, frozen=True, kw_only=True):
    """What clients may take."""

    body_bytes: Size = field(name="body", default=Size(64e6))
    bodies_bytes: Size = field(name="bodies", default=Size(1e9))
    """Memory for those of all requests together, four bytes for each byte, from a body's first byte until it is not
    needed any more; those up to 64 KiB are not counted."""
    header_bytes: Size = field(name="headers", default=Size(64e3))
    connections: Limit = 4096
    connections_per_address: Limit | None = None
    """Limit for one IPv4 address or IPv6 /64 network; None: three quarters of `connections`."""
    in_flight: Limit = 2048
    queue: LimitOrNone = 512
    queue_wait_s: Wait = field(name="queue_wait", default=Wait(30.0))
    per_key: Limit = 256
    """Requests of one API key, in flight and waiting; `keys.concurrency` says otherwise for some."""
    header_s: Wait = field(name="header_time", default=Wait(10.0))
    body_s: Wait = field(name="body_time", default=Wait(60.0))
    keep_alive_s: Wait = field(name="keep_alive", default=Wait(75.0))
    stall_s: Wait = field(name="stall", default=Wait(120.0))
    """For so long a client may read nothing of an answer that waits for it."""


class TimeoutSettings(Entry, frozen=True, kw_only=True):
    """How long an engine may take, by phase."""

    connect_s: Wait = field(name="connect", default=Wait(2.0))
    prefill_s: Wait = field(name="prefill", default=Wait(300.0))
    first_token_s: Wait = field(name="first_token", default=Wait(300.0))
    """From the decode leg's start to the first byte of its stream: transfer, queue and first step."""
    answer_s: Wait = field(name="answer", default=Wait(3600.0))
    """From the decode leg's start to an answer that comes whole, of which no byte is seen before its last token."""
    between_tokens_s: Wait = field(name="between_tokens", default=Wait(60.0))
    drain_s: Wait = field(name="drain", default=Wait(120.0))
    """After SIGTERM, for the requests under way."""


class RetrySettings(Entry, frozen=True, kw_only=True):
    """How many legs are tried again (`budget`)."""

    share: Share = 0.2
    floor_per_s: Number = 10.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Of one request, the first one included."""


class BreakerSettings(Entry, frozen=True, kw_only=True):
    """When an instance is left alone (`breaker`)."""

    failures: Annotated[int, Meta(ge=1, le=10_000)] = 5
    window_s: Wait = field(name="window", default=Wait(30.0))
    share: ShareAboveZero = 0.5
    open_s: Wait = field(name="open", default=Wait(5.0))
    jitter: Share = 0.1
    """It stays open for up to this share longer, by chance."""


class HealthSettings(Entry, frozen=True, kw_only=True):
    """How engines are asked whether they live."""

    path: Path = "/health"
    interval_s: Wait = field(name="interval", default=Wait(2.0))
    timeout_s: Wait = field(name="timeout", default=Wait(2.0))
    failures: Annotated[int, Meta(ge=1, le=1000)] = 2
    jitter: Share = 0.1
    """Each round of checks lasts up to this share of `interval` longer, by chance."""
    slow_start_s: Window = field(name="slow_start", default=Window(10.0))
    """Over this time the share of requests of an instance that has returned rises; 0: it gets its full share."""
    panic: Share = 0.5
    """Where fewer than this share of a role's instances are available, health checks and breakers are ignored."""


class ScrapeSettings(Entry, frozen=True, kw_only=True):
    """How engines are asked for their load."""

    path: Path = "/metrics"
    interval_s: Wait = field(name="interval", default=Wait(1.0))
    body_bytes: Size = field(name="body", default=Size(4e6))
    """A longer page is not read."""


class TracingSettings(Entry, frozen=True, kw_only=True):
    """OpenTelemetry spans over OTLP/HTTP; without a URL the client's trace context is passed on as it is."""

    otlp: Url | None = None
    share: Share = 1.0
    """Of the requests whose client has not decided."""


class LogSettings(Entry, frozen=True, kw_only=True):
    """What the gateway writes; never a key, never a prompt."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = False
    """A line for each request."""
    events: str | None = None
    """The file that takes every event and decision, for `kvroute replay` and `kvroute explain`."""
    file_bytes: LogSize = field(name="file_size", default=LogSize(64e6))
    """When the event log's file is larger, it gets a number at the end of its name, and a new file is begun."""
    total_bytes: LogSize = field(name="total_size", default=LogSize(1e9))
    """Limit for all files of event logs under this name; beyond it the oldest are removed."""
    terms: TermsKept = "best"
    """Of more than 64 candidates the event log keeps the terms of the 16 cheapest and of the chosen one, or of all."""


class GatewaySettings(Entry, frozen=True, kw_only=True):
    """The whole section. Paths are absolute once `preflight` has read them."""

    listen: ListenSettings = ListenSettings()
    admin: AdminSettings = AdminSettings()
    policy: str = DEFAULT_DECODE_POLICY
    parameters: dict[str, float] = field(default_factory=dict)
    """Of the policy."""
    shadow: str = ""
    """A second decode policy that is asked about every decision and not obeyed; empty: none."""
    prefill: str = "cache-aware"
    """The prefill policy."""
    constraint: str = ""
    """`level:enforcement[:weight]`; empty: none."""
    reserve_bytes: Size | None = field(name="reserve", default=None)
    """KV memory held back on every decode instance."""
    reserve_output_tokens: Limit = 4096
    """Room is kept for so many generated tokens of a request at most, whatever it allows itself."""
    models: dict[Word, Word] = field(default_factory=dict)
    """A model as clients call it to the model as the cluster file calls it."""
    oracle: OracleSection = OracleSection()
    prompt: PromptSettings = PromptSettings()
    prefix: PrefixSource = "auto"
    """What tells who has cached what: engines' `events`, or the gateway's own routing (`approximate`); `auto`: events
    of the instances that have `kv_events`."""
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    health: HealthSettings = HealthSettings()
    scrape: ScrapeSettings = ScrapeSettings()
    keys: KeySettings = KeySettings()
    upstream_key_env: str | None = None
    """Environment variable with the engines' own key, sent in place of the client's, which is checked here."""
    forward_headers: list[HeaderName] = field(default_factory=list)
    """Request headers that engines get, besides those of OpenAI's SDKs and of tracing (`headers.FORWARDED`)."""
    cache_salt: CacheSaltMode = "none"
    """Which prompts share the engines' prefix caches: all, those of one API key, or those of one tenant."""
    cache_salt_secret_env: str | None = None
    """Environment variable with the secret that salts are derived with; None: drawn at the start."""
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()
    measure: Measure = "auto"
    """What times transfers: the `engine`'s own counters, the `first-byte` of its answer, or whichever there is."""
    layerwise: bool = False
    """KV caches are fetched while they are computed, inside a datacenter too; `offload.layerwise` says so for prompts
    that another datacenter prefills."""
    offload: OffloadSection | None = None
    """When a prefill leaves its datacenter; None: instances are chosen whatever datacenter they are in."""

    def control_spec(self) -> ControlSpec:
        """What makes a core decide as this section says: the event log's first line."""
        return ControlSpec(
            decode=self.policy,
            parameters=self.parameters,
            shadow=self.shadow,
            prefill=self.prefill,
            constraint=self.constraint,
            oracle=self.oracle.oracle_settings(),
            reserve_bytes=float(self.reserve_bytes or 0.0),
            overcommit=True,
            cache_block_tokens=0 if self.prefix == "events" else self.prompt.block_tokens,
            offload=self.offload.spec() if self.offload is not None else None,
            layerwise=self.layerwise,
            slow_start_s=float(self.health.slow_start_s),
        )
