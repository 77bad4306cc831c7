"""The `gateway:` section of a cluster file as msgspec Structs: every field has a default, so it may be empty.

Attribute names end in their unit; the keys of the file (`connect`, `body`, ...) take text with a unit. `preflight`
checks combinations of values, and whether the named files exist.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.control import ControlSpec, TermsKept
from kvroute.oracle import OracleSpec
from kvroute.policies import DEFAULT_DECODE_POLICY
from kvroute.serve.api.api_keys import KeySettings
from kvroute.serve.api.cache_salt import CacheSaltMode
from kvroute.serve.api.prompt_bounds import MEMORY_BYTES
from kvroute.serve.config.autoscaling import AutoscalingSection
from kvroute.serve.config.field_types import (
    HeaderName,
    Host,
    Limit,
    LimitOrNone,
    LogSize,
    MemorySize,
    NonEmptyText,
    Number,
    PassthroughPath,
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
)
from kvroute.serve.config.offload import OffloadSection
from kvroute.serve.config.policy import PolicyName, PolicyParameter, parameters_text, policy_parameter
from kvroute.serve.config.replication import ReplicationSection
from kvroute.serve.config.service_classes import FairQueueSection, ServiceClass
from kvroute.topology.schema import Entry, Name
from kvroute_engine.files.units import Size

SECTION = "gateway"
"""Key of the settings in a cluster file."""
Tier: TypeAlias = Literal["node", "rack", "pod", "datacenter", "wan"]
TIERS: tuple[Tier, ...] = ("node", "rack", "pod", "datacenter", "wan")
"""In the order of the tiers 0 to 4."""
OracleSource: TypeAlias = Literal["static", "prometheus", "push"]
PrefixSource: TypeAlias = Literal["auto", "events", "approximate"]
Measure: TypeAlias = Literal["auto", "first-byte", "engine"]


class TlsSettings(Entry, frozen=True, kw_only=True):
    """Files in PEM format; paths are relative to the cluster file."""

    certificate: str
    """The server's certificate and the certificates that lead to its root."""
    key: str


class ListenSettings(Entry, frozen=True, kw_only=True):
    """The port for clients."""

    host: Host = "127.0.0.1"
    port: Port = 8080
    """0: the operating system chooses one."""
    tls: TlsSettings | None = None
    metrics: bool | None = None
    """Whether this port serves /metrics to all clients; None: if no keys are required. The admin port always does."""
    hosts: list[Host] = field(default_factory=list)
    """Host names that clients may use if no keys are required, in addition to those in `origins`."""
    origins: list[WebOrigin] = field(default_factory=list)
    """Web pages of other sites that may send requests and read the responses."""


class AdminSettings(Entry, frozen=True, kw_only=True):
    """The port for the operator: dashboard, metrics, telemetry."""

    host: Host = "127.0.0.1"
    port: Port = 9090
    push_token: Secret | None = None
    """Bearer token that POST requests must carry; without one, POST is only allowed from this machine."""
    read_token: Secret | None = None
    """Token that GET requests must carry, as a bearer token or as the password of Basic authentication; `push_token` is
    accepted too. Without one, every client that reaches the port may read. /health and /ready need none."""
    tls: TlsSettings | None = None
    hosts: list[Host] = field(default_factory=list)
    """Host names that clients may use, in addition to `localhost` and any IP address."""


class LinkQuery(Entry, frozen=True, kw_only=True):
    """One PromQL query whose result has a series for each link."""

    query: Query
    label: NonEmptyText = "link"
    """Label that contains the link's name."""


class PrometheusSettings(Entry, frozen=True, kw_only=True):
    """Utilisation by other traffic in [0, 1) from a Prometheus server; by tier or by link, not both."""

    url: Url
    per_tier: dict[Tier, Query] | None = None
    """PromQL queries by tier; a tier without a query counts as 0."""
    per_link: LinkQuery | None = None
    interval_s: Wait = field(name="interval", default=Wait(5.0))
    timeout_s: Wait = field(name="timeout", default=Wait(2.0))


