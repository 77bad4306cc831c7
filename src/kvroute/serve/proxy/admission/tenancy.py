"""What the service classes grant to a request: its rate, priority, weight and deadline. It places and sends nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvroute.serve.api.json_fields import Fields, RequestError, shown, wrong
from kvroute.serve.api.responses import error_body
from kvroute.serve.config.service_classes import DEFAULT_CLASS, ServiceClass
from kvroute.serve.proxy.admission.rate_limits import KeyRates, OtherUsage, RateExceeded, RateLimiter

if TYPE_CHECKING:
    from kvroute.http.headers import Headers
    from kvroute.serve.config.settings import GatewaySettings

PRIORITY_HEADER, SLO_HEADER = b"x-priority", b"x-slo-ttft-ms"
BAND_MAX = 100
_NEVER = 400
"""Status of a request that its key's limit is too low for at any time."""
SLO_MAX_MS = 86_400_000.0
_PLAIN = ServiceClass()
_OUTPUT_WEIGHT = 0.05
"""Weight of the newest output in the mean length of outputs."""
_FIRST_OUTPUT_TOKENS = 128.0
"""Assumed mean length of an output before the first one has ended."""


class Refusal(NamedTuple):
    """The response to a request that is not served now."""

    status: int
    reason: str
    metric_reason: str
    """Reason in metrics."""
    retry_after_s: int
    """Value of Retry-After; a status that no retry changes has no such header."""
    headers: Headers

    @property
    def body(self) -> bytes:
        """OpenAI's error JSON."""
        if self.status == _NEVER:
            return error_body(self.reason, "invalid_request_error", code="request_too_large")
        kind = "rate_limit_error" if self.status == 429 else "service_unavailable"
        code = "rate_limit_exceeded" if self.metric_reason.startswith("rate_") else self.metric_reason
        return error_body(self.reason, kind, code=code)


class ClassGrant(NamedTuple):
    """What a request may use."""

    name: str
    """Name of its class."""
    band: int
    weight: float
    slo_s: float | None
    """Longest time from its arrival at the gateway to its first token; None: no limit."""
    defers: bool
    """True if it waits when its first token would come too late; otherwise it is refused."""


class Charge:
    """What one request has been charged; ended once, by `settle` or `refund`."""

    __slots__ = ("_limiter", "_open", "key", "tokens")

    def __init__(self, limiter: RateLimiter, key: str, tokens: int) -> None:
        self._limiter, self.key, self.tokens = limiter, key, tokens
        self._open = True

    def settle(self, used_tokens: int, now: float) -> None:
        """Replace the reserve by the tokens that were used."""
        if self._open:
            self._open = False
            self._limiter.settle(self.key, self.tokens, used_tokens, now)

    def refund(self, now: float) -> None:
        """Take the charge back: no engine has served the request."""
        if self._open:
            self._open = False
            self._limiter.refund(self.key, self.tokens, now)


class RequestAccount:
    """How long a request has waited, and what it has used: for the rates of its key and for metrics."""

    __slots__ = (
        "arrived_at",
        "charge",
        "key",
        "predicted_s",
        "prompt_tokens",
        "service_class",
        "ticket",
        "ttft_s",
    )

    def __init__(self, received_at: float) -> None:
        self.ticket = 0
        """Ticket of its admission."""
        self.key: str | None = None
        """Name of its client's key, if keys are in use."""
        self.charge: Charge | None = None
        """What it counts against the rates of its key; None: they are not limited."""
        self.service_class = ""
        """Name of its class."""
        self.arrived_at = received_at
        self.predicted_s: float | None = None
        """Time to its first token as the core has predicted it."""
        self.ttft_s: float | None = None
        """Time from its arrival at the core to its first token."""
        self.prompt_tokens: int | None = None
        """Tokens of its prompt, as an engine has reported them."""


