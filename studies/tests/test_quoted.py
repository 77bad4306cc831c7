"""What the pages quote is computed from records: every experiment's tables show each policy, point and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest

from kvroute.planner.comparison.cells import Cell, Record
from kvroute.sim.metrics import RequestCounts, Spread, Summary, TtftParts
from kvroute_studies.command import families
from kvroute_studies.heroserve.quoted import QUOTED as HEROSERVE
from kvroute_studies.netkv.quoted import QUOTED as NETKV
from kvroute_studies.never_worse.quoted import QUOTED as NEVER_WORSE
from kvroute_studies.prfaas.burst import DUAL, static
from kvroute_studies.prfaas.quoted import QUOTED as PRFAAS
from kvroute_studies.shared.result_files import Quoted, ResultTable

Value = Callable[[Cell], float]


def record(cell: Cell, ttft_s: float, **figures: float) -> Record:
    """Return a run with a mean TTFT; its P99 is twice that."""
    summary = Summary(
        policy=cell.policy,
        seed=cell.seed,
        requests=RequestCounts(arrived=1, finished=1, rejected=0, in_flight=0),
        measured=1,
        ttft_s=Spread(mean=ttft_s, p50=ttft_s, p95=ttft_s, p99=2 * ttft_s),
        ttft_parts_s=TtftParts(),
        transfer_s=Spread(mean=ttft_s / 2),
        tbt_s=Spread(mean=0.0127),
        tpot_s=Spread(),
        slo_attainment=0.9,
        goodput_per_s=10.0 - ttft_s,
        throughput_per_s=1.0,
        tier_share={"3": 0.25},
        cache_hit=0.0,
        prefill_cache_hit=0.965,
        kv_bytes=0.0,
        link_load={},
        wall_s=0.0,
        cpu_s=0.0,
    )
    config = {"n_prefill": 3, "n_decode": 5, "threshold_tokens": 19_600.0, "offered_per_s": 2.5}
    return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=figures)


def records(quoted: Quoted, ttft_s: Value, seeds: int = 3, **figures: Value) -> list[Record]:
    """Return a record for every cell of a result's experiments."""
    family = next(family for family in families().values() if quoted.experiments[0] in family.experiments)
    found = []
    for name in quoted.experiments:
        experiment = family.experiments[name]
        for profile, point, seed, policy in product(
            quoted.profiles or experiment.profiles,
            product(*experiment.axes.values()),
            range(seeds),
            experiment.policies,
        ):
            settings = dict(zip(experiment.axes, map(float, point), strict=True))
            cell = Cell(experiment=name, reading="", profile=profile, settings=settings, policy=policy, seed=seed)
            numbers = {key: value(cell) for key, value in figures.items()}
            found.append(record(cell, ttft_s(cell) * (1 + 0.001 * seed), **numbers))
    return found


def rows(table: ResultTable) -> dict[str, list[str]]:
    """Return the rows by their first cell; every row has all columns."""
    assert {len(row) for row in table.rows} == {len(table.columns)}
    return {row[0]: row[1:] for row in table.rows}


def netkv_s(cell: Cell) -> float:
    """NetKV is 10 % faster than CLA*, but 20 % slower at 250 % load."""
    if cell.policy == "round-robin":
        return 2.5
    slower = 1.2 if cell.settings.get("load") == 2.5 else 0.9
    return 2.0 * slower if cell.policy.startswith("netkv") else 2.0


def test_gains_of_netkv_are_shown_at_every_point_and_losses_are_bold() -> None:
    quoted = NETKV["netkv-paper"]
    some = records(quoted, netkv_s)
    found = rows(quoted.tables(some)["experiments"])
    assert found["load"][1] == "50 %, 75 %, 100 %, 125 %, 150 %, 200 %, 250 %"
    assert found["load"][2:] == ["10, 10, 10, 10, 10, 10, **-20**"] * 3
    assert found["CLA* over round-robin"][2] == ", ".join(["20"] * 7)
    assert [name for name in found if name.startswith("topology")] == [f"topology {n}:1" for n in (1, 2, 4, 8)]
    assert found["ablation: tier map"][2:] == ["10"] * 3
    assert found["ablation: congestion"][2:] == ["0"] * 3
    assert found["points where NetKV is slower"][2:] == ["1 of 53, 1 beyond noise, at most 20.0 %"] * 3


