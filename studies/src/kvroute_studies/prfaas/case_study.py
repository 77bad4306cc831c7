"""The case study of PrfaaS 4.1 as data: hardware, model, traffic and assumptions, with its plan and its clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from kvroute.llm import model
from kvroute.planner.throughput.lengths import Lengths, grouped, incremental, log_normal
from kvroute.planner.throughput.problem import Hardware, Problem, Site
from kvroute.planner.throughput.search import Kind, Optimum, find
from kvroute.policies import prefill_policy
from kvroute.policies.fleet.short_term import Rule
from kvroute.policies.fleet.throughput import Curve, decode_per_s, kv_curve, prefill_curve, stage_rates
from kvroute.sim.settings import WanTransport
from kvroute.sim.workload import Trace
from kvroute.timing import prefill_time
from kvroute.topology import Cluster, build, fat_tree, two_datacenters
from kvroute.topology.schema import (
    DecodeEntry,
    InstanceCounts,
    InstanceDefaults,
    PiecewisePrefillEntry,
    TimingEntry,
)
from kvroute.types import InputError
from kvroute_engine.files.units import Duration, Size
from kvroute_studies.netkv.readings import unfit

MODEL = "prfaas-1t-hybrid"
DECODE_POLICY = "netkv"
"""Decode policy at home in all compared deployments; they differ only in where prompts are prefilled."""
GPUS_PER_INSTANCE = 8
PRFAAS_INSTANCES, PD_INSTANCES, HOMOGENEOUS_INSTANCES = 4, 8, 12
"""Instances of 8 GPUs: 32 H200, 64 H20 and 96 H20."""
MU, SIGMA, LEAST, MOST = 9.90, 1.00, 128, 131_072
"""Prompt lengths: truncated log-normal."""
OUTPUT_TOKENS = 1_024
BATCH_MAX, ITERATION_S = 20, 25e-3
TPOT_MAX_S = ITERATION_S + 1e-6
"""Time per output token of a full batch, which just meets the SLO of 40 tokens/s, plus a margin for rounding."""
H200 = PiecewisePrefillEntry(
    tokens=[1_024, 8_192, 32_768, 131_072], times_s=[Duration(seconds) for seconds in (0.44, 0.72, 1.84, 7.40)]
)
"""Published in Table 5."""
H20 = PiecewisePrefillEntry(
    tokens=[10_200, 27_500, 62_400], times_s=[Duration(seconds) for seconds in (1.829, 4.265, 9.73)]
)
"""Not published; derived from the published stage rates."""
_PER_REQUEST_S = 1e-6
_DECODE = DecodeEntry(base_s=Duration(ITERATION_S - BATCH_MAX * _PER_REQUEST_S), per_request_s=Duration(_PER_REQUEST_S))
"""The published 25 ms for a full batch, and a negligible decrease for smaller batches. The decrease lets a router that
compares iteration times find the less loaded instance. By NetKV's eq. 6 a full instance costs as little as an idle one
until a request waits."""
_TIMING = {
    "default": TimingEntry(prefill=H20, decode=_DECODE),
    "prefill-site": TimingEntry(prefill=H200, decode=_DECODE),
}
_DEFAULTS = InstanceDefaults(model=MODEL, tp=GPUS_PER_INSTANCE, batch_max=BATCH_MAX)


Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that the publication does not state and a simulation needs."""

    name: str = "paper"
    wan_gbps: Positive = 100.0
    """WAN bandwidth, published as "approximately 100 Gbps"."""
    burst_wan_gbps: Positive = 16.0
    """WAN bandwidth of `prfaas-burst`: four thirds of the planned optimum's traffic. A cut to 30 % of 100 Gbps would
    have no effect."""
    wan_latency_s: Annotated[float, Meta(ge=0, le=10)] = 5e-3
    connections: Annotated[int, Meta(ge=1, le=256)] = 8
    """TCP connections per transfer between the sites."""
    kv_capacity_tb: Positive = 4.0
    """KV memory of an instance including host memory, in TB; it is never the limit."""
    requests: Annotated[int, Meta(ge=100, le=1_000_000)] = 2_000
    """Requests of a `prfaas-case-study` run; the first fifth is not measured."""
    ttft_slo_s: Positive = 10.0
    """TTFT limit of `prfaas-burst`; the longest prompt takes 7.4 s on the faster hardware."""
    burst_load: Annotated[float, Meta(gt=0, le=2)] = 0.45
    """Load of `prfaas-burst` before and after the disturbance, as a share of the planned throughput."""
    prefill_policy: str = "cache-aware"
    rule: Rule = "scarce"
    """Rule of static thresholds: which cached prefixes count, and whether they are copied to another site."""

    @property
    def transport(self) -> WanTransport:
        """Transport of a transfer between the sites."""
        return WanTransport(connections=self.connections)


