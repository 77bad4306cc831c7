"""Laws of data-parallel ranks that step together, for any requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.sim.agenda import Agenda
from kvroute.sim.groups.lock_step import DecodeRanks
from kvroute.sim.instances import DecodeInstance, DecodeStep
from kvroute.sim.metrics import FINISHED
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.timing import IterationTime
from kvroute.topology import Cluster, parse
from kvroute.types import DecodeSpec, InputError

TEXT = """
name: ranks
racks: [{name: rack0}]
nodes:
  - {name: node0, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
network: {latency: {node: 0 s, rack: 0 s, pod: 0 s, datacenter: 0 s}}
timing:
  default:
    prefill: {kind: linear, per_token: 10 us, base: 5 ms}
    decode: {base: 10 ms, per_request: 1 ms, per_context_token: 1 us}
defaults: {model: llama-3-70b, tp: 1, batch_max: 4, kv_capacity: 180 GB}
instances:
  - {name: p, role: prefill, gpus: "node0:0-PREFILL", dp: COUNT}
  - {name: d, role: decode, gpus: "node1:0-3", dp: 4}
"""
SPEC = ControlSpec(decode="round-robin", prefill="round-robin", prefill_cache=False)
"""The choices do not depend on times, so a request is on the same ranks in all runs."""
TOLERANCE = 1e-9
REDUCES = "all_reduce: {scheme: ring, per_iteration: 2, token_bytes: 16 KB}"
SIZES = st.tuples(st.integers(1, 20_000), st.sampled_from([1, 2, 7, 40]))


def cluster(prefill: int = 2) -> Cluster:
    return parse(TEXT.replace("PREFILL", str(prefill - 1)).replace("COUNT", str(prefill)))


def trace(sizes: Sequence[tuple[int, int]], gap_s: float = 0.0) -> Trace:
    requests = [
        TracedRequest(at_s=number * gap_s, input_tokens=tokens, output_tokens=output, blocks=(), block_tokens=512)
        for number, (tokens, output) in enumerate(sizes)
    ]
    return Trace("drawn", tuple(requests))


def play(made: Trace, *, lock_step: bool, prefill: int = 2, tokens: int = 4096) -> Run:
    chosen = SimSpec(lock_step=lock_step, lock_step_tokens=tokens, decode_cache=False)
    return simulate(cluster(prefill), made, SPEC, chosen)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=24), st.sampled_from([0.0, 0.03, 0.5]), st.sampled_from([512, 4096]))
def test_every_request_ends_after_as_many_iterations(sizes: list[tuple[int, int]], gap_s: float, tokens: int) -> None:
    """No request is lost, and each takes at least its own computing times."""
    run = play(trace(sizes, gap_s), lock_step=True, tokens=tokens)
    rows = run.outcomes
    assert (rows.state == FINISHED).all()
    prefill_s = rows.prefill_finished_s - rows.prefill_started_s
    own_s = np.array([5e-3 + 10e-6 * tokens for tokens, _ in sizes])
    assert (prefill_s >= own_s - TOLERANCE).all()
    iterations = np.array([output for _, output in sizes])
    assert (rows.finished_s - rows.admitted_s >= iterations * 11e-3 - TOLERANCE).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=24))
def test_prompts_that_are_there_at_the_beginning_end_no_earlier(sizes: list[tuple[int, int]]) -> None:
    """With later arrivals a single one may be lucky: it meets a boundary that it would have missed."""
    apart, together = (play(trace(sizes), lock_step=lock_step).outcomes for lock_step in (False, True))
    assert (together.source == apart.source).all()
    assert (together.prefill_finished_s >= apart.prefill_finished_s - TOLERANCE).all()
    assert together.prefill_finished_s.max() >= apart.prefill_finished_s.max() - TOLERANCE


BATCH_MAX = 3
LOADS = st.lists(st.lists(st.tuples(st.integers(1, 9_000), st.integers(1, 30)), max_size=7), min_size=1, max_size=4)
"""(context, output tokens) of each request, by rank."""


def decoded(loads: Sequence[Sequence[tuple[int, int]]], *, lock_step: bool) -> dict[int, float]:
    """Return when each request ends whose KV is there at time 0, on ranks in lock-step or on their own."""
    agenda, finished = Agenda(), dict[int, float]()
    time = IterationTime.of(DecodeSpec(base_s=10e-3, per_request_s=1e-3, per_context_token_s=1e-6))
    instances = {index: DecodeInstance(index, time, BATCH_MAX) for index in range(len(loads))}

    def boundary(index: int) -> tuple[DecodeStep, float | None]:
        step, wake_s = instances[index].step(agenda.now)
        finished.update(dict.fromkeys(step.finished, agenda.now))
        return step, wake_s

    def step(index: int, version: int) -> None:
        if version == instances[index].version:
            _, wake_s = boundary(index)
            if wake_s is not None:
                agenda.at(wake_s, step, index, instances[index].version)

    ranks = DecodeRanks(tuple(instances), instances, agenda, boundary, lambda *_: None)
    for index, load in enumerate(loads):
        for number, (context, output) in enumerate(load):
            wake_s = instances[index].transfer_done(0.0, 100 * index + number, context, output)
            if lock_step:
                ranks.wake()
            elif wake_s is not None:
                agenda.at(wake_s, step, index, instances[index].version)
    while agenda.due:
        agenda.now = agenda.due[0][0]
        agenda.act()
    return finished


@given(LOADS)
def test_requests_that_are_there_at_the_beginning_end_no_earlier(loads: list[list[tuple[int, int]]]) -> None:
    """They take as many iterations as without lock-step, and none of these is shorter."""
    apart, together = decoded(loads, lock_step=False), decoded(loads, lock_step=True)
    assert apart.keys() == together.keys() == {100 * i + n for i, load in enumerate(loads) for n in range(len(load))}
    assert all(together[request] >= apart[request] - TOLERANCE for request in apart)


@given(st.lists(st.tuples(st.integers(1, 9_000), st.integers(1, 30)), max_size=7), st.integers(1, 4))
def test_equal_ranks_end_at_the_same_time_as_on_their_own(load: list[tuple[int, int]], ranks: int) -> None:
    apart, together = (decoded([load] * ranks, lock_step=lock_step) for lock_step in (False, True))
    assert together == pytest.approx(apart)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000), st.sampled_from([1, 2, 40]), st.integers(1, 3))
def test_equal_loads_take_the_same_time(tokens: int, output: int, rounds: int) -> None:
    """Four ranks on each side with the same requests: no rank waits for another one."""
    made = trace([(tokens, output)] * 4 * rounds)
    apart, together = (play(made, lock_step=lock_step, prefill=4).outcomes for lock_step in (False, True))
    for name in ("prefill_finished_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(getattr(together, name), getattr(apart, name), rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_a_rank_whose_others_are_idle_takes_its_own_time(size: tuple[int, int]) -> None:
    """Their dummy batches are no slower than a request."""
    apart, together = (play(trace([size]), lock_step=lock_step).outcomes for lock_step in (False, True))
    for name in ("prefill_finished_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(getattr(together, name), getattr(apart, name), rtol=1e-9)


def test_an_iteration_takes_the_time_of_the_slowest_rank() -> None:
    """A rank computes 4,000 tokens, 1,000 in each iteration, and another one 100: it ends with the first iteration. Of
    two requests that decode, the one with the short context is as slow as the other one."""
    sizes = [(4_000, 5), (100, 5)]
    rows = play(trace(sizes), lock_step=True, tokens=1_000).outcomes
    whole_s = 5e-3 + 4_000 * 10e-6
    assert rows.prefill_finished_s[0] == pytest.approx(whole_s)
    assert rows.prefill_finished_s[1] == pytest.approx(whole_s / 4)
    apart = play(trace(sizes), lock_step=False).outcomes
    assert apart.prefill_finished_s[1] == pytest.approx(5e-3 + 100 * 10e-6)
    both = trace([(4_000, 30), (4_000, 30), (100, 30), (100, 30)])
    together, alone = (play(both, lock_step=lock_step, prefill=4).outcomes for lock_step in (True, False))
    step_s = 10e-3 + 1e-3 + 4_000e-6
    assert (together.finished_s - together.first_token_s)[2] > 25 * step_s
    assert (alone.finished_s - alone.first_token_s)[2] < 29 * (11e-3 + 200e-6)


def test_servers_of_one_expert_group_step_together() -> None:
    """As the nodes of an engine behind a hybrid load balancer: the name of the group counts, not the server."""
    text = TEXT.replace("PREFILL", "0").replace("COUNT", "1")
    line = '  - {name: d, role: decode, gpus: "node1:0-3", dp: 4}\n'
    apart = "".join(f'  - {{name: d{n}, role: decode, gpus: "node1:{2 * n}-{2 * n + 1}", dp: 2}}\n' for n in (0, 1))
    one = apart.replace("dp: 2}", "dp: 2, ep_group: d}")
    made = trace([(2_000, 40), (100, 40), (100, 40), (100, 40)])
    settings = SimSpec(lock_step=True, decode_cache=False)
    ends = [
        simulate(parse(text.replace(line, instances)), made, SPEC, settings).outcomes.finished_s.tolist()
        for instances in (line, one, apart)
    ]
    assert ends[0] == ends[1]
    assert ends[2][3] < ends[1][3]


def test_a_rank_computes_several_prompts_in_an_iteration() -> None:
    """Three prompts of 300 tokens fit into the first iteration, 8 ms each, so the other rank's 1,000 tokens take
    24 ms instead of 15 ms. Alone, later ones take their own time."""
    sizes = [(1_000, 1), (300, 1), (1_000, 1), (300, 1), (1_000, 1), (300, 1)]
    rows = play(trace(sizes), lock_step=True, tokens=1_000).outcomes
    assert rows.prefill_finished_s[1::2] == pytest.approx([8e-3, 16e-3, 24e-3])
    assert rows.prefill_finished_s[::2] == pytest.approx([24e-3, 39e-3, 54e-3])


def test_the_same_arguments_give_the_same_run() -> None:
    made = trace([(100 * number + 1, number % 9 + 1) for number in range(40)], 0.01)
    one, two = (play(made, lock_step=True).outcomes for _ in range(2))
    assert one.finished_s.tolist() == two.finished_s.tolist()


@pytest.mark.parametrize(
    ("change", "settings", "what"),
    [
        (("dp: ", "tp: "), {}, "no engine of ranks has data-parallel ranks"),
        (("", ""), {"transfer": "layerwise"}, "layer-wise transfers are not modelled in lock-step"),
        (('"node0:0-1", dp: 2', '"node0:0-3", dp: 2, pp: 2'), {}, "p has pipeline stages"),
        (('"node0:0-1", dp: 2', f'"node0:0-3", dp: 2, tp: 2, {REDUCES}'), {}, "p has all-reduces on shared links"),
        (("base: 5 ms}", "base: 5 ms}\n    scheduler: {step_tokens: 2048}"), {}, "d has a timing with `scheduler`"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_one_sentence(change: tuple[str, str], settings: dict[str, str], what: str) -> None:
    text = TEXT.replace("PREFILL", "1").replace("COUNT", "2").replace(*change)
    with pytest.raises(InputError, match=what):
        simulate(parse(text), trace([(10, 2)]), SPEC, SimSpec(lock_step=True, **settings))  # type: ignore[arg-type]


def test_aggregated_requests_are_refused_in_lock_step() -> None:
    """The default of `foresight-joint` allows them."""
    cluster = parse(TEXT.replace("PREFILL", "1").replace("COUNT", "2"))
    default = ControlSpec(decode="foresight-joint")
    with pytest.raises(InputError, match="set its parameter `aggregated` to 0"):
        simulate(cluster, trace([(10, 2)]), default, SimSpec(lock_step=True))
    pairs = msgspec.structs.replace(default, parameters={"aggregated": 0})
    run = simulate(cluster, trace([(10, 2)]), pairs, SimSpec(lock_step=True))
    assert (run.outcomes.state == FINISHED).all()
