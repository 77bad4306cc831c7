"""Laws of iterations whose all-reduces share links with KV transfers, and an obvious reference for one scenario."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.collectives import (
    Aggregation,
    AllReduce,
    Collective,
    all_reduce,
    instance_traffic,
    link_bytes,
)
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.flows import FlowNetwork
from kvroute.policies import NO_BOUND
from kvroute.sim.metrics import FINISHED
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec, Telemetry, TransferMode
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import Cluster, parse
from kvroute.types import SAME_RACK, CongestionMeasured, FloatArray, LinksMeasured
from kvroute_engine.agent.schemes import Scheme

PER_ITERATION, TOKEN_BYTES = 128, 18e3
BASE_S, PER_REQUEST_S = 40.3457e-3, 0.9013e-3
PREFILL_BASE_S, PREFILL_TOKEN_S = 41.7e-3, 0.9173e-3
SCHEMES: tuple[Scheme, ...] = ("ring", "multi-rail-ring", "hierarchical-ring", "ina", "hierarchical-ina")
SGLANG = '{url: "http://10.0.0.1:1", protocol: sglang, bootstrap: "10.0.0.1:2"}'
many = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Shape:
    """One prefill and one decode instance, with servers of its own for each stage."""

    prefill_scheme: Scheme = "ring"
    decode_scheme: Scheme = "hierarchical-ring"
    servers: int = 2
    per_server: int = 2
    prefill_stages: int = 1
    decode_stages: int = 1
    batch_max: int = 8
    gbps: int = 100
    per_context_token_us: float = 0.37
    early: bool = False
    """The target of a transfer is known before the prefill."""
    together: bool = False
    """Both instances are on the same servers."""

    @property
    def tp(self) -> int:
        return self.servers * self.per_server

    def stages(self, role: str) -> int:
        return self.prefill_stages if role == "prefill" else self.decode_stages

    def scheme(self, role: str) -> Scheme:
        return self.prefill_scheme if role == "prefill" else self.decode_scheme


@cache
def cluster(shape: Shape, *, reduces: bool = True) -> Cluster:
    """Return the cluster; without `reduces` the same timing is all that its all-reduces cost."""
    lines, nodes = [], list[str]()
    for role in ("prefill", "decode"):
        parts, first = [], 4 if shape.together and role == "decode" else 0
        for stage in range(shape.stages(role)):
            for server in range(shape.servers):
                name = f"{'all' if shape.together else role}{stage}x{server}"
                nodes.append(name)
                parts.append(f"{name}:{first}-{first + shape.per_server - 1}")
        text = (
            f"{{scheme: {shape.scheme(role)}, per_iteration: {PER_ITERATION}, token_bytes: {TOKEN_BYTES / 1e3:g} KB}}"
        )
        field = f", all_reduce: {text}" if reduces else ""
        field += f", endpoint: {SGLANG}" if shape.early else ""
        lines.append(
            f'  - {{name: {role}, role: {role}, gpus: "{",".join(parts)}", tp: {shape.tp}, '
            f"pp: {shape.stages(role)}{field}}}"
        )
    nic = f"nics: {{compute: {{count: 8, capacity: {shape.gbps} Gbps}}}}"
    listed = "\n".join(f"  - {{name: {name}, rack: rack0, gpus: 8, {nic}}}" for name in dict.fromkeys(nodes))
    return parse(
        f"""
name: groups
racks: [{{name: rack0}}]
nodes:
{listed}
collectives: {{aggregation: {{levels: [rack]}}}}
timing:
  default:
    prefill: {{kind: linear, per_token: {PREFILL_TOKEN_S * 1e6} us, base: {PREFILL_BASE_S * 1e3} ms}}
    decode:
      base: {BASE_S * 1e3} ms
      per_request: {PER_REQUEST_S * 1e3} ms
      per_context_token: {shape.per_context_token_us} us
