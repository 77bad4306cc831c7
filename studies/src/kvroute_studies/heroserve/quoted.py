"""What the pages quote of HeroServe's experiments."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

from kvroute.planner.comparison.cells import Record
from kvroute_studies.heroserve.run import AGGREGATION, ONLINE, RINGS, STALE, TABLE
from kvroute_studies.heroserve.serving import LATENCY, MEMORY, PREDICTION, SCALABILITY
from kvroute_studies.heroserve.tables import VIEWS, gains, range_grids
from kvroute_studies.heroserve.throughput import LOSS, THROUGHPUT, WIRES
from kvroute_studies.shared.heroserve_baselines import RETRY_S, WITHOUT
from kvroute_studies.shared.provenance import MODULES
from kvroute_studies.shared.result_files import Quoted, ResultTable, table_of

ONLINE_CODE = (
    "kvroute/compiled.py",
    "kvroute/flows",
    "kvroute/collectives",
    "kvroute/sim/groups",
    "kvroute_studies/heroserve/run.py",
)
SERVING_CODE = (
    *(entry for entry in MODULES if not entry.startswith("kvroute_studies/")),
    "kvroute_studies/heroserve/serving.py",
    "kvroute_studies/heroserve/setup.py",
    "kvroute_studies/shared/heroserve_baselines.py",
)
THROUGHPUT_CODE = (
    "kvroute/collectives",
    "kvroute/files/units_in_structs.py",
    "kvroute/flows",
    "kvroute/sim/groups",
    "kvroute/topology",
    "kvroute_engine/agent/schemes.py",
    "kvroute_engine/switch",
    "kvroute_studies/heroserve/throughput.py",
    "kvroute_studies/shared/heroserve_baselines.py",
)
_TITLES = {
    TABLE: "`periodic-table`, 10 ms",
    STALE: "eight stale replicas of `outstanding`",
    RINGS: "`outstanding`, rings only",
    AGGREGATION: "`outstanding`, aggregation only",
}


def _slowdowns(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the mean slowdown by policy and point."""
    spans, backgrounds = ONLINE.axes["span"], ONLINE.axes["background"]
    points = [(span, background) for background in backgrounds for span in spans]
    columns = [f"span {span:g}{', other traffic' if background else ''}" for span, background in points]
    rows = []
    for policy in ONLINE.policies:
        row = [_TITLES.get(policy, f"`{policy}`")]
        for span, background in points:
            point = {"span": span, "background": background}
            some = [
                record.figures["slowdown_mean"]
                for record in records
                if record.cell.policy == policy and record.cell.settings == point
            ]
            row.append(f"{sum(some) / len(some):.2f}")
        rows.append(row)
    return {"slowdowns": ResultTable(["policy", *columns], rows)}