def test_one_seed_shows_no_significance() -> None:
    quoted = NETKV["netkv-literal"]
    some = records(quoted, netkv_s, seeds=1)
    assert rows(quoted.tables(some)["experiments"])["load"][2].endswith(", -20")
    assert rows(quoted.tables(some)["experiments"])["points where NetKV is slower"][2].startswith("1 of 48, 0 beyond")


def test_rag_is_shown_beside_the_publication() -> None:
    quoted = NETKV["netkv-rag"]
    some = records(quoted, netkv_s)
    found = rows(quoted.tables(some)["policies"])
    assert found["CLA*"] == ["1812 ± 15", "2002 ± 2", "12.71", "12.70", "0.923", "0.900", "835", "1001"]
    assert quoted.figures(some)["netkv-over-cla"] == "0.90"
    assert quoted.figures(some)["in-pod-netkv"] == "75 %"


KEPT = {"prfaas": 3.0, "homogeneous": 2.0, "naive": 2.5}


def case_study(quoted: Quoted) -> list[Record]:
    """Queues keep up with 4 % less than the formula."""
    return records(
        quoted,
        lambda cell: cell.settings["load"],
        keeps_up_per_s=lambda cell: 0.96 * KEPT[cell.policy],
        lambda_max_per_s=lambda cell: KEPT[cell.policy],
        lambda_exact_per_s=lambda cell: 0.98 * KEPT[cell.policy],
        ttft_p90_s=lambda cell: 4.0,
        prfaas_wait_s=lambda cell: 0.25,
        pd_p_wait_s=lambda cell: 0.5,
        pd_d_wait_s=lambda cell: 0.0,
    )


def test_throughput_with_queues_is_shown_beside_the_formula() -> None:
    some = case_study(PRFAAS["prfaas-sustained"])
    found = rows(PRFAAS["prfaas-sustained"].tables(some)["systems"])
    assert found["PrfaaS-PD"] == ["3.000", "2.940", *["2.880 ± 0.000"] * 3]
    assert PRFAAS["prfaas-sustained"].figures(some)["over-naive"] == "+20 %"
    traced = [one_profile(record, "trace") for record in some if record.cell.profile == "poisson"]
    found = rows(PRFAAS["prfaas-mooncake"].tables(traced)["systems"])
    assert found["naive heterogeneous"] == ["3/5, 19,600", "2.50 /s", "2.40 /s", "-4 %"]
    loads = rows(PRFAAS["prfaas-ttft"].tables(some)["loads"])
    assert list(loads) == ["50 %", "70 %", "80 %", "90 %", "95 %", "100 %"]
    assert loads["90 %"][:5] == ["0.90 s", "4.00 s", "0.25 s", "0.50 s", "-"]
    agents = rows(PRFAAS["prfaas-agents"].tables(traced)["systems"])
    assert agents["PrfaaS-PD, 90 %"] == ["3/5, 19,600", "3.00 /s", "2.50 /s", "2.88", "0.25 s, 0.50 s", "96.5 %"]


def one_profile(record: Record, profile: str) -> Record:
    """Return a record under another profile."""
    cell = Cell(**{name: getattr(record.cell, name) for name in record.cell.__struct_fields__} | {"profile": profile})
    return Record(key=cell.key, cell=cell, config=record.config, summary=record.summary, figures=record.figures)


def test_the_scheduler_is_shown_beside_the_best_the_old_and_the_planned_threshold() -> None:
    """A scenario in which it loses says so."""
    quoted = PRFAAS["prfaas-burst"]

    def goodput(cell: Cell) -> float:
        if cell.profile == "calm":
            return 9.0 if cell.policy != static(8_000) else 8.9
        return {DUAL: 8.0, static(16_000): 9.0}.get(cell.policy, 5.0)

    found = quoted.tables(records(quoted, lambda cell: 10 - goodput(cell)))["scenarios"]
    assert found.columns[-2:] == ["to the best for the old traffic (12,500)", "to the planner's (19,600)"]
    [best, difference] = rows(found)["link-30"][1:3]
    assert best.endswith("(16,000)")
    assert difference.startswith("-11.")


def test_a_cell_that_foresight_loses_is_named() -> None:
    quoted = NEVER_WORSE["never-worse"]

    def ttft_s(cell: Cell) -> float:
        if cell.policy == "foresight":
            return 1.1 if cell.profile == "literal/load=2" and cell.seed < 8 else 0.8
        return {"clairvoyant": 0.75}.get(cell.policy, 1.0)

    table = quoted.tables(records(quoted, ttft_s, seeds=10))["targets"]
    assert table.columns[2:] == ["seeds 0 to 7", "seeds 8 to 9"]
    found = rows(table)
    assert found["cells worse than CLA* by more than two standard errors"][1:] == [
        "**1 of 115: `literal/load=2` +10.0 %**",
        "0 of 115",
    ]
    assert found["geometric mean of mean TTFT, against CLA*"] == ["12 % below", "19.8 %", "20.0 %"]
    assert found["above a local search that knows all future requests"][1].startswith("**6.")
    assert found["P99 worse"][1] == "2 of 230 (0.9 %)"


