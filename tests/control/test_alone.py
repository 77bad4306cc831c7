"""A decode instance that serves a request alone: when it is cheaper than the best pair, bookings and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
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
name: alone
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
    return ControlSpec(**{"decode": "foresight-joint", **spec}).build(parse(text))


def arrive(
    control: Control, at: float, number: int, tokens: int = 1_000, only: tuple[str, ...] | None = None
) -> tuple[Decision, ...]:
    request = Request(id=number, input_tokens=tokens, max_output_tokens=10)
    return control.handle(Arrived(at, request, only=only))


def alone(decisions: tuple[Decision, ...]) -> str:
    """Return the instance that serves the request alone."""
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
        assert alone(decode) == name
        control.handle(Admitted(at, number))


def prompts(control: Control) -> list[int]:
    """Return the number of prompts booked on each decode instance."""
    (pool,) = control.parts.view.decode.values()
    found: list[int] = pool.prompts.tolist()
    return found


def test_an_idle_decode_instance_serves_a_request_without_a_transfer() -> None:
    control = core()
    assert alone(arrive(control, 0.0, 0)) == "d0"


def test_the_delay_of_running_requests_can_make_the_pair_cheaper() -> None:
    """The prompt takes 110 ms on either instance. With four running requests on each decode instance, its delay sums up
    to 440 ms; the transfer takes 131 ms."""
    control = core()
    running(control, 0.0, "d0", 4)
    running_on_other = [
        control.handle(
            Arrived(0.0, Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True), only=("d1",))
        )
        for number in range(4)
    ]
    assert [alone(each) for each in running_on_other] == ["d1"] * 4
    for number in range(4):
        control.handle(Admitted(0.0, number))
    (prefill,) = arrive(control, 1.0, 10)
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    parts = prefill.terms.parts
    index = prefill.terms.names.index(prefill.instance)
    # Pair: 110 ms prefill, 131 ms transfer, a step. Alone: prefill, two steps beside chunks, delay of four requests.
    steps_s = 2 * (0.01 + 4 * 0.1e-3)
    slot_s = parts["alone_s"][index] - (0.11 + steps_s + 4 * 0.11)
    assert parts["pair_s"][index] == pytest.approx(0.11 + 0.1311 + 0.0105 + slot_s, rel=1e-2)
    light = core(parameters={"delay_weight": 0.1})
    running(light, 0.0, "d0", 4)
    light.handle(InstanceDown(0.0, "d1"))
    assert alone(arrive(light, 1.0, 10)) == "d0"


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
    assert decode.terms.parts["prefill_s"][1] == pytest.approx(0.01 + 1 * 100e-6)


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
    columns = ("wait_s", "prefill_s", "transfer_s", "steps_s", "slot_s", "delay_s")
    assert terms.cost.tolist() == pytest.approx(np.sum([terms.parts[name] for name in columns], axis=0).tolist())
    assert terms.cost[0] == terms.cost.min()
    assert terms.parts["transfer_s"][2] == pytest.approx(1_000 * 327_680 / 2.5e9, rel=1e-2)


@pytest.mark.parametrize("end", ["admitted", "finished", "failed"])
def test_a_prompt_is_booked_until_its_first_token_or_the_end_of_the_request(end: str) -> None:
    control = core()
    assert alone(arrive(control, 0.0, 0)) == "d0"
    assert prompts(control) == [1, 0]
    assert control.loads(0.0)["d0"].pending_s == pytest.approx(0.11)
    if end == "admitted":
        control.handle(Admitted(0.1, 0))
    elif end == "finished":
        control.handle(Finished(0.1, 0))
    else:
        assert alone(control.handle(DecodeFailed(0.1, 0, kv_lost=True))) == "d1"
        assert prompts(control) == [0, 1]
        return
    assert prompts(control) == [0, 0]
    assert control.loads(0.1)["d0"].pending_s == 0.0


def test_instances_that_are_down_have_failed_the_request_or_must_not_serve_it_are_excluded() -> None:
    control = core()
    control.handle(InstanceDown(0.0, "d0"))
    assert alone(arrive(control, 0.0, 0)) == "d1"
    control.handle(InstanceUp(0.0, "d0"))
    assert alone(arrive(control, 0.0, 1)) == "d0"
    assert alone(control.handle(DecodeFailed(0.1, 1))) == "d1"
    for number in (0, 1):
        control.handle(Finished(0.1, number))
    assert alone(arrive(control, 0.2, 2, only=("p0", "p1", "d1"))) == "d1"


def test_an_instance_without_room_is_not_chosen() -> None:
    """The request needs 331 MB and no decode instance has as much. The prefill policy chooses, as for pairs."""
    control = core(TEXT.replace("kv_capacity: 100 GB", "kv_capacity: 0.3 GB"))
    (prefill,) = arrive(control, 0.0, 0)
    assert isinstance(prefill, Prefill)


def test_requests_are_served_when_no_prefill_instance_is_up() -> None:
    control = core()
    for name in ("p0", "p1"):
        control.handle(InstanceDown(0.0, name))
    assert alone(arrive(control, 0.0, 0, 50_000)) == "d0"
    without = core(parameters={"alone": 0})
    for name in ("p0", "p1"):
        without.handle(InstanceDown(0.0, name))
    (refused,) = arrive(without, 0.0, 0)
    assert isinstance(refused, Reject)


def test_a_constraint_between_prefill_and_decode_holds_on_one_instance() -> None:
    """No pair is inside one node, so that a pair would be rejected."""
    assert alone(arrive(core(constraint="node:required"), 0.0, 0)) == "d0"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (TEXT, {"parameters": {"alone": 0}}),
        (TEXT, {"decode": "foresight"}),
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
    control.handle(InstanceDown(0.0, "d0"))
    control.handle(InstanceUp(1.0, "d0", returned=True))
    places = []
    for number in range(10):
        places.append(alone(arrive(control, 2.0 + number, number)))
        control.handle(Admitted(2.5 + number, number))
        control.handle(Finished(2.6 + number, number))
    assert places.count("d0") < places.count("d1")


def test_another_instance_that_serves_the_request_gets_its_prompt() -> None:
    control = core()
    assert alone(arrive(control, 0.0, 0)) == "d0"
    assert alone(control.handle(Served(0.1, 0, "d1"))) == "d1"
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
    for value, name in ((2, "alone"), (0.5, "alone"), (-1, "alone")):
        with pytest.raises(InputError, match=name):
            ControlSpec(decode="foresight-joint", parameters={"alone": value}).check()
    with pytest.raises(InputError, match="delay_weight"):
        ControlSpec(decode="foresight-joint", parameters={"delay_weight": float("nan")}).check()


@pytest.mark.parametrize("seed", range(5))
def test_histories_replay_bit_for_bit_and_release_everything(seed: int) -> None:
    """Random requests take their steps, fail or leave, in any order."""
    rng = np.random.default_rng(seed)
    control, records = core(overcommit=True), list[LogRecord]()
    steps: dict[int, str] = {}
    seen = set()

    def handle(event: Event) -> None:
        decisions = control.handle(event)
        records.append(LogRecord(event, decisions))
        for decision in decisions:
            assert isinstance(decision, Prefill | Decode)
            if isinstance(decision, Prefill):
                steps[decision.request_id] = "prefill"
            else:
                steps[decision.request_id] = "alone" if decision.source == decision.target else "decode"
            seen.add(steps[decision.request_id])

    for number in range(200):
        at = 0.02 * number
        tokens = int(rng.integers(1, 3_000))
        handle(Arrived(at, Request(id=number, input_tokens=tokens, max_output_tokens=10)))
        for other in [each for each in steps if rng.random() < 0.3]:
            match steps[other], rng.random() < 0.2:
                case "prefill", False:
                    handle(PrefillFinished(at, other))
                case "prefill", True:
                    handle(Finished(at, other))
                    del steps[other]
                case (("alone" | "decode"), False):
                    handle(Admitted(at, other))
                    steps[other] = "running"
                case (("alone" | "decode"), True):
                    handle(DecodeFailed(at, other, kv_lost=True))
                case _:
                    handle(Finished(at, other))
                    del steps[other]
        (pool,) = control.parts.view.decode.values()
        assert pool.prompts.sum() == sum(step == "alone" for step in steps.values())
    assert seen >= {"alone", "prefill", "decode"}
    for other in list(steps):
        handle(Finished(5.0, other))
    (pool,) = control.parts.view.decode.values()
    for counts in (pool.prompts, pool.batch, pool.queued, pool.prompts_s(5.0)):
        assert not counts.any()
    assert pool.free_kv_bytes.tolist() == pool.capacity_bytes.tolist()
    for record, again in replay(core(overcommit=True), records):
        assert decisions_equal(record.decisions, again)
