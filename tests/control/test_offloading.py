"""Prefill across datacenters in the core: choice of the site, bookings, role switches, and that all bookings are
released."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.control import Control, ControlSpec
from kvroute.oracle import OracleSpec
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.policies.fleet.role_switch import LongTerm
from kvroute.topology import Cluster, InstanceDefaults, build, parse, two_datacenters
from kvroute.types import (
    Admitted,
    Arrived,
    CongestionMeasured,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceUp,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Request,
    ReviewDue,
    RoleSwitched,
    SwitchRole,
    TransferFinished,
)
from kvroute_engine.files.units import Size

AWAY, HOME = "prefill-site", "local-site"
CUT = (0.0, 0.0, 0.0, 0.0, 0.99)
FREE = (0.0,) * 5


def cluster(prefill: int = 2, local: int = 2, decode: int = 2) -> Cluster:
    """Return a prefill-only site and a home site with 100 Gbps between them."""
    return build(two_datacenters(prefill_nodes=prefill, local_prefill_nodes=local, decode_nodes=decode))


def core(sites: Cluster | None = None, **offload: Any) -> Control:
    """Return a core that offloads requests of more than 20,000 uncached tokens by default."""
    settings: dict[str, Any] = {"threshold_tokens": 20_000.0, "rule": "scarce"} | offload
    spec = OffloadSpec(**settings)
    return ControlSpec(prefill="cache-aware", offload=spec).build(sites or cluster())


def arrive(
    control: Control, number: int, tokens: int, at: float = 0.0, blocks: tuple[int, ...] = ()
) -> tuple[Decision, ...]:
    """Let one request arrive."""
    request = Request(id=number, input_tokens=tokens, blocks=blocks, block_tokens=1_000, max_output_tokens=100)
    return control.handle(Arrived(at, request))


def site(sites: Cluster, name: str) -> str:
    """Return the datacenter of an instance."""
    return sites.instances[sites.index(name)].datacenter


def prefill_of(decisions: tuple[Decision, ...]) -> Prefill:
    """Return the first decision, which must be a prefill."""
    first = decisions[0]
    assert isinstance(first, Prefill)
    return first


@given(st.integers(1, 60_000), st.floats(1_000.0, 50_000.0), st.booleans())
def test_only_prompts_above_the_threshold_are_offloaded(tokens: int, threshold: float, layerwise: bool) -> None:
    """With layer-wise transfer an offloaded prefill gets its decode target at once; every other prefill gets it when it
    ends."""
    sites = cluster()
    decisions = arrive(core(sites, threshold_tokens=threshold, layerwise=layerwise), 1, tokens)
    prefill = prefill_of(decisions)
    assert prefill.offload is not None
    away = tokens > threshold
    assert (site(sites, prefill.instance), prefill.offload.site) == ((AWAY,) * 2 if away else (HOME,) * 2)
    assert [type(decision) for decision in decisions[1:]] == ([Decode] if away and layerwise else [])


@pytest.mark.parametrize("parted", [True, False], ids=["parted", "in-all"])
def test_utilisation_by_others_excludes_own_bytes(parted: bool) -> None:
    """Other traffic takes 0.4 of the link and own traffic a part: both kinds of telemetry give the same two shares."""
    spec = ControlSpec(
        prefill="cache-aware",
        offload=OffloadSpec(threshold_tokens=20_000.0, rule="scarce"),
        oracle=OracleSpec(separates_own_traffic=parted),
    )
    control = spec.build(cluster())
    offloading = control.offloading
    assert offloading is not None
    away = next(iter(offloading.egress))
    arrive(control, 1, 30_000)
    control.handle(PrefillFinished(1.0, 1))
    control.handle(TransferFinished(1.5, 1))
    own = offloading.egress[away].own_share(2.0)
    assert 0.01 < own < 0.5
    control.handle(CongestionMeasured(2.0, (0.0, 0.0, 0.0, 0.0, 0.4 if parted else 0.4 + own)))
    assert offloading.utilisation(away, 2.0) == pytest.approx((0.4, 0.4 + own))


def test_a_cached_prefix_keeps_a_long_prompt_at_home() -> None:
    sites = cluster()
    control = core(sites)
    blocks = tuple(range(1, 31))
    home = next(i.name for i in sites.instances if i.datacenter == HOME and i.role == "prefill")
    control.handle(KvStored(0.0, home, blocks[:15], 1_000))
    kept = prefill_of(arrive(control, 1, 30_000, blocks=blocks))
    assert (kept.instance, kept.cached_tokens) == (home, 15_000)
    assert kept.offload is not None
    assert kept.offload.terms["incremental_tokens"] == 15_000


def test_with_spare_bandwidth_the_longer_prefix_is_copied_to_the_prefill_site() -> None:
    sites = cluster()
    control = core(sites, rule="abundant")
    blocks = tuple(range(1, 61))
    home = next(i.name for i in sites.instances if i.datacenter == HOME and i.role == "prefill")
    control.handle(KvStored(0.0, home, blocks[:30], 1_000))
    prefill = prefill_of(arrive(control, 1, 60_000, blocks=blocks))
    assert site(sites, prefill.instance) == AWAY
    assert (prefill.copy_from, prefill.copy_tokens, prefill.cached_tokens) == (home, 30_000, 30_000)
    assert prefill.copy_bytes == 30_000 * 327_680.0


def test_a_model_may_be_a_file(tmp_path: Path) -> None:
    """The engines of such a model are addressed by the path of the file, which differs from the model's name."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "torch_dtype": "bfloat16"}))
    defaults = InstanceDefaults(model=str(tmp_path / "config.json"), tp=8, kv_capacity_bytes=Size(1e11))
    sites = build(two_datacenters(prefill_nodes=1, local_prefill_nodes=1, decode_nodes=1, defaults=defaults))
    assert site(sites, prefill_of(arrive(core(sites), 1, 40_000)).instance) == AWAY