class OracleSection(Entry, frozen=True, kw_only=True):
    """Sources of network data in addition to the cluster file."""

    source: OracleSource = "static"
    self_measured: bool = True
    """Whether the measured throughput of own transfers corrects the static bandwidths."""
    separates_own_traffic: bool = True
    """Whether telemetry excludes the gateway's own transfers."""
    stale_after_s: Wait = field(name="stale_after", default=Wait(30.0))
    """Age from which telemetry and measurements decay towards the static values."""
    prediction: Literal["smooth", "trend"] | None = None
    prometheus: PrometheusSettings | None = None

    def oracle_settings(self) -> OracleSpec:
        """Return the oracle's form of the section."""
        return OracleSpec(
            separates_own_traffic=self.separates_own_traffic,
            prediction=self.prediction,
            stale_after_s=float(self.stale_after_s),
            self_measured=self.self_measured,
        )


class PromptSettings(Entry, frozen=True, kw_only=True):
    """Conversion of prompts to block hashes."""

    tokenizer: str | None = None
    """A `tokenizer.json` or its folder."""
    tokenizers: dict[NonEmptyText, NonEmptyText] = field(default_factory=dict)
    """The same for some models, by their names in the cluster file; `tokenizer` is for all others."""
    without_tokenizer: Literal["text", "engine"] = "text"
    """What happens to prompts of models without a tokenizer: blocks are pieces of text, or an engine tokenizes them
    (`/tokenize`)."""
    block_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    bytes_per_token: Annotated[int, Meta(ge=1, le=64)] = 4
    """Assumed bytes of text per token without a tokenizer."""
    context: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Context length in tokens of the models that are not in `tokenizers`; None: that of `config.json` beside the
    tokenizer, if it exists."""
    memory_bytes: MemorySize = field(name="memory", default=MemorySize(MEMORY_BYTES))
    """Memory for all prompts that are tokenized at the same time; limits the longest one."""


class LimitSettings(Entry, frozen=True, kw_only=True):
    """Limits for clients."""

    body_bytes: Size = field(name="body", default=Size(64e6))
    bodies_bytes: Size = field(name="bodies", default=Size(1e9))
    """Memory for the bodies of all requests together: four bytes for each byte, from its arrival until it is not needed
    any more; bodies up to 64 KiB are not counted."""
    header_bytes: Size = field(name="headers", default=Size(64e3))
    connections: Limit = 4096
    connections_per_address: Limit | None = None
    """Limit for one IPv4 address or IPv6 /64 network; None: three quarters of `connections`."""
    in_flight: Limit = 2048
    queue: LimitOrNone = 512
    queue_wait_s: Wait = field(name="queue_wait", default=Wait(30.0))
    per_key: Limit = 256
    """Requests of one API key, in flight and queued; `keys.concurrency` overrides it for some keys."""
    header_s: Wait = field(name="header_time", default=Wait(10.0))
    body_s: Wait = field(name="body_time", default=Wait(60.0))
    keep_alive_s: Wait = field(name="keep_alive", default=Wait(75.0))
    stall_s: Wait = field(name="stall", default=Wait(120.0))
    """Time limit for a client that reads nothing of a pending response."""


class TimeoutSettings(Entry, frozen=True, kw_only=True):
    """Time limits for engines, by phase."""

    connect_s: Wait = field(name="connect", default=Wait(2.0))
    prefill_s: Wait = field(name="prefill", default=Wait(300.0))
    first_token_s: Wait = field(name="first_token", default=Wait(300.0))
    """From the start of the decode leg to the first byte of its stream: transfer, queue and first step."""
    answer_s: Wait = field(name="answer", default=Wait(3600.0))
    """From the start of the decode leg to a response that is not streamed: its first byte comes after its last
    token."""
    between_tokens_s: Wait = field(name="between_tokens", default=Wait(60.0))
    abandoned_s: Window = field(name="abandoned", default=Window(10.0))
    """After the client has left, time for a decode engine to fetch the KV cache, so that the prefill engine releases
    it; 0: all legs are aborted at once."""
    drain_s: Wait = field(name="drain", default=Wait(120.0))
    """After SIGTERM, time for the requests in progress."""


class RetrySettings(Entry, frozen=True, kw_only=True):
    """Limits on retries of legs."""

    share: Share = 0.2
    floor_per_s: Number = 10.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Attempts of one request, including the first."""
    continue_streams: bool = False
    """Whether another engine continues a stream that breaks off, if `openai_api.stream_record.may_continue`."""


