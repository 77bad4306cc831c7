"""`prefix-copies`: the effect of copying cached prefixes between two datacenters, to siblings, and ahead of demand."""

from __future__ import annotations

import msgspec
import numpy as np

from kvroute.control import ControlSpec
from kvroute.control.state.hotspots import CopySpec
from kvroute.planner.comparison.cells import Cell, Record
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.short_term import Rule
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest, generate
from kvroute.topology import Cluster
from kvroute.types import CROSS_DATACENTER
from kvroute_studies.prfaas.case_study import DECODE_POLICY, Assumptions, cluster
from kvroute_studies.shared.cells import Experiment

DOCUMENTS, CONVERSATIONS = "documents", "conversations"
OWN = "own-caches"
END_S, WARMUP_S = 900.0, 120.0
PREFILL, DECODE, WAN_GBPS = 4, 4, 100.0
"""Prefill and decode instances at home, in addition to the four remote PrfaaS instances, and the WAN bandwidth."""
ASSUMED = Assumptions(kv_capacity_tb=0.4)
REVIEW_S = 10.0
RATE_PER_S = {DOCUMENTS: 2.0, CONVERSATIONS: 3.0}
BLOCK_TOKENS = 512

PREFIX_COPIES = Experiment(
    name="prefix-copies",
    title="Exchange of cached prefixes",
    source="PrfaaS 3.2 and 3.4.3",
    axes={},
    policies=(OWN, f"{OWN}+pool", "exchange", "exchange+ahead", "exchange+pool", "exchange+pool+ahead"),
    profiles=(DOCUMENTS, CONVERSATIONS),
    expectation="exchanged prefixes raise the hit rate and lower TTFT; copies ahead of demand cost no goodput",
    versus=("exchange", OWN),
)
EXPERIMENTS = {PREFIX_COPIES.name: PREFIX_COPIES}


def run_cell(cell: Cell, end_s: float = END_S) -> Record:
    """Run a cell with requests that arrive until `end_s`; the policy's name selects what is copied."""
    sites = cluster("prfaas", PREFILL, DECODE, WAN_GBPS, ASSUMED)
    settings = SimSpec(
        transfer="layerwise",
        wan=ASSUMED.transport,
        review_s=REVIEW_S,
        warmup_s=WARMUP_S,
        measure_s=end_s - WARMUP_S,
    )
    run = simulate(sites, requests_of(cell.profile, cell.seed, end_s), spec_of(cell.policy), settings, seed=cell.seed)
    config = {"rate_per_s": RATE_PER_S[cell.profile], "assumptions": msgspec.to_builtins(ASSUMED)}
    summary = msgspec.structs.replace(run.summary, policy=cell.policy)
    return Record(key=cell.key, cell=cell, config=config, summary=summary, figures=_figures(run, sites))


def spec_of(policy: str) -> ControlSpec:
    """Return the specification of a policy; every policy searches for the routing threshold. `own-caches`: each site
    uses its own cached prefixes (bandwidth counts as scarce). `exchange`: the longer prefix is copied. `pool`:
    instances fetch prefixes from siblings. `ahead`: hot prefixes are copied before a request needs them."""
    exchange, *more = policy.split("+")
    rule: Rule = "scarce" if exchange == OWN else "auto"
    return ControlSpec(
        decode=DECODE_POLICY,
        prefill="cache-aware",
        offload=OffloadSpec(rule=rule),
        prefix_pool="pool" in more,
        copies=CopySpec() if "ahead" in more else None,
    )


def requests_of(profile: str, seed: int, end_s: float = END_S) -> Trace:
    """Return the requests, the same for every policy of a seed."""
    if profile == CONVERSATIONS:
        return generate(duration_s=end_s, rate_per_s=RATE_PER_S[profile], seed=seed)
    return documents(np.random.default_rng(seed), RATE_PER_S[profile], end_s)


def documents(draw: np.random.Generator, rate_per_s: float, end_s: float) -> Trace:
    """Return a trace in which a document of 20,000 to 80,000 tokens arrives every 15 s on average and is summarized.
    For 4 minutes requests ask questions about it, about some documents far more often. Most questions are short; one in
    seven has 15,000 to 40,000 tokens of its own.

    A document's summary request has a prompt that ends at the end of the document, so that hybrid models can continue
    from that state.
    """
    came_s = np.cumsum(draw.exponential(15.0, int(end_s / 15.0)))
    depths = np.exp(draw.uniform(np.log(20_000), np.log(80_000), len(came_s))).astype(np.int64) // BLOCK_TOKENS
    weight = draw.pareto(1.0, len(came_s)) + 0.2
    requests = [
        _asked(at_s, number, depth, 0, -1, 50)
        for number, (at_s, depth) in enumerate(zip(came_s.tolist(), depths.tolist(), strict=True))
    ]
    for question, at_s in enumerate(np.cumsum(draw.exponential(1 / rate_per_s, int(end_s * rate_per_s))).tolist()):
        known = np.flatnonzero((came_s + 10.0 < at_s) & (at_s < came_s + 240.0))
        if not len(known):
            continue
        document = int(draw.choice(known, p=weight[known] / weight[known].sum()))
        own = int(draw.integers(100, 3_000) if draw.random() > 1 / 7 else draw.integers(15_000, 40_000))
        answer = int(draw.integers(50, 400))
        requests.append(_asked(at_s, document, int(depths[document]), own, question, answer))
    return Trace(DOCUMENTS, tuple(sorted(requests, key=lambda request: request.at_s)))


def _asked(at_s: float, document: int, depth: int, own_tokens: int, question: int, answer: int) -> TracedRequest:
    """Return a request for a document of `depth` blocks followed by its own tokens; every block has its own number."""
    own = range(10_000_000 + question * 1_000, 10_000_000 + question * 1_000 + own_tokens // BLOCK_TOKENS)
    blocks = (*range(document * 1_000, document * 1_000 + depth), *own)
    return TracedRequest(at_s, depth * BLOCK_TOKENS + own_tokens, answer, blocks, BLOCK_TOKENS)


def _figures(run: Run, sites: Cluster) -> dict[str, float]:
    """Return the bytes between the sites in each direction, and the copied bytes among them, over the whole run."""
    home = {instance.datacenter for instance in sites.instances if instance.role == "decode"}
    out_bytes = in_bytes = 0.0
    for link, carried in zip(sites.links, run.link_bytes.tolist(), strict=True):
        if link.tier == CROSS_DATACENTER:
            out_bytes += 0.0 if link.source in home else carried
            in_bytes += carried if link.source in home else 0.0
    return {
        "egress_gb": out_bytes / 1e9,
        "ingress_gb": in_bytes / 1e9,
        "copied_gb": run.summary.copied_prefixes.kv_bytes / 1e9,
        "ahead_gb": run.summary.copied_ahead.kv_bytes / 1e9,
    }