defaults: {{model: llama-3-70b, batch_max: {shape.batch_max}, kv_capacity: 900 GB, timing: default}}
instances:
"""
        + "\n".join(lines)
    )


shapes = st.builds(
    Shape,
    prefill_scheme=st.sampled_from(SCHEMES),
    decode_scheme=st.sampled_from(SCHEMES),
    servers=st.sampled_from([2, 3]),
    per_server=st.sampled_from([1, 2]),
    prefill_stages=st.sampled_from([1, 2]),
    decode_stages=st.sampled_from([1, 2]),
    batch_max=st.sampled_from([1, 3, 8]),
)
slices = st.sampled_from([7e-3, 25e-3, 90e-3, 10.0])
gaps = st.integers(0, 400).map(lambda steps: steps * 1.3717e-2)


@st.composite
def traces(draw: st.DrawFn, *, outputs: tuple[int, ...] = (0, 1, 2, 30)) -> Trace:
    """Draw requests without common prefixes."""
    at_s, found = 0.0, []
    for _ in range(draw(st.integers(1, 8))):
        at_s += draw(gaps)
        tokens, output = draw(st.integers(1, 2_000)), draw(st.sampled_from(outputs))
        found.append(TracedRequest(at_s, tokens, output, (), 512))
    return Trace("law", tuple(found))


@st.composite
def known_prompts(draw: st.DrawFn) -> Trace:
    """Draw one request whose KV cache is sent, and later ones whose KV cache the decode instance then has."""
    blocks, at_s = (1, 2), 100.0
    found = [TracedRequest(0.0, 1024, 1, blocks, 512)]
    for _ in range(draw(st.integers(1, 10))):
        at_s += draw(gaps)
        found.append(TracedRequest(at_s, 1024, draw(st.sampled_from([1, 2, 17, 60])), blocks, 512))
    return Trace("known", tuple(found))


def equal(shared: Run, alone: Run) -> None:
    """Assert that both runs have the same rows but for rounding."""
    for field in fields(shared.outcomes):
        here, there = getattr(shared.outcomes, field.name), getattr(alone.outcomes, field.name)
        np.testing.assert_allclose(here, there, rtol=1e-9, atol=1e-12, err_msg=field.name)


def run(shape: Shape, trace: Trace, assumed: SimSpec, *, reduces: bool = True) -> Run:
    return simulate(cluster(shape, reduces=reduces), trace, ControlSpec(decode="foresight"), assumed, seed=1)


@many
@given(shapes, traces(outputs=(0,)), slices, st.booleans())
def test_prefill_without_other_traffic_takes_the_time_of_the_timing_model(
    shape: Shape, trace: Trace, slice_s: float, queueing: bool
) -> None:
    """Stages of a pipeline have servers of their own, so they do not disturb each other; any number of slices."""
    assumed = SimSpec(all_reduce_slice_s=slice_s, prefill_queueing=queueing)
    if not queueing:  # several prompts in one stage share its links
        trace = Trace("one", trace.requests[:1])
    equal(run(shape, trace, assumed), run(shape, trace, assumed, reduces=False))


@many
@given(shapes, known_prompts(), slices)
def test_decode_without_other_traffic_takes_the_time_of_the_timing_model(
    shape: Shape, trace: Trace, slice_s: float
) -> None:
    """Joins and leaves at iteration boundaries included; the KV cache of all but the first request is there already."""
    assumed = SimSpec(all_reduce_slice_s=slice_s)
    shared = run(shape, trace, assumed)
    equal(shared, run(shape, trace, assumed, reduces=False))
    assert shared.outcomes.kv_bytes[1:].sum() == 0.0
    assert shared.summary.all_reduces["decode"].slowdown == pytest.approx(1.0)


def test_a_stage_on_one_server_takes_the_time_of_the_timing_model() -> None:
    """Nothing else uses the NVLink of the second stage, so its all-reduces are no flows; those of the first are."""
    text = """
name: stages
racks: [{name: r0}]
nodes:
  - {name: a, rack: r0, gpus: 2, nics: {compute: {count: 2, capacity: 100 Gbps}}}
  - {name: b, rack: r0, gpus: 2, nics: {compute: {count: 2, capacity: 100 Gbps}}}
  - {name: c, rack: r0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: d, rack: r0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 900 us, base: 40 ms}, decode: {base: 40 ms, per_request: 1 ms}}}
