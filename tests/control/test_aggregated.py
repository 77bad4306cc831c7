"""A decode instance that serves a request aggregated: when it is cheaper than the best pair, bookings and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
from kvroute.policies import NO_BOUND
from kvroute.topology import parse
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvStored,
    PeerReport,
    PeerReported,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    Served,
)

TEXT = """
name: aggregated
racks: [{name: rack0, uplinks: {count: 4, capacity: 100 Gbps}}]
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 10 Gbps}}}
  - {name: node1, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 10 Gbps}}}
network: {tier_bandwidth: {rack: 20 Gbps}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 0.1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 8, kv_capacity: 100 GB, chunk_tokens: 512}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-1"}
  - {name: p1, role: prefill, gpus: "node0:2-3"}
  - {name: d0, role: decode, gpus: "node1:0-1"}
  - {name: d1, role: decode, gpus: "node1:2-3"}
"""
BLOCKS = tuple(range(1, 101))
"""A prefix of 1,600 tokens."""


def core(text: str = TEXT, **spec: Any) -> Control:
    """Return a core that compares decode instances alone with pairs by their price, without a bound."""
    parameters = {"aggregated": 1, "token_delay_max": NO_BOUND}
    return ControlSpec(**{"decode": "foresight-joint", "parameters": parameters, **spec}).build(parse(text))


def arrive(
    control: Control, at: float, number: int, tokens: int = 1_000, only: tuple[str, ...] | None = None
) -> tuple[Decision, ...]:
    request = Request(id=number, input_tokens=tokens, max_output_tokens=10)
    return control.handle(Arrived(at, request, only=only))


def aggregated(decisions: tuple[Decision, ...]) -> str:
    """Return the instance that serves the request aggregated."""
    (decode,) = decisions
    assert isinstance(decode, Decode)
    assert (decode.source, decode.kv_bytes, decode.tier) == (decode.target, 0.0, 0)
    return decode.target


def running(control: Control, at: float, name: str, count: int) -> None:
    """Let an instance decode `count` requests, which the other decode instance does not take."""
    for number in range(1_000, 1_000 + count):
        decode = control.handle(
            Arrived(at, Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True), only=(name,))
        )
        assert aggregated(decode) == name
        control.handle(Admitted(at, number))


def prompts(control: Control) -> list[int]:
    """Return the number of prompts booked on each decode instance."""
    (pool,) = control.parts.view.decode.values()
    found: list[int] = pool.prompts.tolist()
    return found


def test_an_idle_decode_instance_serves_a_request_without_a_transfer() -> None:
    control = core()
    assert aggregated(arrive(control, 0.0, 0)) == "d0"


def test_the_delay_of_running_requests_can_make_the_pair_cheaper() -> None:
    """The prompt takes 110 ms on a prefill instance, and 100 ms beside a batch. With four running requests on each
    decode instance, its delay sums up to 400 ms; the transfer takes 131 ms."""
    control = core()
    running(control, 0.0, "d0", 4)
    running_on_other = [
        control.handle(
            Arrived(0.0, Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True), only=("d1",))
        )
        for number in range(4)
    ]
    assert [aggregated(taken) for taken in running_on_other] == ["d1"] * 4
    for number in range(4):
        control.handle(Admitted(0.0, number))
    (prefill,) = arrive(control, 1.0, 10)
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    parts = prefill.terms.parts
    index = prefill.terms.names.index(prefill.instance)
    # Pair: 110 ms prefill, 131 ms transfer, a step. Alone: prefill, two steps beside chunks, delay of four requests.
    steps_s = 2 * (0.01 + 4 * 0.1e-3)
    slot_s = parts["aggregated_s"][index] - (0.1 + steps_s + 4 * 0.1)
    assert parts["pair_s"][index] == pytest.approx(0.11 + 0.1311 + 0.0105 + slot_s, rel=1e-2)
    light = core(parameters={"aggregated": 1, "delay_weight": 0.1})
    running(light, 0.0, "d0", 4)
    light.handle(InstanceDown(0.0, "d1"))
    assert aggregated(arrive(light, 1.0, 10)) == "d0"


@pytest.mark.parametrize(("batch", "expected_s"), [(0, 0.11), (2, 0.1 + 2.5 * (0.01 + 2 * 0.1e-3))])
def test_a_prompt_beside_a_batch_is_expected_to_begin_half_a_step_later(batch: int, expected_s: float) -> None:
    """The batch is in the middle of a step; then each of the two chunks has a step of the batch beside it. The bases of
    prefill and step are the same 10 ms."""
    control = core(parameters={"aggregated": 1, "delay_weight": 0.1, "token_delay_max": NO_BOUND})
    control.handle(InstanceDown(0.0, "d1"))
    running(control, 0.0, "d0", batch)
    request = Request(id=10, input_tokens=1_000, max_output_tokens=10)
    (decode,) = control.handle(Arrived(1.0, request, ttft_max_s=60.0))
    assert isinstance(decode, Decode)
    assert decode.ttft_s == pytest.approx(expected_s)


def test_a_prefix_cached_on_a_decode_instance_counts() -> None:
    """Only the tokens that are not cached are computed, so the running requests there are hardly delayed."""
    control = core()
    for name in ("d0", "d1"):
        for number in range(4):
            first = 1_000 * (1 + (name == "d1")) + number
            request = Request(id=first, input_tokens=1, max_output_tokens=10, one_leg=True)
            control.handle(Arrived(0.0, request, only=(name,)))
            control.handle(Admitted(0.0, first))
    control.handle(KvStored(0.0, "d1", BLOCKS))
    request = Request(id=1, input_tokens=1_601, blocks=BLOCKS, max_output_tokens=10)
    (decode,) = control.handle(Arrived(1.0, request))
    assert isinstance(decode, Decode)
    assert (decode.source, decode.target, decode.hit_tokens) == ("d1", "d1", 1_600)
    assert decode.terms is not None
    assert decode.terms.parts["prefill_s"][1] == pytest.approx(1 * 100e-6)


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    control = core()
    control.handle(KvStored(0.0, "d1", BLOCKS))
    (decode,) = control.handle(Arrived(1.0, Request(id=1, input_tokens=1_600, blocks=BLOCKS, max_output_tokens=10)))
    assert isinstance(decode, Decode)
    assert (decode.target, decode.hit_tokens) == ("d1", 1_599)


def test_a_long_queue_for_prefill_makes_decode_instances_cheaper() -> None:
    control = core()
    running(control, 0.0, "d0", 3)
    control.handle(InstanceDown(0.0, "d1"))
    kinds = [type(arrive(control, 1.0, number)[0]) for number in range(10)]
    assert kinds[0] is Prefill
    assert Decode in kinds


def test_prompts_in_progress_count_so_that_requests_do_not_crowd_one_instance() -> None:
    """Of six simultaneous requests none waits behind two others, on either kind of instance."""
    control = core()
    places = []
    for number in range(6):
        (decision,) = arrive(control, 0.0, number)
        assert isinstance(decision, Prefill | Decode)
        places.append(decision.instance if isinstance(decision, Prefill) else decision.target)
    assert places[:2] == ["d0", "d1"]
    assert max(places.count(name) for name in places) <= 2
    assert set(places) == {"d0", "d1", "p0", "p1"}


def test_the_terms_contain_every_decode_instance_and_the_best_pair() -> None:
    (decode,) = arrive(core(), 0.0, 0)
    assert isinstance(decode, Decode)
    terms = decode.terms
    assert terms is not None
    assert terms.names == ("d0", "d1", "p0 and d0")
    columns = [name for name in terms.parts if name != "hit_tokens"]
    assert len(columns) == 10
    assert terms.cost.tolist() == pytest.approx(np.sum([terms.parts[name] for name in columns], axis=0).tolist())
    assert terms.cost[0] == terms.cost.min()
    assert terms.parts["transfer_s"][2] == pytest.approx(1_000 * 327_680 / 2.5e9, rel=1e-2)


@pytest.mark.parametrize("end", ["admitted", "finished", "failed"])
def test_a_prompt_is_booked_until_its_first_token_or_the_end_of_the_request(end: str) -> None:
    control = core()
    assert aggregated(arrive(control, 0.0, 0)) == "d0"
    assert prompts(control) == [1, 0]
    assert control.loads(0.0)["d0"].pending_s == pytest.approx(0.11)
    if end == "admitted":
        control.handle(Admitted(0.1, 0))
    elif end == "finished":
        control.handle(Finished(0.1, 0))
    else:
        assert aggregated(control.handle(DecodeFailed(0.1, 0, kv_lost=True))) == "d1"
        assert prompts(control) == [0, 1]
        return
    assert prompts(control) == [0, 0]
    assert control.loads(0.1)["d0"].pending_s == 0.0


def bounded(share: float | None, price: float = 1e9) -> Control:
    """Return a core whose decode instances may delay tokens by this share, and by more at this price; None: the
    defaults."""
    priced = {} if share is None else {"token_delay_max": share, "token_delay_price": price}
    return core(parameters={"aggregated": 1} | priced)


def with_running(control: Control) -> Control:
    """Let each decode instance decode one request."""
    for number, name in enumerate(("d0", "d1")):
        request = Request(id=1_000 + number, input_tokens=1, max_output_tokens=10, one_leg=True)
        assert aggregated(control.handle(Arrived(0.0, request, only=(name,)))) == name
        control.handle(Admitted(0.0, 1_000 + number))
    return control


@pytest.mark.parametrize(("share", "expected"), [(0.05, Decode), (0.03, Prefill)])
def test_a_high_price_keeps_prompts_away_from_running_requests(share: float, expected: type[Decision]) -> None:
    """The prompt delays the running request by 100 ms. A mean response takes 2.6 s, of which 5 % are 128 ms and 3 % are
    77 ms. A price of 1e9 is a bound."""
    (first,) = arrive(with_running(bounded(share)), 1.0, 0)
    assert isinstance(first, expected)


def test_delays_beyond_the_share_have_a_price() -> None:
    """The prompt delays the running request by 100 ms without the base of a step. A mean response of 256 tokens with
    steps of 10.2 ms may be delayed by 1 % without a further price; each second more costs 0.3 s."""
    (decode,) = arrive(with_running(bounded(0.01, 0.3)), 1.0, 0)
    assert decode.terms is not None
    assert decode.terms.parts["beyond_s"].tolist() == pytest.approx([0.3 * (0.1 - 0.01 * 256 * 0.0102)] * 2 + [0.0])
    assert decode.terms.feasible.all()


@pytest.mark.parametrize(("share", "expected"), [(0.05, Prefill), (1e9, Decode)])
def test_a_high_price_keeps_requests_away_from_instances_with_many_prompts(
    share: float, expected: type[Decision]
) -> None:
    """Both decode instances are idle again, but have spent a part of their time on prompts, so that later ones are
    expected."""
    control = bounded(share)
    for number in range(40):
        arrive(control, 0.2 * number, number)
        control.handle(Finished(0.2 * number + 0.1, number))
    (last,) = arrive(control, 8.0, 40)
    assert isinstance(last, expected)


def test_delays_have_no_further_price_without_a_pair() -> None:
    """No prefill instance is up, and the request that decodes on each decode instance is delayed by more."""
    control = with_running(bounded(0.0))
    (paired,) = arrive(control, 0.0, 0)
    assert isinstance(paired, Prefill)
    for name in ("p0", "p1"):
        control.handle(InstanceDown(0.0, name))
    assert aggregated(arrive(control, 0.0, 1)) == "d0"


def test_instances_that_are_down_have_failed_the_request_or_must_not_serve_it_are_excluded() -> None:
    control = core()
    control.handle(InstanceDown(0.0, "d0"))
    assert aggregated(arrive(control, 0.0, 0)) == "d1"
    control.handle(InstanceUp(0.0, "d0"))
    control.handle(Finished(0.0, 0))
    assert aggregated(arrive(control, 0.0, 1)) == "d0"
    assert aggregated(control.handle(DecodeFailed(0.1, 1))) == "d1"
    control.handle(Finished(0.1, 1))
    assert aggregated(arrive(control, 60.0, 2, only=("p0", "p1", "d1"))) == "d1"


def test_an_instance_that_must_not_serve_a_request_does_not_when_no_other_is_up() -> None:
    """The prompt is computed: the decode instance may be up again by then."""
    control = core()
    control.handle(InstanceDown(0.0, "d0"))
    (prefill,) = arrive(control, 1.0, 0, only=("p0", "d0"))
    assert isinstance(prefill, Prefill)
    assert prefill.instance == "p0"


def test_an_instance_without_room_is_not_chosen() -> None:
    """The request needs 331 MB and no decode instance has as much. The prefill policy chooses, as for pairs."""
    control = core(TEXT.replace("kv_capacity: 100 GB", "kv_capacity: 0.3 GB"))
    (prefill,) = arrive(control, 0.0, 0)
    assert isinstance(prefill, Prefill)


def test_requests_are_served_when_no_prefill_instance_is_up() -> None:
    control = core()
    for name in ("p0", "p1"):
        control.handle(InstanceDown(0.0, name))
    assert aggregated(arrive(control, 0.0, 0, 50_000)) == "d0"
    without = core(parameters={"aggregated": 0})
    for name in ("p0", "p1"):
        without.handle(InstanceDown(0.0, name))
    (refused,) = arrive(without, 0.0, 0)
    assert isinstance(refused, Reject)


def test_a_constraint_between_prefill_and_decode_holds_on_one_instance() -> None:
    """No pair is inside one node, so that a pair would be rejected."""
    assert aggregated(arrive(core(constraint="node:required"), 0.0, 0)) == "d0"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (TEXT, {"parameters": {"aggregated": 0}}),
        (TEXT, {"decode": "foresight", "parameters": {}}),
        (TEXT.replace("name: p1, role: prefill", "name: p1, role: both"), {}),
    ],
)
def test_decode_instances_are_not_offered(text: str, spec: dict[str, Any]) -> None:
    """The parameter forbids it, the policy does not choose pairs, or instances of role `both` exist."""
    assert isinstance(arrive(core(text, **spec), 0.0, 0)[0], Prefill)


@pytest.mark.parametrize(("protocol", "first"), [("vllm", Decode), ("mooncake", Decode), ("sglang", Prefill)])
def test_the_protocol_must_allow_prompts_on_decode_instances(protocol: str, first: type) -> None:
    text = TEXT
    for port, name in enumerate(("p0", "p1", "d0", "d1")):
        bootstrap = f', bootstrap: "127.0.0.1:{9100 + port}"' if protocol != "vllm" and name[0] == "p" else ""
        endpoint = f', endpoint: {{url: "http://127.0.0.1:{9000 + port}", protocol: {protocol}{bootstrap}}}}}'
        lines = [line[:-1] + endpoint if f"name: {name}," in line else line for line in text.splitlines()]
        text = "\n".join(lines)
    assert type(arrive(core(text), 0.0, 0)[0]) is first


def test_a_slowly_returning_instance_gets_a_part_of_the_requests() -> None:
    control = core(slow_start_s=100.0)
    for name in ("p0", "p1", "d0"):
        control.handle(InstanceDown(0.0, name))
    control.handle(InstanceUp(1.0, "d0", returned=True))
    places = []
    for number in range(10):
        places.append(aggregated(arrive(control, 2.0 + number, number)))
        control.handle(Admitted(2.5 + number, number))
        control.handle(Finished(2.6 + number, number))
    assert places.count("d0") < places.count("d1")


def test_another_instance_that_serves_the_request_gets_its_prompt() -> None:
    control = core()
    assert aggregated(arrive(control, 0.0, 0)) == "d0"
    assert aggregated(control.handle(Served(0.1, 0, "d1"))) == "d1"
    assert prompts(control) == [0, 1]
    control.handle(Finished(0.2, 0))
    assert prompts(control) == [0, 0]


def test_prompts_of_other_gateways_count() -> None:
    """A second core counts what the first one has booked, and releases it step by step."""
    own, other = core(), core()
    arrive(own, 0.0, 0)
    arrive(own, 0.0, 1)

    def report(sequence: int, at: float) -> None:
        bookings = tuple(own.booked(number) for number in (0, 1))
        other.handle(PeerReported(at, PeerReport("own", sequence, at, bookings, whole=sequence == 1)))

    report(1, 0.0)
    assert prompts(other) == prompts(own) == [1, 1]
    assert other.loads(0.0) == own.loads(0.0)
    own.handle(Admitted(0.1, 0))
    report(2, 0.1)
    assert prompts(other) == [0, 1]
    (pool,) = other.parts.view.decode.values()
    assert (pool.batch.tolist(), pool.queued.tolist()) == ([1, 0], [0, 1])
    own.handle(Finished(0.2, 0))
    own.handle(Finished(0.2, 1))
    report(3, 0.2)
    assert prompts(other) == [0, 0]
    assert other.loads(0.2)["d1"].pending_s == 0.0


def test_the_parameter_is_checked() -> None:
    for value, name in ((3, "aggregated"), (0.5, "aggregated"), (-1, "aggregated")):
        with pytest.raises(InputError, match=name):
            ControlSpec(decode="foresight-joint", parameters={"aggregated": value}).check()
    with pytest.raises(InputError, match="delay_weight"):
        ControlSpec(decode="foresight-joint", parameters={"delay_weight": float("nan")}).check()


KEPT: dict[str, Any] = {"parameters": {"aggregated": 2, "token_delay_max": NO_BOUND}}


def staying(decisions: tuple[Decision, ...]) -> str:
    """Return the prefill instance that goes on to decode the request."""
    prefill, decode = decisions
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    assert (decode.source, decode.target, decode.kv_bytes) == (prefill.instance, prefill.instance, 0.0)
    return prefill.instance


def without_decode(control: Control) -> Control:
    """Take all decode instances down."""
    for name in ("d0", "d1"):
        control.handle(InstanceDown(0.0, name))
    return control


def test_a_prefill_instance_goes_on_to_decode() -> None:
    """It is booked as a prefill and as a decode, and both are released step by step."""
    control = core(**KEPT)
    with_d1_busy = [aggregated(arrive(control, 0.0, number)) for number in range(2)]
    assert with_d1_busy == ["d0", "d1"]
    assert [staying(arrive(control, 0.0, number)) for number in (2, 3)] == ["p0", "p1"]
    prefill, kept = control.parts.view.prefill["llama-3-70b"], next(iter(control.parts.view.kept.values()))
    assert (prefill.assigned.tolist(), kept.queued.tolist()) == ([1, 1], [1, 1])
    assert control.handle(PrefillFinished(0.1, 2)) == ()
    control.handle(Admitted(0.1, 2))
    assert (prefill.assigned.tolist(), kept.batch.tolist(), kept.queued.tolist()) == ([0, 1], [1, 0], [0, 1])
    for number in range(4):
        control.handle(Finished(1.0, number))
    assert not any(load.queued or load.pending_s for load in control.loads(1.0).values())
    assert kept.free_kv_bytes.tolist() == kept.capacity_bytes.tolist()


def test_only_engines_that_can_go_on_to_decode_do_so() -> None:
    """By the parameter, without any decode instance too; a request is rejected if they cannot."""
    assert staying(arrive(without_decode(core(**KEPT)), 0.0, 0)) == "p0"
    assert isinstance(arrive(without_decode(core()), 0.0, 0)[0], Reject)
    only_d1 = core(**KEPT)
    only_d1.handle(InstanceDown(0.0, "d0"))
    running(only_d1, 0.0, "d1", 1)
    assert staying(arrive(only_d1, 0.0, 0)) == "p0"
    forbidden = core()
    forbidden.handle(InstanceDown(0.0, "d0"))
    running(forbidden, 0.0, "d1", 1)
    assert len(arrive(forbidden, 0.0, 0)) == 1


def test_a_request_that_stays_is_restarted_elsewhere_after_a_failure() -> None:
    control = core(**KEPT)
    control.handle(InstanceDown(0.0, "d0"))
    running(control, 0.0, "d1", 1)
    assert staying(arrive(control, 0.0, 0)) == "p0"
    assert staying(control.handle(DecodeFailed(0.1, 0, kv_lost=True))) == "p1"


def test_prefills_avoid_an_instance_on_which_requests_decode() -> None:
    """Both prefill instances are equal but for the request that decodes on the first one."""
    control = core(**KEPT)
    control.handle(InstanceDown(0.0, "d0"))
    running(control, 0.0, "d1", 1)
    assert staying(arrive(control, 0.0, 0)) == "p0"
    control.handle(PrefillFinished(0.2, 0))
    control.handle(Admitted(0.2, 0))
    for number in range(10):
        (prefill, *_) = arrive(control, 10.0 + number, 1 + number)
        assert isinstance(prefill, Prefill)
        assert prefill.instance == "p1"
        control.handle(Finished(10.5 + number, 1 + number))


def test_busy_prefill_instances_are_kept_free_of_decodes() -> None:
    """Two requests decode on the decode instance. With frequent prompts a pair is chosen, with rare ones a prefill
    instance goes on to decode."""

    def last(gap_s: float) -> list[type[Decision]]:
        control = core(**KEPT)
        running(control, 0.0, "d0", 2)
        control.handle(InstanceDown(0.0, "d1"))
        for number in range(20):
            arrive(control, gap_s * number, number)
            control.handle(Finished(gap_s * number + 0.1, number))
        return [type(decision) for decision in arrive(control, gap_s * 20, 20)]

    assert last(0.11) == [Prefill]
    assert last(10.0) == [Prefill, Decode]


def test_a_request_that_stays_counts_once_in_the_engine_s_own_load() -> None:
    """The engine reports one running request, which decodes: no prompt of others waits there."""
    control = core(**KEPT)
    control.handle(InstanceDown(0.0, "d0"))
    running(control, 0.0, "d1", 1)
    assert staying(arrive(control, 0.0, 0)) == "p0"
    control.handle(PrefillFinished(0.2, 0))
    control.handle(Admitted(0.2, 0))
    control.handle(InstanceMeasured(0.3, "p0", running=1, waiting=0, kv_used_share=0.1))
    assert control.parts.view.prefill["llama-3-70b"].others.tolist() == [0, 0]
    control.handle(InstanceMeasured(0.3, "p0", running=2, waiting=1, kv_used_share=0.1))
    assert control.parts.view.prefill["llama-3-70b"].others.tolist() == [2, 0]


def test_other_gateways_count_a_request_that_stays() -> None:
    own, other = core(**KEPT), core(**KEPT)
    for control in (own, other):
        control.handle(InstanceDown(0.0, "d0"))
    running(own, 0.0, "d1", 1)
    assert staying(arrive(own, 0.0, 0)) == "p0"
    for sequence, event in enumerate((None, PrefillFinished(0.2, 0), Admitted(0.2, 0), Finished(0.3, 0)), start=1):
        if event is not None:
            own.handle(event)
        at = 0.1 * sequence
        bookings = tuple(own.booked(number) for number in own.requests)
        other.handle(PeerReported(at, PeerReport("own", sequence, at, bookings, whole=True)))
        mine, theirs = own.parts.view, other.parts.view
        assert theirs.prefill["llama-3-70b"].assigned.tolist() == mine.prefill["llama-3-70b"].assigned.tolist()
        for key, pool in mine.kept.items():
            assert (theirs.kept[key].batch.tolist(), theirs.kept[key].queued.tolist()) == (
                pool.batch.tolist(),
                pool.queued.tolist(),
            )
        assert prompts(other) == [0, 0]


@pytest.mark.parametrize("roles", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_histories_replay_bit_for_bit_and_release_everything(seed: int, roles: int) -> None:
    """Random requests take their steps, fail or leave, in any order."""
    rng = np.random.default_rng(seed)
    spec: dict[str, Any] = {"overcommit": True, "parameters": {"aggregated": roles}}
    control, records = core(**spec), list[LogRecord]()
    steps: dict[int, str] = {}
    seen = set()

    def handle(event: Event) -> None:
        decisions = control.handle(event)
        records.append(LogRecord(event, decisions))
        for decision in decisions[:1]:
            assert isinstance(decision, Prefill | Decode)
            if isinstance(decision, Prefill):
                steps[decision.request_id] = "kept" if len(decisions) == 2 else "prefill"
            else:
                steps[decision.request_id] = "aggregated" if decision.source == decision.target else "decode"
            seen.add(steps[decision.request_id])

    for number in range(200):
        at = 0.02 * number
        tokens = int(rng.integers(1, 3_000))
        handle(Arrived(at, Request(id=number, input_tokens=tokens, max_output_tokens=10)))
        for other in [step for step in steps if rng.random() < 0.3]:
            match steps[other], rng.random() < 0.2:
                case "prefill", False:
                    handle(PrefillFinished(at, other))
                case "prefill", True:
                    handle(Finished(at, other))
                    del steps[other]
                case "kept", False:
                    handle(PrefillFinished(at, other))
                    steps[other] = "decode"
                case (("aggregated" | "decode"), False):
                    handle(Admitted(at, other))
                    steps[other] = "running"
                case (("aggregated" | "decode" | "kept"), True):
                    handle(DecodeFailed(at, other, kv_lost=True))
                case _:
                    handle(Finished(at, other))
                    del steps[other]
        (pool,) = control.parts.view.decode.values()
        assert pool.prompts.sum() == sum(step == "aggregated" for step in steps.values())
    assert seen >= ({"aggregated", "prefill", "decode"} if roles == 1 else {"aggregated", "kept"})
    for other in list(steps):
        handle(Finished(5.0, other))
    view = control.parts.view
    for pool in (*view.decode.values(), *view.kept.values()):
        for counts in (pool.prompts, pool.batch, pool.queued, pool.prompts_s(5.0)):
            assert not counts.any()
        assert pool.free_kv_bytes.tolist() == pool.capacity_bytes.tolist()
    assert not any(load.pending_s for load in control.loads(5.0).values())
    for record, again in replay(core(**spec), records):
        assert decisions_equal(record.decisions, again)