@given(st.integers(1, 60), st.integers(0, 59), st.booleans())
def test_a_request_without_a_copy_source_is_placed_by_each_sites_own_cache(
    blocks: int, held: int, at_home: bool
) -> None:
    """With spare bandwidth or not, the decision is that of the `scarce` rule."""
    sites = cluster()
    holder = next(i.name for i in sites.instances if (i.datacenter == HOME) == at_home and i.role == "prefill")
    made = []
    for named in ("abundant", "scarce"):
        control = core(sites, rule=named)
        control.handle(KvStored(0.0, holder, tuple(range(1, held + 1)), 1_000))
        tokens = 1_000 * blocks
        request = Request(
            id=1,
            input_tokens=tokens,
            blocks=tuple(range(1, blocks + 1)),
            block_tokens=1_000,
            copyable=named == "scarce",
        )
        made.append(prefill_of(control.handle(Arrived(0.0, request))))
    assert (made[0].copy_from, made[0].copy_tokens) == ("", 0)
    assert (made[0].instance, made[0].cached_tokens) == (made[1].instance, made[1].cached_tokens)
    assert made[0].offload == made[1].offload


def test_all_prompts_are_prefilled_at_home_while_the_link_is_cut() -> None:
    sites = cluster()
    control = core(sites)
    control.handle(CongestionMeasured(0.0, CUT))
    assert site(sites, prefill_of(arrive(control, 1, 40_000)).instance) == HOME
    control.handle(CongestionMeasured(1.0, FREE))
    assert site(sites, prefill_of(arrive(control, 2, 40_000, at=1.0)).instance) == AWAY


def test_a_request_whose_wan_path_failed_is_prefilled_again_at_home() -> None:
    sites = cluster()
    control = core(sites)
    prefill, decode = arrive(control, 1, 40_000)
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    control.handle(PrefillFinished(5.0, 1))
    again = prefill_of(control.handle(DecodeFailed(6.0, 1, kv_lost=True)))
    assert site(sites, again.instance) == HOME
    assert site(sites, prefill_of(arrive(control, 2, 40_000, at=6.0)).instance) == AWAY


def serve(control: Control, number: int, tokens: int, at: float, blocks: tuple[int, ...] = ()) -> None:
    """Run a whole request in no time, with an output of 1,000 tokens."""
    decisions = arrive(control, number, tokens, at, blocks)
    decisions += control.handle(PrefillFinished(at, number))
    assert any(isinstance(decision, Decode) for decision in decisions)
    control.handle(TransferFinished(at, number))
    control.handle(Admitted(at, number))
    control.handle(Finished(at, number, None, 1_000))


