"""A load generator: sends the requests of a trace to a live server and measures the times of its responses."""

from kvroute.load.client import LoadClient
from kvroute.load.replay import (
    LEAD_S,
    VOCABULARY,
    EventStreamParser,
    ReplayedResponse,
    TimedRequest,
    prompt_tokens,
    replay_trace,
    timed_requests,
)

__all__ = [
    "LEAD_S",
    "VOCABULARY",
    "EventStreamParser",
    "LoadClient",
    "ReplayedResponse",
    "TimedRequest",
    "prompt_tokens",
    "replay_trace",
    "timed_requests",
]