class Tenancy:
    """The service classes of the settings, and the buckets of the keys."""

    def __init__(self, settings: GatewaySettings, others: OtherUsage | None = None) -> None:
        """Args: `others`: what other processes charge against the same limits."""
        self._classes: dict[str, ServiceClass] = {}
        self._class_names: dict[str, str] = {}
        self._rated = False
        self.limiter = RateLimiter(lambda key: KeyRates(), others)
        self.output_tokens = _FIRST_OUTPUT_TOKENS
        """Mean length of the last outputs."""
        self.change(settings)

    def change(self, settings: GatewaySettings) -> None:
        """Use other settings; buckets keep their levels unless the rates of their key have changed."""
        self._classes = dict(settings.classes)
        self._class_names = dict(settings.keys.classes)
        self._rated = any(grant.rated for grant in self._classes.values())
        classes, names = self._classes, self._class_names

        def rates_of(key: str) -> KeyRates:
            found = classes.get(names.get(key, DEFAULT_CLASS), _PLAIN)
            return KeyRates(found.requests_per_minute, found.tokens_per_minute)

        self.limiter.change(rates_of)

    def class_of(self, key: str | None) -> tuple[str, ServiceClass]:
        """Return the class of a key and its name; None: that of requests without a key."""
        name = self._class_names.get(key, DEFAULT_CLASS) if key is not None else DEFAULT_CLASS
        return name, self._classes.get(name, _PLAIN)

    def class_grant(self, key: str | None, headers: Headers, fields: Fields) -> ClassGrant:
        """Return what a request may use. `fields` are those of its body.

        Raises:
            RequestError: 400, the priority or the SLO of the request is not a number.
        """
        name, found = self.class_of(key)
        band, asked = found.priority, _priority(headers, fields)
        if asked is not None:
            band = min(asked, found.priority if found.priority_max is None else found.priority_max)
        slo = found.slo
        if slo is None:
            return ClassGrant(name, band, found.weight, None, False)
        slo_s = float(slo.ttft_s) if slo.ttft_s is not None else None
        if slo.header and (given := _header(headers, SLO_HEADER)) is not None:
            slo_s = _slo_s(given)
        return ClassGrant(name, band, found.weight, slo_s, slo.late == "defer")

    # Rates

    def exhausted(self, key: str | None, now: float) -> Refusal | None:
        """Return the response to a request of a key whose buckets are empty; None if they are not."""
        if not self._rated or key is None:
            return None
        exceeded = self.limiter.exhausted(key, now)
        return None if exceeded is None else self._refusal(key, exceeded, now)

    def charge(self, key: str | None, tokens: int, now: float) -> Charge | Refusal | None:
        """Charge a request; None if its rate is not limited. Args: `tokens`: its prompt and a reserve for its
        output."""
        if not self._rated or key is None or not self.class_of(key)[1].rated:
            return None
        exceeded = self.limiter.charge(key, tokens, now)
        return Charge(self.limiter, key, tokens) if exceeded is None else self._refusal(key, exceeded, now)

    def headers(self, key: str, now: float) -> Headers:
        """Return the headers that tell a client its limits and what is left of them."""
        headers: Headers = []
        for limited, limit, remaining, reset_s in self.limiter.states(key, now):
            name = limited.encode()
            headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
            headers.append((b"x-ratelimit-remaining-" + name, b"%d" % remaining))
            headers.append((b"x-ratelimit-reset-" + name, _duration(reset_s)))
        return headers

    def answered(self, output_tokens: int) -> None:
        """Learn the length of an output."""
        self.output_tokens += (output_tokens - self.output_tokens) * _OUTPUT_WEIGHT

    def _refusal(self, key: str, exceeded: RateExceeded, now: float) -> Refusal:
        status = _NEVER if exceeded.retry_after_s is None else 429
        metric_reason, retry_after_s = f"rate_{exceeded.limited}", exceeded.retry_after_s or 0
        return Refusal(status, exceeded.reason, metric_reason, retry_after_s, self.headers(key, now))


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for header, value in headers if header == name), None)


def _priority(headers: Headers, fields: Fields) -> int | None:
    """Return the priority that a request asks for, higher first; None if it asks for none. In the field `priority`, as
    vLLM has it, a lower number comes first."""
    given, sign = _header(headers, PRIORITY_HEADER), 1
    raw = fields.get("priority")
    if given is None and (raw is None or bytes(raw) == b"null"):
        return None
    name, text = ("the header X-Priority", given) if given is not None else ("priority", bytes(raw or b""))
    try:
        number = msgspec.json.decode(text.strip(), type=int)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise wrong(name, f"{shown(text)} is not an integer", "give one or leave it out") from None
    sign = 1 if given is not None else -1
    return max(-BAND_MAX, min(sign * number, BAND_MAX))


def _slo_s(given: bytes) -> float:
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= SLO_MAX_MS:
        what = f"the header X-Slo-Ttft-Ms: {shown(given)} is not a number of milliseconds above 0"
        raise RequestError(f"{what}; give one, or leave it out", code="invalid_value")
    return milliseconds / 1e3


def _duration(seconds: float) -> bytes:
    """Return a time as OpenAI writes it: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % math.ceil(1e3 * seconds)
    if seconds < 60:
        return f"{math.ceil(10 * seconds) / 10:g}s".encode()
    whole = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole, 60)
