"""Compares the simulator with real time: the same trace, cluster, policy and seed, predicted and live.

`python -m bench.gateway.live_vs_sim` starts `kvroute serve --embedded`, plays the trace in real time, and compares TTFT
with `simulate`'s, as a whole, by part and by request. Two things differ: the live router receives cached blocks,
finished transfers and queue lengths over sockets, and every step costs real time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench.measurement import ROOT, Failed, Row, show

from kvroute.planner.comparison.requests import Workload
from kvroute.testbed.live import (
    Comparison,
    LiveComparisonSpec,
    embedded,
    observed,
    playable,
    predict,
    send_trace,
)
from kvroute.types import InputError

CLUSTER = ROOT / "examples" / "fat-tree-64gpu.yaml"
POLICIES = ("round-robin", "cla", "netkv", "foresight")
OUTPUT_MAX = 64
"""Maximum response length. Longer responses only make the bench longer: TTFT depends on the batch size."""
WITHIN = 0.10
SHOWN_PARTS = ("prefill", "transfer")
"""Parts of TTFT with rows; the text has the others, which take milliseconds."""


def compared(live_spec: LiveComparisonSpec) -> Comparison:
    """Return both results of one policy.

    Raises:
        Failed: the gateway did not start, or sent no response.
    """
    try:
        with embedded(live_spec) as starting:
            predicted, served = predict(live_spec), starting()
            answers, _ = send_trace(served, live_spec.trace)
            live = observed(answers, served.page("/metrics").decode())
    except InputError as error:
        raise Failed(str(error)) from None
    if not live.answered:
        raise Failed(f"no answer under {live_spec.policy}: {live.errors[0] if live.errors else 'no request'}")
    return Comparison(live_spec.policy, live, predicted)


def rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return the difference of the medians by policy, and the live parts of TTFT with the predicted ones."""
    made = []
    for comparison in comparisons:
        live, predicted = comparison.live, comparison.predicted
        what = f"{comparison.policy}, {len(live.ttft_s)} requests"
        own = f"a request's own TTFT is {100 * comparison.apart:.1f} % off (median)"
        note = f"{comparison.policy}: {live.answered} answered; {own}"
        pairs = [("median TTFT", live.ttft_p50_s, predicted.ttft_p50_s, note)]
        pairs += [(f"of the mean {part}", live.parts_s[part], predicted.parts_s[part], "") for part in SHOWN_PARTS]
        for measure, ours, peer, remark in pairs:
            row = Row(measure=f"{measure}, {what}", unit="s", better="lower", ours=ours, note=remark)
            made.append(msgspec.structs.replace(row, peer=peer, peer_name="simulated"))
        off, target = 100 * abs(comparison.off), 100 * WITHIN
        made.append(Row(measure=f"median TTFT, {what}: off by", unit="%", better="lower", ours=off, target=target))
    if len(comparisons) > 1:
        made.append(_gain(comparisons[0], comparisons[-1]))
    return made


def _gain(first: Comparison, last: Comparison) -> Row:
    return Row(
        measure=f"mean TTFT, {last.policy} over {first.policy}",
        unit="",
        better="lower",
        ours=last.live.ttft_mean_s / first.live.ttft_mean_s,
        peer=last.predicted.ttft_mean_s / first.predicted.ttft_mean_s,
        peer_name="simulated",
    )


def text(one: Comparison) -> str:
    """Return both results as JSON, without the list of requests."""
    halves = {"live": one.live, "predicted": one.predicted}
    plain = {
        side: {name: value for name, value in msgspec.to_builtins(half).items() if name != "ttft_s"}
        for side, half in halves.items()
    }
    return json.dumps({**plain, "apart_p50": one.apart})


def main() -> None:
    """Predict, play and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--cluster", type=Path, default=CLUSTER)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second")
    parser.add_argument("--profile", default="rag")
    parser.add_argument("--p-share", type=float, default=0.7)
    parser.add_argument("--prefill", default="cache-aware", help="prefill policy of both sides")
    parser.add_argument("--policy", action="append", help=f"repeat; default {', '.join(POLICIES)}")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    workload = Workload(
        generated_requests=given.requests, profile=given.profile, rate_per_s=given.rate, p_share=given.p_share
    )
    trace = playable(workload.of_seed(given.seed), OUTPUT_MAX)
    try:
        comparisons = [
            compared(LiveComparisonSpec(given.cluster, trace, policy, given.prefill, given.seed))
            for policy in given.policy or POLICIES
        ]
    except Failed as failed:
        sys.exit(str(failed))
    show(rows(comparisons), given.json, {comparison.policy: text(comparison) for comparison in comparisons})


if __name__ == "__main__":
    main()
