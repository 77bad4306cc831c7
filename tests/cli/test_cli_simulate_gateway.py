"""`kvroute simulate` does what `kvroute serve` would do with the section `gateway` of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_rig import CLUSTER, EXAMPLES, Ended, Kvroute, document

RUN = ("--requests", "60", "--seeds", "1", "--workers", "1")


def file_with(section: str) -> str:
    """Write the example with this `gateway` section, and return the file's name."""
    Path("mine.yaml").write_text(Path(CLUSTER).read_text() + f"gateway: {section}\n")
    return "mine.yaml"


def runs(ended: Ended) -> dict[str, Any]:
    return {run["policy"]: run for run in document(ended)["runs"]}


def test_the_parameters_of_the_file_are_those_of_its_policy(kvroute: Kvroute) -> None:
    """With `aggregated: 0` no request is served alone; the same requests without it are, in part."""
    crowded = (*RUN, "--rate", "8", "--policy", "foresight-joint", "--json")
    assert runs(kvroute("simulate", CLUSTER, *crowded))["foresight-joint"]["aggregated_share"] > 0.0
    assert (
        runs(kvroute("simulate", file_with("{parameters: {aggregated: 0}}"), *crowded))["foresight-joint"][
            "aggregated_share"
        ]
        == 0.0
    )


@pytest.mark.parametrize(
    "section",
    [
        "{parameters: {aggregated: 3}}",
        "{parameters: {elsewhere: 1}}",
        "{policy: netcv}",
        "{constraint: rak}",
        "{limits: {in_flight: 0}}",
        "{offload: {short_term: {utilisation_low: 0.9, utilisation_high: 0.8}}}",
    ],
)
def test_a_section_that_topology_check_rejects_is_not_simulated(kvroute: Kvroute, section: str) -> None:
    """Both commands print the same errors, with file, line and field."""
    checked, simulated = kvroute("topology", "check", file_with(section)), kvroute("simulate", "mine.yaml", *RUN)
    assert (checked.code, simulated.code, simulated.out) == (2, 2, "")
    assert simulated.err.splitlines()[-1].removeprefix("kvroute: ") in checked.err.splitlines()
    assert "mine.yaml:" in simulated.err


def test_the_policy_of_the_file_is_compared_and_named(kvroute: Kvroute) -> None:
    """It runs beside the usual ones, and only policies that have its parameters get them."""
    file = file_with("{policy: foresight-closed, parameters: {imposed_weight: 2, answer_weight: 0.5}}")
    ended = kvroute("simulate", file, *RUN, "--json", "--out", "results")
    names = ["round-robin", "cla", "netkv", "foresight", "foresight-joint", "foresight-closed"]
    assert list(runs(ended)) == names
    assert "mine.yaml serves with foresight-closed (imposed_weight=2, answer_weight=0.5)" in ended.err
    given = {"imposed_weight": 2.0, "answer_weight": 0.5}
    assert parameters_by_policy() == {
        "round-robin": {}, "cla": {}, "netkv": {},
        "foresight": given, "foresight-joint": given, "foresight-closed": given,
    }  # fmt: skip


def parameters_by_policy() -> dict[str, dict[str, float]]:
    """Return the parameters of each policy in the results."""
    import json

    records = [json.loads(line) for line in Path("results/results.jsonl").read_text().splitlines()]
    return {record["cell"]["policy"]: record["config"]["control"]["parameters"] for record in records}


def test_what_is_not_modelled_is_named_in_one_line(kvroute: Kvroute) -> None:
    """Only keys that the file has are named; keys that no simulated request can notice are not."""
    section = (
        "{listen: {port: 1}, log: {access: true}, retries: {attempts: 2}, limits: {in_flight: 9, per_key: 4},"
        " classes: {default: {slo: {ttft: 9 s, late: defer}}, gold: {weight: 2}}, prefix: auto}"
    )
    err = kvroute("simulate", file_with(section), *RUN, "--policy", "netkv").err
    (line,) = [line for line in err.splitlines() if "not modelled" in line]
    assert line == (
        "mine.yaml: not modelled: gateway.classes.default.slo.late, gateway.classes.gold, gateway.limits.per_key, "
        "gateway.retries"
    )
    assert "not modelled" not in kvroute("simulate", CLUSTER, *RUN, "--policy", "netkv").err


