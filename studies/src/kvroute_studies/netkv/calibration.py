"""Fits the compute times that NetKV does not publish to rows of its Table II, on the tuning slice."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from kvroute.planner.comparison.cells import Cell
from kvroute_studies.netkv.setup import Study, run_of

TABLE_II = {
    "round-robin": {"ttft_s": 1.969, "tbt_s": 12.74e-3, "transfer_s": 0.993},
    "cla": {"ttft_s": 1.812, "tbt_s": 12.71e-3, "transfer_s": 0.835},
    "netkv": {"ttft_s": 1.598, "tbt_s": 12.94e-3, "transfer_s": 0.620},
}
"""RAG at 100 % load: mean TTFT, TBT and transfer time, in seconds."""
ROUNDS = 6


class CalibrationFit(msgspec.Struct, frozen=True, kw_only=True):
    """The four fitted numbers, and the values of the three rows that result on the slice used for fitting."""

    prefill_per_token_s: float
    decode_base_s: float
    decode_per_request_s: float
    rest_s: dict[str, float]
    """Mean of TTFT minus transfer time with the fit, by policy, in seconds; Table II has 0.976 to 0.978 s."""
    tbt_s: dict[str, float]


def calibrate(study: Study, seeds: tuple[int, ...] = (0, 1, 2)) -> CalibrationFit:
    """Fit the prefill slope to TTFT minus transfer time, and the decode line to TBT; no other value of the table is
    used.

    The decode line and the batch sizes depend on each other, so the fit takes several rounds. Transfer times are not
    fitted: they result from the fabric and the lengths in the trace.
    """
    study = replace(study, tuning=True)
    for _ in range(ROUNDS):
        reading = study.reading
        rest_s, tbt_s, tokens = _measure(study, seeds)
        wanted_rest_s = np.mean([row["ttft_s"] - row["transfer_s"] for row in TABLE_II.values()])
        first_step_s = np.mean([row["tbt_s"] for row in TABLE_II.values()])
        # The remainder beyond prefill and first step is the wait for the running iteration, on average about half of
        # one.
        waiting_s = np.mean(list(rest_s.values())) - np.mean(list(tbt_s.values()))
        waiting_s -= reading.times.prefill_per_token_s * tokens + reading.times.prefill_base_s
        slope_s = (wanted_rest_s - first_step_s - waiting_s - reading.times.prefill_base_s) / tokens
        batch = {
            name: (value - reading.times.decode_base_s) / reading.times.decode_per_request_s
            for name, value in tbt_s.items()
        }
        per_request_s, base_s = np.polyfit(list(batch.values()), [TABLE_II[name]["tbt_s"] for name in batch], 1)
        times = msgspec.structs.replace(
            reading.times,
            prefill_per_token_s=float(slope_s),
            decode_base_s=float(base_s),
            decode_per_request_s=float(per_request_s),
        )
        study = replace(study, reading=msgspec.structs.replace(reading, times=times))
    rest_s, tbt_s, _ = _measure(study, seeds)
    return CalibrationFit(
        prefill_per_token_s=study.reading.times.prefill_per_token_s,
        decode_base_s=study.reading.times.decode_base_s,
        decode_per_request_s=study.reading.times.decode_per_request_s,
        rest_s=rest_s,
        tbt_s=tbt_s,
    )


def _measure(study: Study, seeds: tuple[int, ...]) -> tuple[dict[str, float], dict[str, float], float]:
    """Return TTFT minus transfer time and TBT by policy, and the mean prompt length of the slice."""
    rest_s, tbt_s, tokens = {}, {}, 0.0
    for policy in TABLE_II:
        runs = [
            run_of(
                study,
                Cell(
                    experiment="calibration",
                    reading=study.reading.name,
                    profile="rag",
                    settings={"load": 1.0},
                    policy=policy,
                    seed=seed,
                ),
            )
            for seed in seeds
        ]
        summaries = [run.summary for run in runs]
        rest_s[policy] = float(
            np.mean([(summary.ttft_s.mean or 0.0) - (summary.transfer_s.mean or 0.0) for summary in summaries])
        )
        tbt_s[policy] = float(np.mean([summary.tbt_s.mean or 0.0 for summary in summaries]))
        tokens = float(np.mean(runs[0].outcomes.input_tokens))
    return rest_s, tbt_s, tokens
