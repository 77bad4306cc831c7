"""Settings of the worker's wrapper, and the wait for the labels, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.types import InputError
from kvroute_engine.topology_labels import (
    MissingTopology,
    TopologyWorkerSpec,
    engine_environment,
    wait_for_labels,
)
from kvroute_engine.topology_labels.worker import DEFAULT_FOLDERS, ENABLED, LEVEL, MOUNT_PATH, POLICY, WAIT_S

ON = {"KVROUTE_TOPOLOGY_ENABLED": "true"}


@given(st.sampled_from(ENABLED), st.sampled_from(MOUNT_PATH), st.sampled_from(LEVEL), st.sampled_from(POLICY))
def test_each_name_of_a_variable_works(enabled: str, mount: str, level: str, policy: str) -> None:
    """kvroute's, the proposal's and Dynamo 1.6's."""
    words = {"DYN_KV_TRANSFER_ENFORCEMENT": "preferred"}
    environment = {enabled: "True", mount: "/labels", level: "rack", policy: words.get(policy, "fallback")}
    assert TopologyWorkerSpec.read(environment) == TopologyWorkerSpec(True, Path("/labels"), "rack", "fallback")


def test_defaults() -> None:
    """Off without the variable; the policy is fail."""
    assert TopologyWorkerSpec.read({LEVEL[0]: "rack", POLICY[0]: "?"}) == TopologyWorkerSpec()
    assert not TopologyWorkerSpec.read({"DYN_TOPOLOGY_ENABLED": "false"}).enabled
    assert TopologyWorkerSpec.read(ON) == TopologyWorkerSpec(True, DEFAULT_FOLDERS[0])
    both = {"DYN_ROUTER_KV_TRANSFER_MISMATCH_POLICY": "fail", "DYN_KV_TRANSFER_ENFORCEMENT": "required"}
    assert TopologyWorkerSpec.read(ON | both).policy == "fail"


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"DYN_TOPOLOGY_ENABLED": "yes!"}, "'yes!' is neither true nor false"),
        (ON | {"DYN_TOPOLOGY_ENABLED": "false"}, "contradict each other"),
        (ON | {LEVEL[1]: "rack", LEVEL[2]: "zone"}, f"{LEVEL[1]}=rack and {LEVEL[2]}=zone"),
        (ON | {POLICY[1]: "fail", POLICY[2]: "preferred"}, "contradict each other"),
        (ON | {POLICY[0]: "faill"}, "unknown policy 'faill'; write fail or fallback"),
        (ON | {LEVEL[0]: "../rack"}, "'../rack' is not a level"),
        (ON | {WAIT_S[0]: "soon"}, "'soon' is not a number of seconds"),
        (ON | {WAIT_S[0]: "nan"}, "'nan' is not a number of seconds"),
        (ON | {WAIT_S[0]: "-1"}, "'-1' is not a number of seconds"),
    ],
)
def test_wrong_variables(environment: dict[str, str], part: str) -> None:
    """One sentence with the variable."""
    with pytest.raises(InputError, match="KVROUTE_") as raised:
        TopologyWorkerSpec.read(environment)
    assert part in str(raised.value)


class Clock:
    """Time that passes only in `pause`, which may write a file."""

    def __init__(self, file: Path, at_s: float) -> None:
        self.now_s, self._file, self._at_s = 0.0, file, at_s

    def read(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        if self.now_s >= self._at_s:
            self._file.write_text("r1")


@given(at_s=st.integers(1, 60), limit_s=st.integers(0, 60))
def test_the_wait_ends_when_the_label_is_there(
    at_s: int, limit_s: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Or at the limit, and not before."""
    folder = tmp_path_factory.mktemp("topology")
    (folder / "rack").write_text("")
    clock = Clock(folder / "rack", at_s)
    settings = TopologyWorkerSpec(True, folder, "rack", wait_s=float(limit_s))
    if at_s <= limit_s:
        assert wait_for_labels(settings, clock.read, clock.pause) == {"rack": "r1"}
        assert clock.now_s == at_s
    else:
        with pytest.raises(MissingTopology):
            wait_for_labels(settings, clock.read, clock.pause)
        assert clock.now_s == limit_s


def test_what_a_missing_label_says(tmp_path: Path) -> None:
    """Whether its file is empty or missing, and what else is there."""
    (tmp_path / "zone").write_text("z1")
    (tmp_path / "rack").write_text("\n")
    for level, state in (("rack", "is empty"), ("block", "does not exist")):
        settings = TopologyWorkerSpec(True, tmp_path, level, wait_s=0.0)
        with pytest.raises(MissingTopology) as raised:
            wait_for_labels(settings)
        assert str(raised.value) == (
            f"{tmp_path / level} {state} after 0 s, so this worker's {level} is not known (the volume has zone); "
            f"label the pod's node, or unset {LEVEL[0]}"
        )


def test_nothing_is_awaited_without_a_level(tmp_path: Path) -> None:
    """And nothing is read unless topology is enabled."""
    (tmp_path / "zone").write_text("z1")
    assert wait_for_labels(TopologyWorkerSpec(True, tmp_path)) == {"zone": "z1"}
    assert wait_for_labels(TopologyWorkerSpec(False, tmp_path, "rack")) == {}


def test_the_engine_gets_the_labels() -> None:
    """As JSON, in a fixed order; without labels the variable does not appear."""
    assert engine_environment({"A": "1"}, {"zone": "z", "rack": "r"}) == {
        "A": "1",
        "KVROUTE_TOPOLOGY": '{"rack":"r","zone":"z"}',
    }
    assert engine_environment({"A": "1"}, {}) == {"A": "1"}
