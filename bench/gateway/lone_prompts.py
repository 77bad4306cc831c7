"""Single prompts to the embedded two-datacenter example, one after the other: TTFT live and simulated."""

from __future__ import annotations

from bench.measurement import Failed, Row

from kvroute.testbed.live import (
    Comparison,
    LiveComparisonSpec,
    embedded,
    observed,
    predict,
    send_trace,
)
from kvroute.types import InputError


def compared(live_spec: LiveComparisonSpec, name: str) -> tuple[Comparison, str]:
    """Return the live and the predicted result, and the gateway's metrics afterwards. Raises Failed if the gateway did
    not start, or if a response is missing."""
    try:
        with embedded(live_spec) as starting:
            predicted, served = predict(live_spec), starting()
            answers, _ = send_trace(served, live_spec.trace)
            page = served.page("/metrics").decode()
            live = observed(answers, page)
    except InputError as error:
        raise Failed(str(error)) from None
    if live.answered < len(live_spec.trace.requests):
        raise Failed(f"{name}: {live.answered} answers; {'; '.join(live.errors[:1])}")
    return Comparison(name, live, predicted), page


def ttft_row(what: str, ours_s: float, simulated_s: float) -> Row:
    """Return the row of one length in one mode."""
    return Row(measure=f"TTFT, {what}", unit="s", better="lower", ours=ours_s, peer=simulated_s, peer_name="simulated")
