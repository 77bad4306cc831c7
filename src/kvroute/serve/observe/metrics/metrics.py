"""The gateway's Prometheus metrics: events are counted as they happen, and gauges are read at each scrape.

docs/metrics.md documents every name. Instances have the label `engine`, because Prometheus adds its own `instance` to
every sample. Single-threaded; a method costs about a microsecond or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from kvroute.serve.observe.metrics.exposition import LAG_S, REQUEST_S, Counter, Exemplar, Histogram, lines
from kvroute.serve.observe.metrics.load_gauges import TIER_LABELS, load_gauges
from kvroute.serve.observe.metrics.metric_groups import ClassMetrics, ReplicationMetrics
from kvroute.serve.observe.view import GatewayStatus, TtftBreakdown
from kvroute.types import (
    TIER_COUNT,
    Decision,
    Decode,
    Prefill,
    ReadKv,
    Replicas,
    Role,
    ScaleIn,
    ScaleOut,
    Shadowed,
    Side,
    SwitchRole,
)

Leg: TypeAlias = Literal["copy", "prefill", "decode", "passthrough"]

_TIER_KEYS = [(label,) for label in TIER_LABELS]
_PREFILL, _DECODE, _READ, _REJECT, _SWITCH_ROLE = ("prefill",), ("decode",), ("read",), ("reject",), ("switch_role",)
_SCALE = ("scale",)
_QUEUE, _TRANSFER, _FIRST_STEP = ("queue",), ("transfer",), ("first_step",)
_DECISION_S = (20e-6, 50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)


class Metrics:
    """Metrics of one gateway. Requests report events to it; `page` returns the text for a scraper."""

    def __init__(self, load: Callable[[], GatewayStatus], roles: dict[str, Role], *, version: str, policy: str) -> None:
        """Args: `load` returns the current load, called once per page; `roles` are by instance (replaced on reload)."""
        self._load, self.roles, self.version, self.policy = load, roles, version, policy
        self.shadow = ""
        """Name of the shadow policy."""
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        requests, legs = ("endpoint", "code"), ("leg", "engine", "kind")
        self._requests = Counter("kvroute_requests_total", "Requests answered, by endpoint and status.", requests)
        self._rejects = Counter("kvroute_rejects_total", "Requests rejected before any leg began.", ("reason",))
        self._gone = Counter("kvroute_client_disconnects_total", "Clients that disconnected early.")
        self._abandoned = Counter(
            "kvroute_abandoned_kv_total",
            "Requests that went on after their client had left, until a decode engine had fetched the KV cache, or to "
            "their failure.",
            ("outcome",),
        )
        self._stream_errors = Counter("kvroute_stream_errors_total", "Streams ended by an error event.")
        self._continued = Counter(
            "kvroute_continued_streams_total", "Streams that broke off and were given to another engine to continue."
        )
        self._retries = Counter("kvroute_retries_total", "Legs retried on another instance.", ("leg",))
        self._no_retry = Counter("kvroute_retries_refused_total", "Retries that the budget did not allow.", ("leg",))
        self._leg_failures = Counter("kvroute_leg_failures_total", "Failed legs.", legs)
        self._decisions = Counter("kvroute_decisions_total", "Decisions, by kind and instance.", ("kind", "engine"))
        self._decision_s = Histogram("kvroute_decision_seconds", "Time to decide.", _DECISION_S, ("kind",))
        self._ttft_s = Histogram(
            "kvroute_ttft_seconds", "From request read to first byte sent, for streams.", REQUEST_S, ("protocol",)
        )
        self._part_s = Histogram("kvroute_ttft_part_seconds", "Parts of the TTFT of streams.", REQUEST_S, ("part",))
        self._prefill_s = Histogram("kvroute_prefill_leg_seconds", "From prefill leg sent to its response.", REQUEST_S)
        self._decode_s = Histogram(
            "kvroute_decode_first_byte_seconds", "From decode leg sent to the first byte of its stream.", REQUEST_S
        )
        self._request_s = Histogram(
            "kvroute_request_seconds", "From request read to end of the response.", REQUEST_S, ("endpoint",)
        )
        self._transfer_s = Histogram(
            "kvroute_transfer_seconds",
            "KV transfer time as measured on streams, wait for a decode slot included.",
            REQUEST_S,
            ("tier",),
        )
        self._transfer_bytes = Counter("kvroute_transfer_bytes_total", "KV bytes of started transfers.", ("tier",))
        self._copies = Counter(
            "kvroute_copies_total", "Cached prefixes to be copied before a prefill, by outcome.", ("outcome",)
        )
        self._copy_bytes = Counter("kvroute_copy_bytes_total", "KV bytes of copied prefixes.", ("tier",))
        self._copy_s = Histogram("kvroute_copy_leg_seconds", "From copy leg sent to its response.", REQUEST_S)
        self._shadowed = Counter(
            "kvroute_shadow_decisions_total", "Decode decisions, by the shadow policy's verdict.", ("policy", "verdict")
        )
        self._shadow_s = Counter(
            "kvroute_shadow_seconds_total", "Predicted difference between the two choices.", ("policy", "by")
        )
        self._prompt_tokens = Counter("kvroute_prompt_tokens_total", "Tokens of all prompts.")
        self._tokenized = Counter(
            "kvroute_engine_tokenize_total", "Prompts that an engine was asked to tokenize, by outcome.", ("outcome",)
        )
        self._hit_tokens = Counter(
            "kvroute_prefix_hit_tokens_total", "Prompt tokens cached on the chosen instance.", ("leg",)
        )
        self._relayed_bytes = Counter("kvroute_relayed_bytes_total", "Response bytes relayed to clients.")
        self._lag_s = Histogram(
            "kvroute_event_loop_lag_seconds", "Delay with which the event loop runs a timer.", LAG_S
        )
        self._discarded = Counter(
            "kvroute_health_checks_discarded_total",
            "Health checks that are neither a success nor a failure.",
            ("engine",),
        )
        self._panics = Counter("kvroute_panics_total", "Panics that began.", ("model", "role"))
        self._out_of_files = Counter(
            "kvroute_file_descriptors_exhausted_total", "Times that no file descriptor was left, by use.", ("use",)
        )
        self._kv_events = Counter("kvroute_kv_events_total", "KV event batches from engines.", ("engine",))
        self._kv_gaps = Counter("kvroute_kv_event_gaps_total", "Gaps in an engine's KV events.", ("engine",))
        self._kv_failed = Counter(
            "kvroute_engine_transfer_failures_total", "KV transfers that an engine counts as failed.", ("engine",)
        )
        self._kv_expired = Counter(
            "kvroute_engine_kv_expired_total", "Requests whose KV no engine has fetched in time.", ("engine",)
        )
        self._log_bytes = Counter("kvroute_log_bytes_total", "Bytes written to the event log.")
        self._logs_lost = Counter("kvroute_logs_lost_total", "Event logs that ended because they could not be written.")
        self._reloads = Counter("kvroute_reloads_total", "Reloads of the cluster file, by outcome.", ("outcome",))
        self._offloads = Counter(
            "kvroute_offload_decisions_total",
            "Prefills, by chosen site and reason.",
            ("site", "reason"),
        )
        self._storage_reads = Counter(
            "kvroute_storage_reads_total",
            "Reads from the store, by the instance on whose node, its side and outcome.",
            ("engine", "side", "outcome"),
        )
        self._storage_bytes = Counter(
            "kvroute_storage_read_bytes_total", "Bytes read from the store, by instance and side.", ("engine", "side")
        )
        self._storage_read_s = Histogram(
            "kvroute_storage_read_seconds", "Complete reads from the store, with their queue.", REQUEST_S, ("side",)
        )
        self._reviews = Counter("kvroute_reviews_total", "Reviews of threshold and roles.", ("verdict",))
        self._scaled = Counter("kvroute_scale_actions_total", "Instances started and stopped.", ("action", "outcome"))
        self._role_switches = Counter("kvroute_role_switches_total", "Role switches, by outcome.", ("outcome",))
        self._engines_changed = Counter(
            "kvroute_engine_changes_total", "Discovered engines that joined or left the cluster.", ("change",)
        )
        self.replication = ReplicationMetrics()
        self.classes = ClassMetrics()
        self._transferring = [0] * TIER_COUNT

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a decision that `Control` took in this many seconds."""
        if type(decision) is Prefill:
            kind = _PREFILL
            self._decisions.add(("prefill", decision.instance))
            self._hit_tokens.add(kind, decision.cached_tokens)
            if decision.offload is not None:
                self._offloads.add((decision.offload.site, decision.offload.reason))
        elif type(decision) is Decode:
            kind = _DECODE
            self._decisions.add(("decode", decision.target))
            self._hit_tokens.add(kind, decision.hit_tokens)
            if decision.shadow is not None:
                self._shadow(decision, decision.shadow)
        elif type(decision) is ReadKv:
            kind = _READ
            self._decisions.add(("read", decision.prefill_instance))
        elif type(decision) is SwitchRole:
            kind = _SWITCH_ROLE
            self._decisions.add(("switch_role", decision.instance))
        elif isinstance(decision, Replicas | ScaleIn | ScaleOut):
            kind = _SCALE
            if not isinstance(decision, Replicas):
                self._decisions.add(("scale_in" if isinstance(decision, ScaleIn) else "scale_out", decision.instance))
        else:
            kind = _REJECT
            self._decisions.add(("reject", ""))
        self._decision_s.observe(kind, seconds)

    def _shadow(self, decision: Decode, shadow: Shadowed) -> None:
        same = shadow.target == decision.target
        self._shadowed.add((self.shadow, "same" if same else "differs" if shadow.target else "refuses"))
        if not same and shadow.loss_s is not None:
            self._shadow_s.add((self.shadow, "acting"), shadow.loss_s)
        if not same and shadow.gain_s is not None:
            self._shadow_s.add((self.shadow, "shadow"), shadow.gain_s)

    def prompt_read(self, tokens: int) -> None:
        """Count the tokens of a prompt."""
        self._prompt_tokens.add((), tokens)

    def engine_tokenized(self, outcome: Literal["tokens", "failed"]) -> None:
        """Count a prompt that an engine was asked to tokenize."""
        self._tokenized.add((outcome,), 1)

    def prefill_answered(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Observe a prefill leg that succeeded."""
        self._prefill_s.observe((), seconds, exemplar)

    def decode_answered(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Observe the first byte of a decode leg's stream."""
        self._decode_s.observe((), seconds, exemplar)

    def transfer_started(self, tier: int) -> None:
        """Count the start of a KV transfer; exactly one `transfer_ended` of the same tier follows each start."""
        self._transferring[tier] += 1

    def transfer_ended(self, tier: int, kv_bytes: float, landed: bool, seconds: float | None = None) -> None:
        """Count the end of a KV transfer. Its bytes count only if `landed`. `seconds` is given only if a stream has
        shown the duration; an expected duration is not a measurement."""
        self._transferring[tier] -= 1
        if landed:
            self._transfer_bytes.add(_TIER_KEYS[tier], kv_bytes)
            if seconds is not None:
                self._transfer_s.observe(_TIER_KEYS[tier], seconds)

    def copy_answered(self, seconds: float) -> None:
        """Observe a copy leg: the instance that has a cached prefix offers it for transfer."""
        self._copy_s.observe((), seconds)

    def copied(self, outcome: str, tier: int, kv_bytes: float) -> None:
        """Count a finished prefix copy by `outcome`, one of a few fixed words; bytes count if the copy has
        completed."""
        self._copies.add((outcome,))
        if outcome == "landed":
            self._copy_bytes.add(_TIER_KEYS[tier], kv_bytes)

    def storage_read(self, engine: str, side: Side, outcome: str, nbytes: float, seconds: float) -> None:
        """Count a part of a read from the store by `outcome`, one of a few fixed words. `seconds` includes the time in
        the queue of the buffer server."""
        self._storage_reads.add((engine, side, outcome))
        if nbytes:
            self._storage_bytes.add((engine, side), nbytes)
        if outcome == "complete":
            self._storage_read_s.observe((side,), seconds)

    def first_token(self, protocol: str, ttft: TtftBreakdown, exemplar: Exemplar | None = None) -> None:
        """Observe the first byte sent to the client of a streamed response; other responses do not show the first
        token."""
        self._ttft_s.observe((protocol,), ttft.total_s, exemplar)
        observe = self._part_s.observe
        observe(_QUEUE, ttft.queue_s)
        observe(_PREFILL, ttft.prefill_s)
        observe(_TRANSFER, ttft.transfer_s)
        observe(_FIRST_STEP, ttft.first_step_s)

    def finished(self, endpoint: str, code: int, seconds: float, relayed_bytes: int = 0) -> None:
        """Count a finished request, however it ended; 499: the client disconnected before any status was sent."""
        self._requests.add((endpoint, str(code)))
        self._request_s.observe((endpoint,), seconds)
        if relayed_bytes:
            self._relayed_bytes.add((), relayed_bytes)

    def rejected(self, reason: str) -> None:
        """Count a rejected request; `reason` is one of a few fixed words, never a sentence."""
        self._rejects.add((reason,))

    def leg_failed(self, leg: Leg, instance: str, kind: str) -> None:
        """Count a failed leg; `kind`: `refused`, `reset`, `timeout`, `malformed`, `status` or `out_of_files`."""
        self._leg_failures.add((leg, instance, kind))

    def retried(self, leg: Leg) -> None:
        """Count a leg that is retried on another instance."""
        self._retries.add((leg,))

    def retry_refused(self, leg: Leg) -> None:
        """Count a retry that the retry budget does not allow."""
        self._no_retry.add((leg,))

    def client_gone(self) -> None:
        """Count a client that disconnected before its response was complete."""
        self._gone.add()

    def abandoned(self, *, fetched: bool) -> None:
        """Count a request that went on after its client had left, so that the prefill engine releases its KV cache."""
        self._abandoned.add(("fetched" if fetched else "lost",))

    def stream_failed(self) -> None:
        """Count a stream that ended with an error event."""
        self._stream_errors.add()

    def stream_continued(self) -> None:
        """Count a stream that broke off and is continued by another engine."""
        self._continued.add()

    def loop_lagged(self, seconds: float) -> None:
        """Observe the delay of a periodic timer of the event loop."""
        self._lag_s.observe((), seconds)

    def health_check_discarded(self, instance: str) -> None:
        """Count a health check that timed out because the event loop was late: the engine may be healthy."""
        self._discarded.add((instance,))

    def panicked(self, model: str, role: str) -> None:
        """Count a panic: health checks and breakers of a role are ignored from now on."""
        self._panics.add((model, role))

    def out_of_files(self, use: str) -> None:
        """Count a connection for which no file descriptor was left; `use`: `client` or `engine`."""
        self._out_of_files.add((use,))

    def kv_events(self, instance: str, batches: int = 1) -> None:
        """Count received batches of KV events."""
        self._kv_events.add((instance,), batches)

    def kv_gap(self, instance: str) -> None:
        """Count a gap in the KV events of an engine."""
        self._kv_gaps.add((instance,))

    def kv_lost(self, instance: str, failed: int, expired: int) -> None:
        """Count transfers that have failed, and requests whose KV has expired, as an engine reports them."""
        if failed:
            self._kv_failed.add((instance,), failed)
        if expired:
            self._kv_expired.add((instance,), expired)

    def logged(self, nbytes: int) -> None:
        """Count bytes written to the event log."""
        self._log_bytes.add((), nbytes)

    def log_lost(self) -> None:
        """Count an event log that cannot be written any more."""
        self._logs_lost.add()

    def reloaded(self, outcome: Literal["taken", "refused"]) -> None:
        """Count a reload of the cluster file."""
        self._reloads.add((outcome,))

    def reviewed(self, verdict: str) -> None:
        """Count a search for threshold and roles; `verdict` is one of a few fixed words."""
        self._reviews.add((verdict,))

    def scaled(
        self, action: Literal["start", "stop"], outcome: Literal["done", "failed", "declined", "abandoned"]
    ) -> None:
        """Count an instance that was to start or stop."""
        self._scaled.add((action, outcome))

    def role_switch_ended(self, outcome: Literal["switched", "failed", "declined", "abandoned"]) -> None:
        """Count a finished role switch."""
        self._role_switches.add((outcome,))

    def changed(self, joined: int, left: int) -> None:
        """Count a change of the cluster by discovery."""
        self._engines_changed.add(("joined",), joined)
        self._engines_changed.add(("left",), left)

    def forget(self, engine: str) -> None:
        """Drop the counters of an engine that has left the cluster."""
        self.roles.pop(engine, None)
        for counted in vars(self).values():
            if isinstance(counted, Counter):
                counted.forget("engine", engine)

    def page(self, accept: str = "") -> tuple[str, Iterator[str]]:
        """Return the content type and the text family by family, so that a server can run other work in between.

        The format is OpenMetrics, which has exemplars, if the Accept header names it; else the plain format.
        """
        if "application/openmetrics-text" in accept:
            return openmetrics_exposition.CONTENT_TYPE_LATEST, self._page(True)
        return CONTENT_TYPE_PLAIN_0_0_4, self._page(False)

    async def whole_page(self, accept: str) -> tuple[str, Iterator[str]]:
        """Do the same; for callers that may have to wait for other processes."""
        return self.page(accept)

    def _page(self, openmetrics: bool) -> Iterator[str]:
        for counted in vars(self).values():
            if isinstance(counted, Counter | Histogram):
                yield counted.text(openmetrics)
            elif isinstance(counted, ReplicationMetrics | ClassMetrics):
                for part in vars(counted).values():
                    yield part.text(openmetrics)
        gauges = load_gauges(self._load(), self._transferring, self.roles, version=self.version, policy=self.policy)
        for family, samples in gauges:
            yield lines(family, samples, openmetrics)
        generate = openmetrics_exposition.generate_latest if openmetrics else generate_latest
        yield generate(self._process).decode()