def test_roles_follow_the_traffic_and_a_switching_instance_gets_no_requests() -> None:
    """Three quarters of the home instances decode, and the traffic is long prompts with short outputs: prefill capacity
    is missing."""
    sites = cluster(prefill=1, local=1, decode=3)
    control = core(sites, long_term=LongTerm(requests_min=20, busy_above=0.5), threshold_tokens=None)
    for number in range(50):
        serve(control, number, 15_000, at=number * 0.1)
    for number in range(100, 140):
        arrive(control, number, 15_000, at=5.0)
    (switch,) = control.handle(ReviewDue(5.0))
    assert isinstance(switch, SwitchRole)
    assert switch.role == "prefill"
    for number in range(200, 230):
        assert prefill_of(arrive(control, number, 1_000, at=6.0)).instance != switch.instance
    control.handle(RoleSwitched(7.0, switch.instance, switch.role))
    chosen = {prefill_of(arrive(control, number, 1_000, at=7.0)).instance for number in range(300, 310)}
    assert switch.instance in chosen


@pytest.mark.parametrize(
    ("cached", "verdict"), [("nothing", "switch_role"), ("own", "costly"), ("shared", "switch_role")]
)
def test_instances_with_valuable_caches_keep_their_role(cached: str, verdict: str) -> None:
    """Long outputs need more decode instances, and 500 tokens of every prompt must be computed. If 30,000 more are
    cached, for another conversation each, a prefill instance saves more than a role switch gains. A prefix shared by
    many requests is lost only once."""
    sites = cluster(prefill=1, local=3, decode=1)
    control = core(sites, long_term=LongTerm(requests_min=20, busy_above=0.01), threshold_tokens=1e5)
    homes = [i.name for i in sites.instances if i.datacenter == HOME and i.role == "prefill"]
    for number in range(60):
        first = 30 * (number if cached == "own" else number % 3) + 1
        blocks = () if cached == "nothing" else tuple(range(first, first + 30))
        control.handle(KvStored(number * 0.4, homes[number % 3], blocks, 1_000))
        tokens = 30_500 if blocks else 500
        if number < 20:
            serve(control, number, tokens, number * 0.4, blocks)
        else:
            arrive(control, number, tokens, number * 0.4, blocks)
            control.handle(PrefillFinished(number * 0.4, number))
    role_switches = control.handle(ReviewDue(24.0))
    assert control.offloading is not None
    review = control.offloading.last_review
    assert review is not None
    assert review.busy == ("decode",)
    assert review.verdict == verdict
    assert [type(role_switch) for role_switch in role_switches] == ([SwitchRole] if verdict == "switch_role" else [])


def test_an_instance_of_the_prefill_site_never_switches_its_role() -> None:
    sites = cluster()
    away = next(i.name for i in sites.instances if i.datacenter == AWAY)
    with pytest.raises(InputError, match="does not change its role"):
        core(sites).handle(RoleSwitched(0.0, away, "decode"))


def test_a_cluster_without_a_site_to_offload_to_is_rejected() -> None:
    one = parse(
        "name: one\nnodes: [{name: n0}]\ndefaults: {model: llama-3-8b, kv_capacity: 10 GB}\n"
        "timing: {default: {prefill: {kind: linear, per_token: 1 us}, decode: {base: 1 ms}}}\n"
        "instances: [{name: p, role: prefill, gpus: 'n0:0'}, {name: d, role: decode, gpus: 'n0:1'}]\n"
    )
    with pytest.raises(InputError, match="no datacenter has prefill instances only"):
        core(one)