defaults: {model: llama-3-70b, tp: 4, kv_capacity: 180 GB}
instances:
  - {name: p, role: prefill, gpus: "a:0-1,b:0-1,c:0-3", pp: 2, all_reduce: REDUCE}
  - {name: d, role: decode, gpus: "d:0-3"}
"""
    trace = Trace("three", tuple(TracedRequest(0.3 * number, 500, 0, (), 512) for number in range(3)))
    reduce = "{scheme: ring, per_iteration: 160, token_bytes: 16 KB}"
    known, plain = parse(text.replace("REDUCE", reduce)), parse(text.replace(", all_reduce: REDUCE", ""))
    (traffic,) = instance_traffic(known).values()
    assert [bool(stage.flows) for stage in traffic.stages] == [True, False]
    shared = simulate(known, trace, ControlSpec(decode="foresight"), SimSpec(), seed=1)
    equal(shared, simulate(plain, trace, ControlSpec(decode="foresight"), SimSpec(), seed=1))
    assert shared.summary.all_reduces["prefill"].iterations == 6
    reduced = 3 * 500 * sum(float(stage.link_bytes.sum()) for stage in traffic.stages)
    assert shared.summary.all_reduces["prefill"].network_bytes == pytest.approx(reduced)


def token_bytes_by_link(shape: Shape, role: str) -> FloatArray:
    """Return the bytes on each link for one token of an iteration, from the flows of the schemes."""
    known = cluster(shape)
    gpus, stages = known.shards[known.index(role)], shape.stages(role)
    found = np.zeros(len(known.links))
    for stage in range(stages):
        tensor = AllReduce(gpus[stage * shape.tp : (stage + 1) * shape.tp], TOKEN_BYTES * PER_ITERATION / stages)
        reduced = all_reduce(shape.scheme(role), tensor, known, Aggregation(levels=frozenset({"rack"})))
        assert reduced is not None
        for link, nbytes in link_bytes(reduced).items():
            found[link] += nbytes
    return found


@many
@given(shapes, traces(), slices, st.booleans())
def test_every_link_carries_the_bytes_of_the_schemes_and_of_the_transfers(
    shape: Shape, trace: Trace, slice_s: float, together: bool
) -> None:
    """A prompt's tokens cross its stages once, an output token each decode stage; contention changes no byte."""
    shape = replace(shape, together=together)
    assumed = SimSpec(all_reduce_slice_s=slice_s)
    shared, alone = run(shape, trace, assumed), run(shape, trace, assumed, reduces=False)
    assert (shared.outcomes.state == FINISHED).all()
    inputs, outputs = float(shared.outcomes.input_tokens.sum()), float(shared.outcomes.output_tokens.sum())
    wanted = token_bytes_by_link(shape, "prefill") * inputs + token_bytes_by_link(shape, "decode") * outputs
    np.testing.assert_allclose(shared.link_bytes, alone.link_bytes + wanted, rtol=1e-9)
    counted = sum(cost.network_bytes for cost in shared.summary.all_reduces.values())
    assert counted == pytest.approx(float(wanted.sum()))
    capacity = cluster(shape).capacity_bytes_per_s
    assert (shared.link_bytes <= capacity * shared.end_s * (1 + 1e-9)).all()


@many
@given(shapes, traces(), slices, st.booleans())
def test_requests_that_one_instance_serves_reduce_their_tokens_there(
    shape: Shape, trace: Trace, slice_s: float, together: bool
) -> None:
    """The end of the prompt gives the first token, which crosses no stage again."""
    shape = replace(shape, together=together)
    known = cluster(shape)
    spec = ControlSpec(decode="foresight-joint", parameters={"token_delay_max": NO_BOUND})
    found = simulate(known, trace, spec, SimSpec(all_reduce_slice_s=slice_s), seed=1)
    rows = found.outcomes
    assert (rows.state == FINISHED).all()
    per_token = [token_bytes_by_link(shape, instance.role) for instance in known.instances]
    wanted = np.zeros(len(known.links))
    for source, target, inputs, outputs in zip(
        rows.source, rows.target, rows.input_tokens, rows.output_tokens, strict=True
    ):
        wanted += per_token[source] * inputs
        if outputs:
            wanted += per_token[target] * (outputs - (source == target))
    counted = sum(cost.network_bytes for cost in found.summary.all_reduces.values())
    assert counted == pytest.approx(float(wanted.sum()))