def test_options_override_the_file_and_say_so(kvroute: Kvroute) -> None:
    section = (
        "{policy: netkv, prefill: round-robin, constraint: 'rack:preferred:0.5', oracle: {stale_after: 9 s},"
        " classes: {default: {slo: {ttft: 9 s}}}}"
    )
    options = ("--policy", "cla", "--prefill-policy", "least-loaded", "--constraint", "pod:fallback")
    ended = kvroute(
        "simulate", file_with(section), *RUN, *options, "--stale-after", "2s", "--slo-ttft", "1s", "--json",
        "--out", "results",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for line in (
        "--policy cla replaces gateway.policy: netkv",
        "--prefill-policy least-loaded replaces gateway.prefill: round-robin",
        "--constraint pod:fallback replaces gateway.constraint: rack:preferred:0.5",
        "--stale-after 2 s replaces gateway.oracle.stale_after: 9 s",
        "--slo-ttft 1 s replaces gateway.classes.default.slo.ttft: 9 s",
    ):
        assert line in ended.err.splitlines()
    plain = kvroute("simulate", CLUSTER, *RUN, *options)
    assert "replaces" not in plain.err


def test_the_targets_of_the_file_are_the_slo(kvroute: Kvroute) -> None:
    """The limit of the default class comes first, refused or deferred, then the policy's targets; --slo-ttft replaces
    both. Parameters that a compared policy does not have are named."""
    targets = "policy: {name: foresight-joint, tpot: 50 ms, ttft: 3 s}"
    ended = kvroute("simulate", file_with(f"{{{targets}}}"), *RUN, "--policy", "netkv,foresight")
    assert "≤3s TPOT ≤50ms %" in " ".join(ended.out.split())
    for line in (
        "--policy netkv, foresight replaces gateway.policy: foresight-joint (tpot=50 ms, ttft=3 s)",
        "no effect on netkv: tpot and ttft of foresight-joint",
        "no effect on foresight: ttft of foresight-joint",
    ):
        assert line in ended.err.splitlines()
    late = f"{{{targets}, classes: {{default: {{slo: {{ttft: 4 s, late: defer}}}}}}}}"
    ended = kvroute("simulate", file_with(late), *RUN, "--policy", "foresight-joint")
    assert "≤4s TPOT ≤50ms %" in " ".join(ended.out.split())
    assert "no effect" not in ended.err
    ended = kvroute("simulate", file_with(late), *RUN, "--policy", "foresight-joint", "--slo-ttft", "1s")
    assert "≤1s TPOT ≤50ms %" in " ".join(ended.out.split())


def test_limits_and_classes_of_the_file_refuse_requests(kvroute: Kvroute) -> None:
    """One request in flight and none waiting: of a burst the others are rejected. A short SLO refuses late ones."""
    burst = (*RUN, "--rate", "50", "--policy", "netkv", "--json")
    limited = runs(kvroute("simulate", file_with("{limits: {in_flight: 1, queue: 0}}"), *burst))["netkv"]
    assert limited["requests"]["finished"] >= 1
    assert limited["requests"]["rejected"] > 30
    assert limited["reject_reason"] == "the gateway is full"
    late = runs(kvroute("simulate", file_with("{classes: {default: {slo: {ttft: 700 ms}}}}"), *burst))["netkv"]
    assert late["requests"]["rejected"] > 0
    assert runs(kvroute("simulate", CLUSTER, *burst))["netkv"]["requests"]["rejected"] == 0


def test_a_scenario_overrides_the_offloading_of_the_file(kvroute: Kvroute) -> None:
    """Without a scenario the file's own section offloads; `offload: none` switches it off."""
    file, run = str(EXAMPLES / "two-datacenters.yaml"), (*RUN, "--rate", "3", "--policy", "netkv", "--json")
    (own,) = document(kvroute("simulate", file, *run))["runs"]
    assert own["threshold_tokens"] is not None
    Path("none.yaml").write_text("offload: none\n")
    ended = kvroute("simulate", file, *run, "--scenario", "none.yaml")
    assert document(ended)["runs"][0]["threshold_tokens"] is None
    assert "--scenario none.yaml replaces gateway.offload" in ended.err.splitlines()