class BreakerSettings(Entry, frozen=True, kw_only=True):
    """Conditions under which a failing instance gets no requests."""

    failures: Annotated[int, Meta(ge=1, le=10_000)] = 5
    window_s: Wait = field(name="window", default=Wait(30.0))
    share: ShareAboveZero = 0.5
    open_s: Wait = field(name="open", default=Wait(5.0))
    jitter: Share = 0.1
    """Share by which the open time is randomly extended, at most."""


class HealthSettings(Entry, frozen=True, kw_only=True):
    """Health checks of engines."""

    path: Path = "/health"
    interval_s: Wait = field(name="interval", default=Wait(2.0))
    timeout_s: Wait = field(name="timeout", default=Wait(2.0))
    failures: Annotated[int, Meta(ge=1, le=1000)] = 2
    jitter: Share = 0.1
    """Share of `interval` by which each round of checks is randomly extended, at most."""
    slow_start_s: Window = field(name="slow_start", default=Window(10.0))
    """Time over which a returned instance ramps up to its full share of requests; 0: no ramp."""
    panic: Share = 0.5
    """If a smaller share of a role's instances is available, health checks and breakers are ignored."""


class ScrapeSettings(Entry, frozen=True, kw_only=True):
    """Scraping of engine metrics."""

    path: Path = "/metrics"
    interval_s: Wait = field(name="interval", default=Wait(1.0))
    body_bytes: Size = field(name="body", default=Size(4e6))
    """Maximum size of a page; a longer one is not read."""


class AdapterSettings(Entry, frozen=True, kw_only=True):
    """A LoRA adapter that engines serve under its own name."""

    model: NonEmptyText | None = None
    """Name of its base model in the cluster file; None: the only one."""
    load_s: Window = field(name="load", default=Window(1.0))
    """Time that an engine needs to load it, for which instances that have it are preferred."""


class SessionAffinitySettings(Entry, frozen=True, kw_only=True):
    """Prefers the instances that have served a session last, as long as others are not much better."""

    header: HeaderName = "X-Session-Id"
    """Request header with the client's name of the session."""
    bonus_s: Wait = field(name="bonus", default=Wait(0.5))
    """Time by which such an instance may cost more than another one and is still chosen."""


class TracingSettings(Entry, frozen=True, kw_only=True):
    """OpenTelemetry spans over OTLP/HTTP; without a URL the client's trace context is forwarded unchanged."""

    otlp: Url | None = None
    share: Share = 1.0
    """Share of the requests that are traced if the client has made no sampling decision."""