def _rates(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    [rates] = range_grids(SCALABILITY, records)
    return {"rates": table_of(rates)}


def _over_published(records: Sequence[Record]) -> Mapping[str, str]:
    """Return the range over the baselines of the publication."""
    return {"over-published": _over(_rates(records)["rates"], ("ring", "switchml", "atp-5", "atp-25"))}


def _over(rates: ResultTable, baselines: Sequence[str]) -> str:
    columns = [rates.columns.index(f"over {baseline}") for baseline in baselines]
    ends = [end for row in rates.rows for column in columns for end in re.findall(r"\d+\.\d+", row[column])]
    return _ends([float(end) for end in ends])


def _times(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    ttft, tpot = range_grids(LATENCY, records)
    return {"ttft": table_of(ttft), "tpot": table_of(tpot)}


def _factors(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return how many times faster the fastest scheme is than the hierarchical ring, over the sizes of the tensor."""
    found = gains(records, VIEWS[THROUGHPUT.name].metrics[0], WITHOUT)
    columns = ["servers x GPUs", *(f"{wire.type}, {wire.slots} slots" for wire in WIRES.values())]
    rows = []
    for span in THROUGHPUT.axes["span"]:
        for gpus in THROUGHPUT.axes["gpus"]:
            by_wire: dict[str, list[float]] = {profile: [] for profile in WIRES}
            for (profile, point), gain in found.items():
                if point[:2] == (span, gpus):
                    by_wire[profile].append(gain)
            rows.append([f"{span:g} x {gpus:g}", *map(_ends, by_wire.values())])
    return {"factors": ResultTable(columns, rows)}


def _shares(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the share of the rate without loss that is left, for 2, 4 and 8 workers."""

    def rate(policy: str, workers: float, slots: float, loss: float) -> float:
        point = {"workers": workers, "slots": slots, "loss": loss}
        some = [
            record.figures["gb_per_s"]
            for record in records
            if (record.cell.policy, record.cell.settings) == (policy, point)
        ]
        return sum(some) / len(some)

    waits = {policy: f"{1e6 * wait_s:g} us" for policy, wait_s in RETRY_S.items()}
    columns = [(loss, policy) for loss in LOSS.axes["loss"] if loss for policy in waits]
    rows = []
    for slots in LOSS.axes["slots"]:
        row = [f"{slots:g} slots"]
        for loss, policy in columns:
            shares = (rate(policy, n, slots, loss) / rate(policy, n, slots, 0.0) for n in LOSS.axes["workers"])
            row.append(" / ".join(f"{share:.2f}" for share in shares))
        rows.append(row)
    titles = [f"{100 * loss:g} %, wait {waits[policy]}" for loss, policy in columns]
    return {"shares": ResultTable(["2 / 4 / 8 workers", *titles], rows)}


def _model_share(records: Sequence[Record]) -> Mapping[str, str]:
    """Return the share of the model's rate that the protocol reaches without loss."""
    some = [record.figures for record in records if not record.cell.settings["loss"]]
    shares = [100 * figures["gb_per_s"] / figures["model_gb_per_s"] for figures in some]
    return {"of-the-model": f"{min(shares):.0f} to {max(shares):.0f} %"}


def _groups(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return rate and KV memory by span; policies with the same numbers share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for span in MEMORY.axes["span"]:
        for policy in MEMORY.policies:
            runs = [
                record.figures
                for record in records
                if (record.cell.policy, record.cell.settings["span"]) == (policy, span)
            ]
            rate, share, used, tpot = (
                sum(run[key] for run in runs) / len(runs)
                for key in ("rate_per_gpu", "kv_mean_share", "kv_mean_gb_per_gpu", "tpot_mean_ms")
            )
            texts = (f"{rate:.3f}", f"{100 * share:.0f} %", f"{used / rate:.1f}", f"{tpot:.1f}")
            rows.setdefault(("chosen" if not span else f"{span:g} servers", *texts), []).append(f"`{policy}`")
    columns = [
        "groups",
        "policy",
        "requests/s per GPU",
        "KV memory in use, mean",
        "GB of KV per decode GPU, over the rate",
        "TPOT, ms",
    ]
    return {"groups": ResultTable(columns, [[key[0], ", ".join(names), *key[1:]] for key, names in rows.items()])}


def _memory(records: Sequence[Record]) -> Mapping[str, str]:
    shares = [100 * record.figures["kv_mean_share"] for record in records]
    kv_per_rate = {
        policy: statistics.mean(
            record.figures["kv_mean_gb_per_gpu"] / record.figures["rate_per_gpu"]
            for record in records
            if record.cell.policy == policy and record.cell.settings["span"] == 4
        )
        for policy in ("heroserve", "hierarchical-ring", "ring")
    }
    below = {policy: f"{100 * (1 - kv_per_rate['heroserve'] / kv):.0f} %" for policy, kv in kv_per_rate.items()}
    return {
        "in-use": f"{min(shares):.0f} to {max(shares):.0f} %",
        "kv-below-ring": below["ring"],
        "kv-below-hierarchical-ring": below["hierarchical-ring"],
        "attainment": f"{100 * min(record.figures['attainment'] for record in records):.1f} %",
    }


def _policies(records: Sequence[Record]) -> Mapping[str, ResultTable]:
    """Return the predicted rate and the share of the requests within the SLOs by load; policies with the same numbers
    share a row."""
    loads = PREDICTION.axes["load"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for policy in PREDICTION.policies:
        some = [record for record in records if record.cell.policy == policy]
        texts = [f"{some[0].figures['predicted_per_s']:.2f}"]
        for load in loads:
            met = [100 * record.figures["attainment"] for record in some if record.cell.settings["load"] == load]
            texts.append(f"{sum(met) / len(met):.0f} %")
        rows.setdefault(tuple(texts), []).append(f"`{policy}`")
    columns = ["policy", "predicted, requests/s", *(f"at {load:.2f}" for load in loads)]
    return {"policies": ResultTable(columns, [[", ".join(names), *texts] for texts, names in rows.items()])}


def _sustained(records: Sequence[Record]) -> Mapping[str, str]:
    """Return between which loads the share of the requests within the SLOs falls below the predicted 90 %."""
    loads = sorted(PREDICTION.axes["load"])
    met = {
        (policy, load): statistics.mean(
            record.figures["attainment"]
            for record in records
            if record.cell.policy == policy and record.cell.settings["load"] == load
        )
        for policy in PREDICTION.policies
        for load in loads
    }
    held = [max((load for load in loads if met[policy, load] >= 0.9), default=0.0) for policy in PREDICTION.policies]
    above = [min((load for load in loads if load > most), default=most) for most in held]
    return {"sustained": f"{min(held):g} to {max(above):g}"}


def _ends(values: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


_CHAT = ("opt-66b-chat",)
QUOTED: Mapping[str, Quoted] = {
    "heroserve-ina-loss": Quoted((LOSS.name,), 2, THROUGHPUT_CODE, _shares, _model_share),
    "heroserve-ina-throughput": Quoted((THROUGHPUT.name,), 1, THROUGHPUT_CODE, _factors),
    "heroserve-latency": Quoted((LATENCY.name,), 1, SERVING_CODE, _times, profiles=_CHAT),
    "heroserve-memory": Quoted((MEMORY.name,), 1, SERVING_CODE, _groups, _memory, profiles=_CHAT),
    "heroserve-online": Quoted((ONLINE.name,), 5, ONLINE_CODE, _slowdowns),
    "heroserve-prediction": Quoted((PREDICTION.name,), 1, SERVING_CODE, _policies, _sustained, profiles=_CHAT),
    "heroserve-scalability": Quoted((SCALABILITY.name,), 1, SERVING_CODE, _rates, _over_published),
}
"""By name of the result."""
