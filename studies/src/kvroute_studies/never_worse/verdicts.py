"""Three sweeps over the cells of `never_worse_cases`, as data: foresight against the policies it replaces, without each
of its terms, and against a search with knowledge of the future."""

from __future__ import annotations

from kvroute_studies.never_worse.cases import CASES
from kvroute_studies.shared.cells import Experiment

BASELINES = ("round-robin", "load-aware", "cache-aware", "cla", "netkv-topo", "netkv-static", "netkv")
POLICIES = (*BASELINES, "foresight-closed", "foresight-joint", "foresight")
RIVALS = ("cla", "netkv")
"""Policies that foresight must not be worse than in any cell."""

Variant = tuple[str, dict[str, float]]
VARIANTS: dict[str, Variant] = {
    "foresight": ("foresight", {}),
    "no receiver's NIC": ("foresight", {"target_nic_factor": 0.0}),
    "no sender's NIC": ("foresight", {"source_nic_factor": 0.0}),
    "no uplinks": ("foresight", {"uplink_factor": 0.0}),
    "no collisions": ("foresight", {"rival_weight": 0.0, "sibling_weight": 0.0}),
    "nothing learned": ("foresight", {"factor_min": 1.0, "factor_max": 1.0}),
    "no delay of others": ("foresight", {"imposed_weight": 0.0}),
    "no slot wait": ("foresight", {"wait_weight": 0.0}),
    "no slot price": ("foresight", {"slot_weight": 0.0}),
    "no slot wait or price": ("foresight", {"wait_weight": 0.0, "slot_weight": 0.0}),
    "no price of others' tokens": ("foresight", {"answer_weight": 0.0, "step_weight": 0.0}),
    "others' tokens without a bound": ("foresight", {"answer_transfers": 1e9}),
    "closed form": ("foresight-closed", {}),
    "pair chosen at arrival": ("foresight-joint", {}),
    "NICs configured half as fast": ("foresight", {"source_nic_factor": 0.5, "target_nic_factor": 0.5}),
    "NICs configured twice as fast": ("foresight", {"source_nic_factor": 2.0, "target_nic_factor": 2.0}),
    "NICs configured four times as fast": ("foresight", {"source_nic_factor": 4.0, "target_nic_factor": 4.0}),
}
"""foresight without each of its terms, and with wrong NIC speeds: a policy and its parameters."""

CLAIRVOYANT = "clairvoyant"
SEEN = ("cla", "netkv", "foresight", CLAIRVOYANT)
"""Policies compared with that search."""
SHORT_S, SEEN_SEEDS = 6.0, 3
"""Measured seconds and maximum number of seeds for that comparison; it is short because every request is tried on every
candidate."""
_FORESEEN = (
    "paper/load=1",
    "paper/load=2",
    "literal/load=0.25",
    "realistic/load=1.2",
    "nic100-flow/load=1",
    "nic150-flow/load=1.5",
    "nic150-flow/background=0.4 truthful",
    "nic100-flow/node load=1",
    "paper/slots=4 load=1",
    "paper/0.5 ms per request",
)

MATRIX = Experiment(
    name="never-worse-matrix",
    title="Never worse",
    source="kvroute",
    axes={},
    policies=POLICIES,
    profiles=tuple(CASES),
    expectation="in no cell is foresight's mean TTFT significantly above CLA* or NetKV",
    versus=("foresight", "cla"),
)
ABLATION = Experiment(
    name="never-worse-ablation",
    title="Ablation: one term removed at a time",
    source="kvroute",
    axes={},
    policies=tuple(VARIANTS),
    profiles=tuple(name for name, case in CASES.items() if case.ablated),
    expectation="no term is harmful, and each is needed in some cell",
    versus=("foresight", "cla"),
)
FORESEEN = Experiment(
    name="never-worse-clairvoyant",
    title="Comparison with known future",
    source="kvroute",
    axes={},
    policies=SEEN,
    profiles=_FORESEEN,
    expectation="foresight within 5 % of a coordinate descent that has all draws and future requests",
    versus=("foresight", CLAIRVOYANT),
)
EXPERIMENTS = {experiment.name: experiment for experiment in (MATRIX, ABLATION, FORESEEN)}
