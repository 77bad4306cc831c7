"""NetKV's experiments: the sweeps are the paper's, all policies of a seed get the same requests, the ladder holds."""

from __future__ import annotations

import numpy as np
import pytest

from kvroute.planner.comparison.cells import Cell
from kvroute.types import InputError
from kvroute_studies.netkv.calibration import TABLE_II, calibrate
from kvroute_studies.netkv.cases import EXPERIMENTS
from kvroute_studies.netkv.readings import READINGS, reading
from kvroute_studies.netkv.setup import (
    MEASURE_S,
    WARMUP_S,
    Study,
    cluster_of,
    rate_per_s,
    requests_of,
    run_of,
)
from kvroute_studies.shared.cells import cells

READING_NAMES = sorted(READINGS)


def cell(policy: str = "netkv", profile: str = "rag", seed: int = 0, **settings: float) -> Cell:
    """Return a cell without a specific experiment."""
    return Cell(experiment="test", reading="paper", profile=profile, settings=settings, policy=policy, seed=seed)


def test_the_seven_experiments_sweep_the_papers_axes() -> None:
    """Cells per seed are axis points times policies times three profiles; keys are unique."""
    per_seed = {
        name: len(cells(experiment, "paper", experiment.profiles, (0,))) for name, experiment in EXPERIMENTS.items()
    }
    assert per_seed == {
        "netkv-load": 7 * 6 * 3,
        "netkv-context": 7 * 4 * 3,
        "netkv-topology": 20 * 3 * 3,
        "netkv-staleness": 7 * 3 * 3,
        "netkv-prefix": 6 * 3 * 3,
        "netkv-ablation": 4 * 3,
        "netkv-scale": 5 * 2 * 3,
    }
    keys = [cell.key for experiment in EXPERIMENTS.values() for cell in cells(experiment, "paper", ("rag",), (0, 1))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", READING_NAMES)
def test_policies_of_a_seed_get_the_same_requests(name: str) -> None:
    """Only the seed changes them."""
    study = Study(reading(name))
    first, other = (requests_of(study, cell(policy)) for policy in ("cla", "netkv"))
    assert first == other
    assert requests_of(study, cell(seed=1)) != first
    assert all(0 <= request.at_s < WARMUP_S + MEASURE_S for request in first.requests)


@pytest.mark.parametrize("name", READING_NAMES)
def test_the_cluster_is_that_of_netkv(name: str) -> None:
    """64 GPUs have 4 prefill instances in one rack, 4 decode instances in their pod and 8 in others; larger clusters
    repeat this."""
    cluster = cluster_of(reading(name), cell())
    roles = np.array([instance.role for instance in cluster.instances])
    prefill, decode = np.flatnonzero(roles == "prefill"), np.flatnonzero(roles == "decode")
    assert (len(prefill), len(decode)) == (4, 12)
    for source in prefill:
        assert np.bincount(cluster.tier[source, decode], minlength=4).tolist() == [0, 0, 4, 8]
    large = cluster_of(reading(name), cell(gpus=256))
    assert [sum(instance.role == role for instance in large.instances) for role in ("prefill", "decode")] == [16, 48]


def test_oversubscription_scales_the_pod_uplinks() -> None:
    """1:1 has no difference between tiers, 8:1 leaves an eighth of the NIC's rate across pods."""
    for ratio, expected in ((1, [12.5e9, 12.5e9]), (4, [6.25e9, 3.125e9]), (8, [6.25e9, 1.5625e9])):
        cluster = cluster_of(reading("paper"), cell(oversubscription=ratio))
        assert cluster.tier_bytes_per_s[2:4].tolist() == expected
        assert {cluster.links[link].bytes_per_s for link in cluster.links_of_tier(3)} == {expected[1]}


def test_the_rate_scales_with_load_and_cluster_size() -> None:
    """6.09 RAG requests a second at 100 % on 64 GPUs."""
    study = Study(reading("paper"))
    assert rate_per_s(study, cell()) == pytest.approx(6.09)
    assert rate_per_s(study, cell(load=2.5)) == pytest.approx(15.225)
    assert rate_per_s(study, cell(gpus=1024)) == pytest.approx(97.44)
    arrived = len(requests_of(study, cell(load=2.0)).requests)
    assert arrived == pytest.approx(2 * 6.09 * 20, rel=0.35)  # a window of a bursty trace


def test_the_trace_is_repeated_to_fill_the_window_of_a_large_cluster() -> None:
    """1,024 GPUs need more chatbot requests than the trace has: it is repeated, and no copy reuses another one's
    blocks."""
    study = Study(reading("realistic"))
    large = cell(profile="chatbot", gpus=1024)
    requests = requests_of(study, large).requests
    assert len(requests) == pytest.approx(20 * rate_per_s(study, large), rel=0.35)
    assert max(request.at_s for request in requests) > 15
    few = {block for request in requests[:200] for block in request.blocks}
    assert len({block % (1 << 60) for block in few}) == len(few)


def test_policy_ladder_on_the_generated_trace() -> None:
    """RAG at 100 % in the paper's reading: round-robin is slowest, and NetKV sends most KV inside the pod."""
    study = Study(reading("paper"))
    runs = {policy: run_of(study, cell(policy)).summary for policy in ("round-robin", "cla", "netkv")}
    ttft_s = {policy: run.ttft_s.mean or 0.0 for policy, run in runs.items()}
    assert ttft_s["netkv"] < ttft_s["cla"] < ttft_s["round-robin"]
    assert runs["netkv"].tier_share["2"] > 0.6 > 0.5 > runs["cla"].tier_share["2"]
    assert runs["netkv"].tier_share["0"] == runs["netkv"].tier_share["1"] == 0.0


def test_a_stale_oracle_changes_nothing_under_steady_background() -> None:
    """The refresh interval matters only when the measured values change (NetKV VI-F)."""
    study = Study(reading("paper"))
    means = [run_of(study, cell(background=0.2, refresh_s=refresh_s)).summary.ttft_s for refresh_s in (0.1, 60.0)]
    assert means[0] == means[1]


def test_calibration_reproduces_the_rows_it_was_fitted_on() -> None:
    """TTFT minus transfer is within 5 ms, TBT within 0.1 ms; the transfer times of the table are not used."""
    calibration = calibrate(Study(reading("paper")), seeds=(0,))
    for policy, row in TABLE_II.items():
        assert calibration.rest_s[policy] == pytest.approx(row["ttft_s"] - row["transfer_s"], abs=5e-3)
        assert calibration.tbt_s[policy] == pytest.approx(row["tbt_s"], abs=1e-4)


def test_fields_of_a_reading_can_be_changed() -> None:
    """Fields and compute times are given as text; the name lists the changes; other fields stay."""
    changed = reading("paper", ["ecmp=flow", "pod_uplinks=8", "prefill_queueing=true", "decode_base_s=0.02"])
    assert (changed.ecmp, changed.pod_uplinks, changed.prefill_queueing) == ("flow", 8, True)
    assert (changed.times.decode_base_s, changed.rack_uplinks) == (0.02, reading("paper").rack_uplinks)
    assert changed.name == "paper+ecmp=flow+pod_uplinks=8+prefill_queueing=true+decode_base_s=0.02"


@pytest.mark.parametrize("change", ["ecmp=packet", "uplinks=3", "name=mine", "pod_uplinks=many", "ecmp"])
def test_an_invalid_change_is_named(change: str) -> None:
    """The field is unknown or the value is invalid."""
    with pytest.raises(InputError, match="--set"):
        reading("paper", [change])


def test_an_unknown_reading_is_named() -> None:
    """`--reading liberal`."""
    with pytest.raises(InputError, match="choose one of paper, literal, realistic"):
        reading("liberal")