def test_schemes_are_shown_by_span_and_wire() -> None:
    quoted = HEROSERVE["heroserve-ina-throughput"]
    some = records(
        quoted,
        lambda cell: 1.0,
        time_us=lambda cell: cell.settings["kib"] / (cell.settings["span"] if cell.policy == "heroserve" else 1),
    )
    found = rows(quoted.tables(some)["factors"])
    assert len(found) == 6
    assert found["4 x 1"] == ["4.00"] * 4


def test_shares_without_loss_are_of_the_same_workers_and_slots() -> None:
    quoted = HEROSERVE["heroserve-ina-loss"]
    some = records(
        quoted,
        lambda cell: 1.0,
        gb_per_s=lambda cell: cell.settings["slots"] * (1 - 10 * cell.settings["loss"]) / cell.settings["workers"],
        model_gb_per_s=lambda cell: cell.settings["slots"],
    )
    found = quoted.tables(some)["shares"]
    assert found.columns[1:3] == ["0.1 %, wait 100 us", "0.1 %, wait 1000 us"]
    assert rows(found)["32 slots"] == ["0.99 / 0.99 / 0.99"] * 2 + ["0.90 / 0.90 / 0.90"] * 2
    assert quoted.figures(some) == {"of-the-model": "12 to 50 %"}


@pytest.mark.parametrize("name", ["heroserve-memory", "heroserve-prediction"])
def test_policies_with_the_same_numbers_share_a_row(name: str) -> None:
    quoted = HEROSERVE[name]
    faster: Mapping[str, float] = {"heroserve": 2.0, "hierarchical-ring": 2.0}
    some = records(
        quoted,
        lambda cell: 1.0,
        rate_per_gpu=lambda cell: faster.get(cell.policy, 1.0),
        predicted_per_s=lambda cell: faster.get(cell.policy, 1.0),
        kv_mean_share=lambda cell: 0.8,
        kv_mean_gb_per_gpu=lambda cell: 8.0,
        tpot_mean_ms=lambda cell: 50.0,
        attainment=lambda cell: 0.99,
    )
    [table] = quoted.tables(some).values()
    policies = [row[0 if name.endswith("prediction") else 1] for row in table.rows]
    assert policies[:2] == [
        "`ring`, `multi-rail-ring`, `switchml`, `atp-5`, `atp-25`",
        "`hierarchical-ring`, `heroserve`",
    ]
    assert len(policies) == (2 if name.endswith("prediction") else 8)


def test_prose_quotes_ranges_of_heroserve() -> None:
    """Over the published baselines alone; between the loads where 90 % fails; memory over four servers."""
    faster = {"heroserve": 2.0, "multi-rail-ring": 0.5, "ring": 1.6}
    quoted = HEROSERVE["heroserve-scalability"]
    rates = records(quoted, lambda cell: 1.0, 1, rate_per_gpu=lambda cell: faster.get(cell.policy, 1.0))
    assert quoted.figures(rates) == {"over-published": "1.25 to 2.00"}
    quoted = HEROSERVE["heroserve-prediction"]
    met = {("ring", 1.15): 0.8, ("ring", 1.3): 0.7, ("heroserve", 1.3): 0.8}
    loads = records(
        quoted, lambda cell: 1.0, 1, attainment=lambda cell: met.get((cell.policy, cell.settings["load"]), 0.95)
    )
    assert quoted.figures(loads) == {"sustained": "1 to 1.3"}
    quoted = HEROSERVE["heroserve-memory"]
    some = records(
        quoted,
        lambda cell: 1.0,
        1,
        rate_per_gpu=lambda cell: faster.get(cell.policy, 1.0) if cell.settings["span"] == 4 else 9.0,
        kv_mean_gb_per_gpu=lambda cell: 8.0,
        kv_mean_share=lambda cell: 0.8,
        attainment=lambda cell: 0.99,
    )
    figures = quoted.figures(some)
    assert (figures["kv-below-ring"], figures["kv-below-hierarchical-ring"]) == ("20 %", "50 %")
