"""`prfaas-kv-throughput`: KV bytes per second of prefill by model and length (PrfaaS eq. 1), measured and computed.

It is arithmetic on published tables. A number that was fitted to a table is never compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.llm import MODELS
from kvroute.planner.comparison.cells import Cell
from kvroute.planner.throughput.kv_throughput import PUBLISHED_GBPS, PUBLISHED_TOKENS, egress_bytes_per_s
from kvroute_studies.shared.cells import Computed, Experiment

HYBRID = "prfaas-1t-hybrid"
HYBRID_MIB = (190.8, 308.9, 701.3, 2316.3)
HYBRID_PREFILL_S = (0.44, 0.72, 1.84, 7.40)
HYBRID_GBPS = (3.61, 3.59, 3.19, 2.62)
"""PrfaaS Table 5, at PUBLISHED_TOKENS. The table prints size, time and throughput, so eq. 1 can be checked."""
NEED_GPUS = 512
"""Size of the cluster whose egress need section 2.3 computes."""
KV_THROUGHPUT = Experiment(
    name="prfaas-kv-throughput",
    title="KV throughput over prompt length",
    source="PrfaaS Tables 3 and 5, eq. 1 and 2",
    axes={"tokens": tuple(float(tokens) for tokens in PUBLISHED_TOKENS)},
    policies=(HYBRID, *PUBLISHED_GBPS),
    profiles=("8xh200",),
    expectation="dense models need tens of Gbps per eight GPUs, hybrid models less than ten",
    versus=(HYBRID, "minimax-m2.5"),
    certain=("8xh200",),
)


def computed(cells: Iterable[Cell]) -> list[Computed]:
    """Compute the cells of `prfaas-kv-throughput`; figures that are unknown for a model are absent."""
    return [
        Computed(key=cell.key, cell=cell, config={"source": KV_THROUGHPUT.source}, figures=_of(cell)) for cell in cells
    ]


def _of(cell: Cell) -> dict[str, float]:
    place = PUBLISHED_TOKENS.index(int(cell.settings["tokens"]))
    if cell.policy == HYBRID:
        kv_bytes, prefill_s = HYBRID_MIB[place] * 2**20, HYBRID_PREFILL_S[place]
        computed_gbps = kv_bytes / prefill_s * 8 / 1e9
        figures = {"published_gbps": HYBRID_GBPS[place], "computed_gbps": computed_gbps}
        figures |= {"kv_mib": HYBRID_MIB[place], "prefill_s": prefill_s}
    else:
        published_gbps = PUBLISHED_GBPS[cell.policy][place]
        figures = {"published_gbps": published_gbps} | _implied(cell.policy, PUBLISHED_TOKENS[place], published_gbps)
    need = egress_bytes_per_s(NEED_GPUS, 8, figures["published_gbps"] * 1e9 / 8)
    return figures | {"need_gbps": need * 8 / 1e9}


def _implied(name: str, tokens: int, published_gbps: float) -> dict[str, float]:
    """Return the KV size if the model's layers are known, and the prefill time implied by the published throughput."""
    model = MODELS.get(name)
    if model is None:
        return {}
    kv_bytes = float(model.kv_bytes(tokens))
    return {"kv_mib": kv_bytes / 2**20, "implied_prefill_s": kv_bytes * 8 / (published_gbps * 1e9)}
