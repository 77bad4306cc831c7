"""The sections `classes:` and `fair_queue:` of the gateway's settings: rates, priorities, weights and SLOs of keys."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from kvroute.serve.config.field_types import Limit, Wait
from kvroute.topology.schema import Entry

DEFAULT_CLASS = "default"
"""Name of the class of the keys that name none, and of requests without a key."""
Band = Annotated[int, Meta(ge=-100, le=100)]
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
PerMinute = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class SloSettings(Entry, frozen=True, kw_only=True):
    """Limit on the time to the first token."""

    ttft_s: Wait | None = field(name="ttft", default=None)
    """Longest time from the arrival of a request to its first token; None: only requests with the header have a
    limit."""
    late: Literal["refuse", "defer"] = "refuse"
    """What happens to a request whose predicted TTFT is longer: it is refused, or it waits until the prediction fits or
    no instance can meet its limit any more."""
    header: bool = False
    """Whether the request header `X-Slo-Ttft-Ms` replaces `ttft`."""


class ServiceClass(Entry, frozen=True, kw_only=True):
    """What each API key of the class may use. Rates hold for each key by itself."""

    requests_per_minute: PerMinute | None = None
    """None: no limit."""
    tokens_per_minute: PerMinute | None = None
    """Tokens of prompts and outputs together; None: no limit."""
    priority: Band = 0
    """Requests of a higher priority leave the queue first."""
    priority_max: Band | None = None
    """Highest priority that a request may ask for; None: `priority`."""
    weight: Weight = 1.0
    """Share of the served seconds of work, relative to the other keys that wait with the same priority."""
    slo: SloSettings | None = None

    @property
    def rated(self) -> bool:
        """Whether a rate is limited."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


class FairQueueSection(Entry, frozen=True, kw_only=True):
    """When requests wait in the gateway instead of at the engines."""

    work_s: Wait = field(name="work", default=Wait(1.0))
    """A request waits while every prefill instance of its model has this much predicted work ahead of it."""
    running: Limit | None = None
    """A request waits while so many requests of its model are on the instances; None: as many as all decode instances
    have batch slots."""