@many
@given(shapes, traces(), slices, st.booleans(), st.sampled_from(["serial", "layerwise"]))
def test_other_traffic_never_makes_an_iteration_shorter(
    shape: Shape, trace: Trace, slice_s: float, together: bool, transfer: TransferMode
) -> None:
    """A prompt takes at least its time by the timing model; a batch of at least one request, too."""
    shape = replace(shape, together=together, early=True)
    assumed = SimSpec(all_reduce_slice_s=slice_s, transfer=transfer)
    rows = (found := run(shape, trace, assumed)).outcomes
    idle_s = PREFILL_BASE_S + PREFILL_TOKEN_S * rows.input_tokens
    assert (rows.prefill_finished_s - rows.prefill_started_s >= idle_s * (1 - 1e-12)).all()
    answered = rows.output_tokens > 0
    entry_s = BASE_S + PER_REQUEST_S + 0.37e-6 * rows.input_tokens
    assert (rows.entry_iteration_s[answered] >= entry_s[answered] * (1 - 1e-12)).all()
    for cost in found.summary.all_reduces.values():
        assert cost.slowdown is None or cost.slowdown >= 1.0
    marks = [rows.prefill_finished_s, rows.landed_s, rows.admitted_s, rows.first_token_s, rows.finished_s]
    for earlier, later in pairwise(mark[answered] for mark in marks):
        assert (later >= earlier).all()


@many
@given(shapes, traces(), slices)
def test_the_same_seed_gives_the_same_log(shape: Shape, trace: Trace, slice_s: float) -> None:
    logs = []
    for _ in range(2):
        with TemporaryDirectory() as folder:
            path, spec = Path(folder) / "run.log", ControlSpec(decode="foresight")
            with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
                simulate(cluster(shape), trace, spec, SimSpec(all_reduce_slice_s=slice_s), seed=1, log=log)
            logs.append(path.read_bytes())
    assert logs[0] == logs[1]


@many
@given(shapes, st.integers(1, 2_000), st.integers(1, 40), slices)
def test_more_bandwidth_never_makes_a_lonely_request_slower(
    shape: Shape, tokens: int, output: int, slice_s: float
) -> None:
    """The timing model includes all-reduces on the idle network of its cluster, so only the transfer gets faster."""
    trace = Trace("one", (TracedRequest(0.0, tokens, output, (), 512),))
    slow, fast = (run(replace(shape, gbps=gbps), trace, SimSpec(all_reduce_slice_s=slice_s)) for gbps in (100, 400))
    assert fast.end_s <= slow.end_s * (1 + 1e-9)
    assert fast.outcomes.ttft_s[0] <= slow.outcomes.ttft_s[0] * (1 + 1e-9)


@many
@given(shapes, st.integers(100, 4_000), slices, st.booleans())
def test_a_layerwise_transfer_lands_after_its_prefill_and_before_a_serial_one(
    shape: Shape, tokens: int, slice_s: float, together: bool
) -> None:
    """It slows the all-reduces of its own prefill, and the last layer is sent after the prefill."""
    shape = replace(shape, early=True, together=together)
    trace = Trace("one", (TracedRequest(0.0, tokens, 2, (), 512),))
    serial, streamed = (
        run(shape, trace, SimSpec(all_reduce_slice_s=slice_s, transfer=transfer)).outcomes for transfer in MODES
    )
    assert streamed.prefill_finished_s[0] >= serial.prefill_finished_s[0] * (1 - 1e-12)
    flows = shape.tp * max(shape.prefill_stages, shape.decode_stages)
    last_layer_s = streamed.kv_bytes[0] / LAYERS / (flows * NVLINK_BYTES_PER_S)
    assert streamed.landed_s[0] - streamed.prefill_finished_s[0] >= last_layer_s * (1 - 1e-9)
    lost_s = streamed.prefill_finished_s[0] - serial.prefill_finished_s[0]
    assert streamed.landed_s[0] <= serial.landed_s[0] + lost_s + 1e-12
    if shape.prefill_stages == 2 or slice_s < 0.1:
        assert streamed.landed_s[0] < serial.landed_s[0] + lost_s