class LogSettings(Entry, frozen=True, kw_only=True):
    """Logs of the gateway; they never contain a key or a prompt."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = False
    """Whether to log a line for each request."""
    events: str | None = None
    """File for every event and decision, read by `kvroute replay` and `kvroute explain`."""
    file_bytes: LogSize = field(name="file_size", default=LogSize(64e6))
    """Size from which an event log file is renamed with a number at its end, and a new file is started."""
    total_bytes: LogSize = field(name="total_size", default=LogSize(1e9))
    """Limit for all event log files of this name; beyond it the oldest are removed."""
    terms: TermsKept = "best"
    """Terms that the event log keeps if there are more than 64 candidates: those of the 16 cheapest and the chosen
    one, or all."""


class GatewaySettings(Entry, frozen=True, kw_only=True):
    """Settings of `kvroute serve`. Paths are absolute after `preflight` has read them."""

    listen: ListenSettings = ListenSettings()
    admin: AdminSettings = AdminSettings()
    policy: PolicyName = DEFAULT_DECODE_POLICY
    """The decode policy, or a mapping of its `name` and its parameters."""
    parameters: dict[str, PolicyParameter] = field(default_factory=dict)
    """Parameters of the policy: numbers, or times such as "50 ms". Targets need a unit."""
    shadow: str = ""
    """A second decode policy that is evaluated at every decision without acting on it; empty: none."""
    prefill: str = "cache-aware"
    """The prefill policy."""
    constraint: str = ""
    """`level:enforcement[:weight]`; empty: none."""
    reserve_bytes: Size | None = field(name="reserve", default=None)
    """KV memory reserved on every decode instance."""
    reserve_output_tokens: Limit = 4096
    """Maximum number of generated tokens for which a request reserves memory, even if it allows more."""
    models: dict[NonEmptyText, NonEmptyText] = field(default_factory=dict)
    """Aliases: a model's name for clients to its name in the cluster file."""
    adapters: dict[NonEmptyText, AdapterSettings] = field(default_factory=dict)
    """LoRA adapters by the name that clients and engines use."""
    session_affinity: SessionAffinitySettings | None = None
    """None: only the cached prefix of a session counts."""
    oracle: OracleSection = OracleSection()
    prompt: PromptSettings = PromptSettings()
    prefix: PrefixSource = "auto"
    """Source of the instances' cache contents: `events` of the engines, the gateway's own routing (`approximate`), or
    `auto`: events of the instances that have `kv_events`."""
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    health: HealthSettings = HealthSettings()
    scrape: ScrapeSettings = ScrapeSettings()
    keys: KeySettings = KeySettings()
    classes: dict[Name, ServiceClass] = field(default_factory=dict)
    """What keys may use, by the names that `keys.classes` gives; `default` is for all other requests. With any class
    the time to the first token of every request is predicted."""
    fair_queue: FairQueueSection | None = None
    """None: requests are sent to engines as they arrive, and wait there."""
    upstream_key_env: str | None = None
    """Environment variable with the engines' own key; it replaces the client's key, which the gateway checks."""
    forward_headers: list[HeaderName] = field(default_factory=list)
    """Request headers forwarded to engines, in addition to those of the SDKs and of tracing
    (`headers.FORWARDED`)."""
    passthrough: list[PassthroughPath] = field(default_factory=list)
    """Further paths whose requests are forwarded to one engine; `*` at the end stands for any rest. Paths that control
    engines are only forwarded if they are listed without `*`."""
    cache_salt: CacheSaltMode = "none"
    """Prompts that share the engines' prefix caches: all, those of one API key, or those of one tenant."""
    cache_salt_secret_env: str | None = None
    """Environment variable with the secret from which salts are derived; None: a random secret at each start."""
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()
    measure: Measure = "auto"
    """Source of transfer durations: the `engine`'s own counters, the `first-byte` of its response, or what is
    available."""
    layerwise: bool = False
    """Whether KV caches are fetched while they are computed, also within a datacenter; `offload.layerwise` is the same
    for prompts that another datacenter prefills."""
    forwarding_thread: bool = True
    """Whether a thread forwards the chunks of streams; otherwise the event loop does, for more CPU time."""
    offload: OffloadSection | None = None
    """Prefill across datacenters; None: instances are chosen regardless of their datacenter."""
    autoscaling: AutoscalingSection | None = None
    """Desired numbers of instances; None: they are not computed."""
    replication: ReplicationSection | None = None
    """Other gateways of the same cluster; None: this is the only one."""

    @property
    def remarks(self) -> list[str]:
        """What the user should know of these settings."""
        return self.control_spec().remarks(GatewaySettings().prefill)

    def policy_parameters(self) -> dict[str, float]:
        """Return the parameters of the policy as numbers, times in seconds.

        Raises:
            InputError: a text is neither; `where` is the name of the parameter.
        """
        return {name: policy_parameter(name, value) for name, value in self.parameters.items()}

    def policy_fields(self) -> dict[str, str]:
        """Return the fields of a log line about the policy."""
        parameters = {"parameters": parameters_text(self.parameters)} if self.parameters else {}
        return {"policy": self.policy, **parameters}

    def control_spec(self) -> ControlSpec:
        """Return the settings that determine the core's decisions: the first line of the event log."""
        return ControlSpec(
            decode=self.policy,
            parameters=self.policy_parameters(),
            shadow=self.shadow,
            prefill=self.prefill,
            constraint=self.constraint,
            oracle=self.oracle.oracle_settings(),
            reserve_bytes=float(self.reserve_bytes or 0.0),
            overcommit=True,
            cache_block_tokens=0 if self.prefix == "events" else self.prompt.block_tokens,
            offload=self.offload.spec() if self.offload is not None else None,
            layerwise=self.layerwise,
            predicts=bool(self.classes) or self.fair_queue is not None,
            scaling=self.autoscaling.spec() if self.autoscaling is not None else None,
            slow_start_s=float(self.health.slow_start_s),
            session_bonus_s=float(self.session_affinity.bonus_s) if self.session_affinity is not None else 0.0,
            adapters={name: float(adapter.load_s) for name, adapter in sorted(self.adapters.items())},
        )
