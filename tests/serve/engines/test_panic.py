"""The panic threshold: the state against its definition, and instances that fail and recover in any order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER

from kvroute import topology
from kvroute.http.deadlines import Deadlines
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.engines.factory import engine_clients
from kvroute.serve.engines.panic import CALM_S, Panics, PanicSet, PanicState

INSTANCES = {
    **{f"decode{number}": "decode" for number in range(3)},
    **{f"prefill{number}": "prefill" for number in range(2)},
    "whole0": "both",
}
NAMES = tuple(INSTANCES)
steps = st.tuples(
    st.sampled_from(["healthy", "ill", "gone", "hold", "release", "fails", "answers", "time"]),
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.5, 3.0, 8.0]),
)


def cluster_text() -> str:
    """Return a cluster of three decode instances, two prefill instances, and one that does both."""
    head = CLUSTER.split("instances:")[0] + "instances:\n"
    for number, (name, role) in enumerate(INSTANCES.items()):
        gpus = f"node{number % 2}:{number // 2}"
        url = f"http://127.0.0.1:{4000 + number}"
        head += f'  - {{name: {name}, role: {role}, tp: 1, gpus: "{gpus}", endpoint: {{url: "{url}"}}}}\n'
    return head


@given(st.floats(0, 1), st.lists(st.tuples(st.integers(0, 9), st.floats(0.001, 20)), max_size=60))
def test_a_panic_begins_at_once_and_ends_after_enough_instances_stay_available(
    share: float, samples: list[tuple[int, float]]
) -> None:
    """The state is recomputed from the history; it never ends twice within CALM_S, even if instances flap."""
    state, now, active = PanicState(share), 0.0, False
    enough_since: float | None = None
    ends: list[float] = []
    for available, seconds in samples:
        now += seconds
        few = available < share * 9
        if few:
            enough_since = None
        elif enough_since is None:
            enough_since = now
        expected = few or (active and enough_since is not None and now - enough_since < CALM_S)
        assert state.update(available, 9, now) is (expected is not active)
        assert state.active is expected
        if active and not expected:
            ends.append(now)
        active = expected
    assert all(later - earlier >= CALM_S for earlier, later in pairwise(ends))
    if share == 0:
        assert not active


@given(st.lists(steps, max_size=60), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@settings(max_examples=80, deadline=None)
def test_below_the_panic_threshold_all_listening_instances_get_requests(
    history: list[tuple[str, str, float]], share: float
) -> None:
    """In every state: below the threshold, all instances that listen and are not held are up. Otherwise only available
    instances are up. Each change is reported once, and held instances get no requests."""
    cluster = topology.parse(cluster_text())
    reported: dict[str, bool] = dict.fromkeys(NAMES, True)
    panic_changes: list[tuple[str, bool]] = []

    def changed(name: str, up: bool, at: float) -> None:
        assert reported[name] is not up, "each change is reported once"
        reported[name] = up

    def panicked(panicking: PanicSet) -> None:
        panic_changes.append((panicking.role, panicking.state.active))

    engines = engine_clients(cluster, GatewaySettings(), changed, Deadlines(), exact=lambda model: False)
    panics = Panics(engines, share, panicked)
    now, held, stopped = 0.0, set[str](), set[str]()
    for action, name, seconds in history:
        availability = engines[name].availability
        if action in ("healthy", "ill", "gone"):
            (stopped.add if action == "gone" else stopped.discard)(name)
            availability.set_healthy(action == "healthy", now, present=action != "gone")
        elif action == "hold":
            held.add(name)
            availability.hold("drained", now)
        elif action == "release":
            held.discard(name)
            availability.release("drained", now)
        elif action == "time":
            now += seconds
            for engine in engines.values():
                engine.availability.refresh(now)
            panics.refresh(now)
        elif action == "fails":
            for attempt in [availability.started(now) for _ in range(30)]:
                availability.failed(attempt, now)
        else:
            availability.succeeded(availability.started(now), now)
        active = {panic.role: panic.state.active for panic in panics.sets}
        for role in ("prefill", "decode"):
            members = [n for n in NAMES if INSTANCES[n] in (role, "both")]
            counted = [n for n in members if n not in held and n not in stopped]
            available = [
                n
                for n in counted
                if engines[n].availability.healthy and engines[n].availability.breaker.state(now) == "closed"
            ]
            if len(available) < share * len(counted):
                assert active[role]
            if active[role]:
                assert all(reported[n] for n in counted)
                assert not any(reported[n] for n in members if n in held | stopped)
            else:
                assert all(reported[n] for n in available)
        for n in NAMES:
            assert engines[n].availability.up is reported[n]
            if not any(active[role] for role in active if INSTANCES[n] in (role, "both")):
                availability = engines[n].availability
                assert reported[n] == (availability.healthy and n not in held and availability.breaker.allows(now))
    for role in ("prefill", "decode"):
        changes = [state for change, state in panic_changes if change == role]
        assert changes == [number % 2 == 0 for number in range(len(changes))], "begin and end alternate"
    if share == 0:
        assert not panic_changes


def test_panic_begins_below_half_of_the_instances() -> None:
    """Four instances decode: two that are down have no effect; with a third one down, all four get requests again."""
    cluster = topology.parse(cluster_text())
    reported: list[tuple[str, bool]] = []
    engines = engine_clients(
        cluster,
        GatewaySettings(),
        lambda name, up, at: reported.append((name, up)),
        Deadlines(),
        exact=lambda model: False,
    )
    panic_changes: list[tuple[str, str, int, int]] = []
    panics = Panics(
        engines,
        0.5,
        lambda panic: panic_changes.append((panic.model, panic.role, panic.state.available, panic.state.instances)),
    )
    for name in ("decode0", "decode1", "decode2"):
        engines[name].availability.set_healthy(False, 1.0)
    assert panic_changes == [("llama-3-70b", "decode", 1, 4)]
    assert reported == [("decode0", False), ("decode1", False), ("decode0", True), ("decode1", True)]
    engines["decode0"].availability.set_healthy(True, 2.0)
    panics.refresh(2.0 + CALM_S / 2)
    assert len(panic_changes) == 1
    panics.refresh(2.0 + CALM_S)
    assert panic_changes[1:] == [("llama-3-70b", "decode", 2, 4)]
    assert reported[4:] == [("decode1", False), ("decode2", False)]