class Anything(RuleBasedStateMachine):
    """Requests, failures, cuts and role switches in any order: all bookings on links and instances are released."""

    def __init__(self) -> None:
        super().__init__()
        self.sites = cluster()
        self.spec = ControlSpec(
            prefill="cache-aware",
            offload=OffloadSpec(rule="auto", long_term=LongTerm(requests_min=2, window_s=50.0, review_s=1.0)),
        )
        self.control = self.spec.build(self.sites)
        self.events: list[Event] = []
        self.made: list[tuple[Decision, ...]] = []
        self.stage: dict[int, str] = {}
        self.switching: dict[str, Any] = {}
        self.now, self.number = 0.0, 0

    def notify(self, event: Event) -> tuple[Decision, ...]:
        """Pass an event to the core; store the event and the decisions."""
        decisions = self.control.handle(event)
        self.events.append(event)
        self.made.append(decisions)
        return decisions

    def follow(self, number: int, decisions: tuple[Decision, ...]) -> None:
        """Update the stage of a request after new decisions about it."""
        match decisions:
            case (Reject(),):
                self.stage.pop(number, None)
            case (Prefill(),):
                self.stage[number] = "prefill"
            case (Prefill(), Decode()):
                self.stage[number] = "early"
            case (Decode(),):
                self.stage[number] = "transfer"
            case _:
                raise AssertionError(decisions)

    def of(self, *stages: str) -> list[int]:
        """Return the requests at these stages."""
        return [number for number, stage in self.stage.items() if stage in stages]

    @rule(tokens=st.sampled_from([500, 5_000, 30_000, 90_000]), step=st.floats(0.0, 3.0), shared=st.integers(0, 3))
    def arrival(self, tokens: int, step: float, shared: int) -> None:
        self.now += step
        self.number += 1
        blocks = tuple(1_000 * shared + k for k in range(tokens // 1_000))
        request = Request(id=self.number, input_tokens=tokens, blocks=blocks, block_tokens=1_000, max_output_tokens=9)
        self.follow(self.number, self.notify(Arrived(self.now, request)))

    @precondition(lambda self: self.of("prefill", "early"))
    @rule(data=st.data(), fails=st.booleans())
    def prefilled(self, data: st.DataObject, fails: bool) -> None:
        number = data.draw(st.sampled_from(self.of("prefill", "early")))
        if fails:
            self.follow(number, self.notify(PrefillFailed(self.now, number)))
        elif self.stage[number] == "early":
            assert self.notify(PrefillFinished(self.now, number)) == ()
            self.stage[number] = "transfer"
        else:
            self.follow(number, self.notify(PrefillFinished(self.now, number)))

    @precondition(lambda self: self.of("transfer"))
    @rule(data=st.data(), fails=st.booleans(), lost=st.booleans())
    def transferred(self, data: st.DataObject, fails: bool, lost: bool) -> None:
        number = data.draw(st.sampled_from(self.of("transfer")))
        if fails:
            self.follow(number, self.notify(DecodeFailed(self.now, number, lost)))
        else:
            self.notify(TransferFinished(self.now, number))
            self.notify(Admitted(self.now, number))
            self.stage[number] = "decode"

    @precondition(lambda self: self.stage)
    @rule(data=st.data(), answer=st.sampled_from([None, 10, 1_000]))
    def finished(self, data: st.DataObject, answer: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.stage)))
        self.notify(Finished(self.now, number, None, answer))
        del self.stage[number]

    @rule(full=st.sampled_from([0.0, 0.6, 0.9, 0.99]), step=st.floats(0.0, 2.0))
    def congestion(self, full: float, step: float) -> None:
        self.now += step
        self.notify(CongestionMeasured(self.now, (0.0, 0.0, 0.0, 0.0, full)))

    @rule(data=st.data(), up=st.booleans())
    def health(self, data: st.DataObject, up: bool) -> None:
        name = data.draw(st.sampled_from([instance.name for instance in self.sites.instances]))
        self.notify(InstanceUp(self.now, name) if up else InstanceDown(self.now, name))

    @rule(step=st.floats(0.0, 30.0))
    def review(self, step: float) -> None:
        self.now += step
        for decision in self.notify(ReviewDue(self.now)):
            assert isinstance(decision, SwitchRole)
            assert decision.instance not in self.switching
            self.switching[decision.instance] = decision.role

    @precondition(lambda self: self.switching)
    @rule()
    def role_switch_ended(self) -> None:
        name, role = self.switching.popitem()
        self.notify(RoleSwitched(self.now, name, role))

    @invariant()
    def a_switching_instance_gets_no_new_request(self) -> None:
        if self.made:
            for decision in self.made[-1]:
                chosen = {Prefill: "instance", Decode: "target"}.get(type(decision))
                assert chosen is None or getattr(decision, chosen) not in self.switching

    def teardown(self) -> None:
        for number in sorted(self.stage):
            self.notify(Finished(self.now, number))
        assert self.control.offloading is not None
        assert [egress.backlog_bytes for egress in self.control.offloading.egress.values()] == [0.0]
        assert self.control.in_flight == 0
        assert all((load.queued, load.pending_s) == (0, 0.0) for load in self.control.loads(self.now).values())
        again = self.spec.build(self.sites)
        for event, decisions in zip(self.events, self.made, strict=True):
            repeated = again.handle(event)
            assert [str(decision) for decision in repeated] == [str(decision) for decision in decisions]


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