def assumptions(changes: Sequence[str] = ()) -> Assumptions:
    """Return the defaults with fields changed by `field=value`; the name lists the changes.

    Raises:
        InputError: a field is unknown, or a value does not fit its field.
    """
    fields = msgspec.to_builtins(Assumptions())
    for change in changes:
        field, _, value = change.partition("=")
        if not value:
            raise InputError(f"{change!r} has no value", where="--set", hint="write field=value")
        if field not in fields or field == "name":
            known = ", ".join(key for key in fields if key != "name")
            raise InputError(f"the PrfaaS experiments have no field {field!r}", where="--set", hint=f"known: {known}")
        fields[field] = value
    fields["name"] = "+".join((str(fields["name"]), *changes))
    try:
        found = msgspec.convert(fields, Assumptions, strict=False)
        prefill_policy(found.prefill_policy)
        return found
    except msgspec.ValidationError as error:
        raise unfit(Assumptions, changes, str(error)) from None


def published_lengths(step_tokens: int = 100) -> Lengths:
    """Return the prompt lengths of 4.1."""
    return log_normal(MU, SIGMA, LEAST, MOST, step_tokens)


def traced_lengths(trace: Trace, step_tokens: int = 100) -> Lengths:
    """Return the tokens of a trace's prompts that an unlimited cache leaves to compute."""
    tokens, cached = incremental(trace, None)
    return grouped(tokens, np.ones_like(tokens), step_tokens, f"{trace.name}, {cached:.1%} of its tokens cached")


def problem(lengths: Lengths, output_tokens: float = OUTPUT_TOKENS, wan_gbps: float = 100.0) -> Problem:
    """Return the planner's problem: the case study with these prompt lengths and this mean response length."""
    rate_per_s = decode_per_s(BATCH_MAX, ITERATION_S, output_tokens)
    h200 = Hardware("h200", _curve(H200), 0.0, 1.0)
    h20 = Hardware("h20", _curve(H20), rate_per_s, 1.0)
    return Problem(
        name="prfaas-case-study",
        lengths=lengths,
        kv_bytes=kv_curve(model(MODEL)),
        prfaas=(_site("prfaas", h200, PRFAAS_INSTANCES, wan_gbps * 1e9 / 8),),
        pd=(_site("local", h20, PD_INSTANCES),),
        homogeneous=_site("homogeneous", h20, HOMOGENEOUS_INSTANCES),
        gpus_per_instance=GPUS_PER_INSTANCE,
        reading="representative",
        choices=(),
    )


@lru_cache(maxsize=4)
def published_problem() -> Problem:
    """Return the problem of 4.1 as published."""
    return problem(published_lengths())


@lru_cache(maxsize=8)
def published_optimum(kind: Kind) -> Optimum:
    """Return the optimum of the published problem for one deployment."""
    return find(published_problem(), kind)


def exact(optimum: Optimum) -> float:
    """Return the requests per second of an optimum's threshold and split if the mean request of every stage costs
    E[T(L)] instead of T(E[L])."""
    cell = optimum.cell
    rates = stage_rates(replace(optimum.system, reading="exact"), cell.thresholds, cell.n_prefill, cell.n_decode)
    return float(rates.lambda_max_per_s[0, 0])


@lru_cache(maxsize=16)
def cluster(kind: Kind, n_prefill: int, n_decode: int, wan_gbps: float, assumed: Assumptions) -> Cluster:
    """Build the cluster of a deployment for the simulator; every instance has its own node of eight GPUs with 8 x
    100 Gbps."""
    defaults = msgspec.structs.replace(_DEFAULTS, kv_capacity_bytes=Size(assumed.kv_capacity_tb * 1e12))
    if kind == "homogeneous":
        file = fat_tree(
            "homogeneous",
            pods=1,
            racks_per_pod=1,
            nodes_per_rack=n_prefill + n_decode,
            nic_bytes_per_s=12.5e9,
            instances=InstanceCounts(prefill=n_prefill, decode=n_decode),
            timing={"default": _TIMING["default"]},
            defaults=defaults,
        )
        return build(file)
    sites = two_datacenters(
        kind,
        prefill_nodes=PRFAAS_INSTANCES,
        local_prefill_nodes=n_prefill,
        decode_nodes=n_decode,
        wan_bytes_per_s=wan_gbps * 1e9 / 8,
        wan_latency_s=assumed.wan_latency_s,
        timing=_TIMING,
        defaults=defaults,
    )
    return build(sites)


def _site(name: str, hardware: Hardware, instances: int, egress_bytes_per_s: float = 0.0) -> Site:
    return Site(name, hardware, instances, instances * GPUS_PER_INSTANCE, egress_bytes_per_s)


def _curve(entry: PiecewisePrefillEntry) -> Curve:
    spec = TimingEntry(prefill=entry, decode=_DECODE).spec().prefill
    return prefill_curve(prefill_time(spec))