NVLINK_BYTES_PER_S = 450e9
LAYERS = 80
"""Of Llama 3 70B."""
MODES: tuple[TransferMode, ...] = ("serial", "layerwise")
BUSY = Shape(decode_scheme="ring", servers=3, per_server=2, batch_max=64)
DECODING = tuple(TracedRequest(0.0, 16, 240, (), 512) for _ in range(40))
LATE = TracedRequest(0.1, 15_000, 2, (), 512)


def test_a_transfer_and_a_decoding_group_slow_each_other() -> None:
    """40 requests decode when the KV cache of a long prompt arrives over the same NICs."""
    both = Trace("both", (*DECODING, LATE))
    shared, alone = run(BUSY, both, SimSpec()), run(BUSY, both, SimSpec(), reduces=False)
    quiet = run(BUSY, Trace("decoding", DECODING), SimSpec())
    transfer_s = shared.outcomes.landed_s - shared.outcomes.prefill_finished_s
    alone_s = alone.outcomes.landed_s - alone.outcomes.prefill_finished_s
    assert transfer_s[-1] > 1.05 * alone_s[-1]
    first = slice(0, len(DECODING))
    tpot_s = (shared.outcomes.finished_s - shared.outcomes.first_token_s)[first] / 239
    quiet_s = (quiet.outcomes.finished_s - quiet.outcomes.first_token_s) / 239
    assert (tpot_s > quiet_s).all()
    cost = shared.summary.all_reduces["decode"]
    assert cost.slowdown is not None
    assert cost.slowdown > 1.0
    assert quiet.summary.all_reduces["decode"].iterations <= cost.iterations


@pytest.mark.parametrize("telemetry", ["tier", "link"])
def test_telemetry_counts_all_reduces_as_other_traffic(telemetry: Telemetry, tmp_path: Path) -> None:
    """The router receives their mean rate since the last refresh: over all refreshes, the bytes of all slices."""
    known, spec, path = cluster(BUSY), ControlSpec(decode="foresight"), tmp_path / "run.log"
    with EventLog(path, LogHeader(cluster="", spec=spec)) as log:
        found = simulate(known, Trace("decoding", DECODING), spec, SimSpec(telemetry=telemetry), seed=1, log=log)
    events = [record.event for record in read_log(path)[1]]
    shares = [event for event in events if isinstance(event, CongestionMeasured | LinksMeasured)]
    nics = np.array(known.links_of_tier(SAME_RACK))
    capacity = known.capacity_bytes_per_s[nics]
    measured = 0.0
    for before, event in pairwise(shares):
        seconds = event.at - before.at
        if isinstance(event, CongestionMeasured):
            measured += event.per_tier[SAME_RACK] * float(capacity.sum()) * seconds
        else:
            measured += float((np.array(event.utilisation)[nics] * capacity).sum()) * seconds
    kv_bytes = 2 * float(np.nansum(found.outcomes.kv_bytes))
    reduced = float(found.link_bytes[nics].sum()) - kv_bytes
    assert 0.9 * reduced < measured <= reduced * (1 + 1e-9)


def test_a_heavier_class_of_all_reduces_is_slowed_less() -> None:
    both = Trace("both", (*DECODING, LATE))
    light, heavy = (run(BUSY, both, SimSpec(all_reduce_weight=weight)) for weight in (1.0, 8.0))
    slowed = [found.summary.all_reduces["decode"].slowdown for found in (light, heavy)]
    assert slowed[0] is not None
    assert slowed[1] is not None
    assert slowed[0] > slowed[1] >= 1.0
    assert light.outcomes.landed_s[-1] < heavy.outcomes.landed_s[-1]


