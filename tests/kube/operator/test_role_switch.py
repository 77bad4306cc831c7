"""Role switches of engine pods: asked, drained, re-labelled, ready; one at a time, never the last of a role."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from tests.kube.operator.cluster_examples import pod
from tests.kube.operator.cluster_model import ClusterModel
from tests.kube.resources.router_examples import router

from kvroute.kube.operator.observed import is_ready, labels_of
from kvroute.kube.operator.reconcile import reconcile
from kvroute.kube.operator.role_switch import DRAINED_SINCE, TARGET_ROLE, phase_of
from kvroute.kube.resources.engines import role_of

START_S = 1.8e9
DRAIN_S = 120


def step(cluster: ClusterModel, now: float, idle: frozenset[str] = frozenset()) -> None:
    cluster.execute(reconcile(cluster.snapshot(idle), now))
    cluster.settle()


def role(cluster: ClusterModel, name: str) -> str | None:
    return role_of(labels_of(cluster.get("Pod", name)))


def asked(*names: str, target: str = "decode", count: int = 3, ready: bool = True) -> ClusterModel:
    """Return a cluster of `count` prefill engines and one decode engine; those named shall change their role."""
    pods = [
        pod(f"p{index}", ready=ready, labels={TARGET_ROLE: target} if f"p{index}" in names else {})
        for index in range(count)
    ]
    return ClusterModel([router(), *pods, pod("d0", "decode")])


def test_the_steps_of_a_switch() -> None:
    """While an engine is drained gateways see no engine; it gets its role when the time is over."""
    cluster = asked("p0")
    step(cluster, START_S)
    assert role(cluster, "p0") is None
    assert cluster.get("Pod", "p0")["metadata"]["annotations"][DRAINED_SINCE] == "2027-01-15T08:00:00Z"
    step(cluster, START_S + DRAIN_S - 1)
    assert role(cluster, "p0") is None
    step(cluster, START_S + DRAIN_S)
    assert role(cluster, "p0") == "decode"
    step(cluster, START_S + DRAIN_S)
    assert TARGET_ROLE not in labels_of(cluster.get("Pod", "p0"))
    assert [event.reason for event in cluster.events.values() if event.ref.name == "p0"] == [
        "RoleChangeBegins",
        "RoleChanged",
    ]
    assert cluster.get("Pod", "p0")["metadata"]["annotations"] == {}


def test_an_idle_engine_is_not_waited_for() -> None:
    cluster = asked("p0")
    step(cluster, START_S)
    step(cluster, START_S + 1, frozenset({"pod-p1"}))
    assert role(cluster, "p0") is None
    step(cluster, START_S + 1, frozenset({"pod-p0"}))
    assert role(cluster, "p0") == "decode"


def test_an_engine_that_restarts_in_its_new_role_is_waited_for() -> None:
    """The switch ends when the pod is ready."""
    cluster = asked("p0")
    step(cluster, START_S)
    step(cluster, START_S + DRAIN_S)
    cluster.get("Pod", "p0")["status"]["conditions"][0]["status"] = "False"
    step(cluster, START_S + 2 * DRAIN_S)
    assert phase_of(cluster.get("Pod", "p0")) == "changed"
    cluster.get("Pod", "p0")["status"]["conditions"][0]["status"] = "True"
    step(cluster, START_S + 2 * DRAIN_S)
    assert phase_of(cluster.get("Pod", "p0")) == "serving"


def test_a_switch_that_is_called_off_ends_at_once() -> None:
    cluster = asked("p0")
    step(cluster, START_S)
    del cluster.get("Pod", "p0")["metadata"]["labels"][TARGET_ROLE]
    step(cluster, START_S + 1)
    assert role(cluster, "p0") == "prefill"
    assert phase_of(cluster.get("Pod", "p0")) == "serving"


def test_the_last_engine_of_a_role_stays() -> None:
    """One Event says so; the switch begins when another engine of the role is ready."""
    cluster = asked("p0", count=1)
    for _ in range(3):
        step(cluster, START_S)
    assert role(cluster, "p0") == "prefill"
    [event] = [event for event in cluster.events.values() if event.ref.name == "p0"]
    assert (event.reason, event.message) == (
        "RoleChangeWaits",
        "It stays prefill: it is the last ready engine of that role.",
    )
    cluster.create(pod("p1"))
    step(cluster, START_S)
    assert role(cluster, "p0") is None


def test_an_unknown_role_is_refused_once() -> None:
    cluster = asked("p0", target="cook")
    for _ in range(3):
        step(cluster, START_S)
    [event] = [event for event in cluster.events.values() if event.ref.name == "p0"]
    assert event.message == f"'cook' is no role; set {TARGET_ROLE} to prefill, decode or both."
    del cluster.get("Pod", "p0")["metadata"]["labels"][TARGET_ROLE]
    step(cluster, START_S)
    assert cluster.get("Pod", "p0")["metadata"]["annotations"] == {}


def _runs(cluster: ClusterModel) -> Iterator[list[str | None]]:
    """Yield the roles of all engines after each step."""
    engines = [pod["metadata"]["name"] for pod in cluster.of("Pod")]  # the steps add a pod of the gateway
    now = START_S
    for _ in range(30):
        step(cluster, now)
        now += DRAIN_S / 2
        yield [role(cluster, name) for name in engines]


@given(
    roles=st.lists(st.sampled_from(["prefill", "decode"]), min_size=1, max_size=6),
    targets=st.lists(st.sampled_from(["", "prefill", "decode", "both"]), min_size=6, max_size=6),
)
def test_switches_never_empty_a_role(roles: list[str], targets: list[str]) -> None:
    """Two engines are never drained at once, and each role that had a ready engine keeps one."""
    pods = [
        pod(f"e{index}", role, labels={TARGET_ROLE: target} if target else {})
        for index, (role, target) in enumerate(zip(roles, targets, strict=False))
    ]
    cluster = ClusterModel([router(), *pods])
    for now in _runs(cluster):
        assert now.count(None) <= 1
        for role in set(roles):
            assert role in now
    assert all(is_ready(found_pod) for found_pod in cluster.of("Pod"))
    for engine in cluster.of("Pod"):
        target = labels_of(engine).get(TARGET_ROLE)
        assert target is None or role_of(labels_of(engine)) != target