@dataclass
class Reference:
    """A KV transfer beside iterations that reduce one tensor after another, each with flows of its own."""

    shape: Shape
    batch: int
    sent_s: float
    """Start of the transfer."""
    kv_bytes: float

    def landed_s(self, now: float) -> float:
        """Return when the KV cache has arrived, from iterations that begin one after another at `now`."""
        known = cluster(self.shape)
        source, target = known.index("prefill"), known.index("decode")
        tensor = AllReduce(known.shards[target], TOKEN_BYTES * self.batch)
        reduced = all_reduce(self.shape.decode_scheme, tensor, known)
        assert reduced is not None
        compute_s = (BASE_S + PER_REQUEST_S * self.batch) / PER_ITERATION - idle_s(known, reduced)
        self.network = FlowNetwork(known.capacity_bytes_per_s)
        self.network.advance(now)
        shards = known.flows_per_transfer(source, target)
        self.kv = {-1 - shard: [group[0] for group in known.hops(source, target, shard)] for shard in range(shards)}
        self.sent = False
        number = 0
        while True:
            self.until(now := now + compute_s)
            flows = range(number, number := number + len(reduced.flows))
            for flow, reduced_flow in zip(flows, reduced.flows, strict=True):
                self.network.start(flow, reduced_flow.links, reduced_flow.nbytes)
            now = self.until_ended(set(flows)) + reduced.latency_s
            if self.sent and not self.kv:
                return self.arrived_s + known.latency_s(source, target)

    def until(self, to: float) -> None:
        """Move bytes until `to`."""
        while self.next_s() <= to:
            self.step()
        self.network.advance(to)

    def until_ended(self, flows: set[int]) -> float:
        """Move bytes until these flows have ended, and return that time."""
        while flows:
            flows -= self.step()
        return self.network.now

    def next_s(self) -> float:
        upcoming = self.network.next_finish()
        ends_s = upcoming[0] if upcoming is not None else math.inf
        return ends_s if self.sent else min(ends_s, self.sent_s)

    def step(self) -> set[int]:
        """Move to the next end of a flow, or start of the transfer; return the flows that end."""
        at = self.next_s()
        ended = set(self.network.advance(at))
        if at == self.sent_s:
            self.sent = True
            for flow, path in self.kv.items():
                self.network.start(flow, path, self.kv_bytes / len(self.kv))
        for flow in ended & self.kv.keys():
            del self.kv[flow]
            self.arrived_s = at
        return ended


def idle_s(known: Cluster, reduced: Collective) -> float:
    """Return the time of one all-reduce on an idle network."""
    carried = link_bytes(reduced)
    links_s = [nbytes / float(known.capacity_bytes_per_s[link]) for link, nbytes in carried.items()]
    return max(links_s) + reduced.latency_s


@pytest.mark.parametrize("per_server", [1, 2])
def test_single_all_reduces_agree_with_a_reference_and_the_default_is_near(per_server: int) -> None:
    """With as many slices as all-reduces, a KV cache arrives when the reference says; the default is near."""
    shape = replace(BUSY, per_context_token_us=0.0, per_server=per_server)
    trace = Trace("both", (*DECODING, LATE))
    fine, default = (run(shape, trace, assumed) for assumed in (SimSpec(all_reduce_slice_s=1e-6), SimSpec()))
    rows, batch = fine.outcomes, len(DECODING)
    began_s = float(rows.admitted_s[:batch].max())
    sent_s, kv_bytes = float(rows.prefill_finished_s[-1]), float(rows.kv_bytes[-1])
    assert began_s < sent_s < float(rows.finished_s[:batch].min())
    landed_s = Reference(shape, batch, sent_s, kv_bytes).landed_s(began_s)
    assert float(rows.landed_s[-1]) - sent_s == pytest.approx(landed_s - sent_s, rel=1e-9)
    transfers = [float((found.outcomes.landed_s - found.outcomes.prefill_finished_s)[-1]) for found in (fine, default)]
    assert transfers[1] == pytest.approx(transfers[0], rel=0.05)
