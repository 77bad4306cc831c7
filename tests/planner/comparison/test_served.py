"""What a simulation takes from a cluster file is what a gateway that serves the file would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from tests.examples import EXAMPLES
from tests.serve.every_setting import every_setting, leaves

from kvroute.control import ControlSpec
from kvroute.planner.comparison.served import GatewayAdmission, GrantedService, ServedFile, served_file
from kvroute.serve.config.modelled import effect_of, not_modelled, simulated_spec
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.proxy.admission.admission import AdmissionLimits
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import load, parse

SMALL = (EXAMPLES / "small.yaml").read_text()
SECTIONS: dict[str, Any] = {
    "nothing": {},
    "policy and parameters": {"policy": "cla", "parameters": {"cache_weight": 2, "load_weight": 0.5}},
    "parameters of the default": {"parameters": {"aggregated": 0, "joint_width": 2}},
    "shadow": {"shadow": "netkv"},
    "prefill": {"prefill": "round-robin"},
    "constraint": {"constraint": "rack:preferred:0.5"},
    "reserve": {"reserve": "2 GB"},
    "adapters": {"adapters": {"sql": {"load": "250 ms"}}},
    "session affinity": {"session_affinity": {"bonus": "2 s"}},
    "oracle": {"oracle": {"self_measured": False, "separates_own_traffic": False, "stale_after": "1 min"}},
    "prediction": {"oracle": {"source": "push", "prediction": "trend"}},
    "prefix": {"prefix": "approximate"},
    "prompt": {"prompt": {"block_tokens": 64}},
    "classes": {"classes": {"default": {"slo": {"ttft": "2 s"}}}},
    "fair queue": {"fair_queue": {"work": "2 s"}},
    "layerwise": {"layerwise": True},
    "health": {"health": {"slow_start": "3 s"}},
    "autoscaling": {"autoscaling": {"ttft": "3 s", "hook": {"url": "http://h:1/scale"}}},
}
OF_SIMULATED_ENGINES: dict[str, Any] = {"cache_block_tokens": 0, "overcommit": False}
"""They report the blocks that they store and evict, and have no queue for memory."""


@pytest.mark.parametrize("name", SECTIONS)
def test_the_core_of_a_simulation_is_configured_as_that_of_the_gateway(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL + yaml.safe_dump({"gateway": SECTIONS[name]}))
    served = Deployment.of(path.read_text(), str(path), endpoints=endpoints()).control_spec
    assert served_file(str(path)).spec == msgspec.structs.replace(served, **OF_SIMULATED_ENGINES)
    if name not in ("nothing", "prefix", "prompt"):
        assert served_file(str(path)).spec != ServedFile(load(path), GatewaySettings()).spec


def endpoints() -> dict[str, Any]:
    from kvroute.types import Endpoint

    return {instance.name: Endpoint(url="http://127.0.0.1:1") for instance in load(EXAMPLES / "small.yaml").instances}


def test_a_file_without_the_section_is_simulated_as_it_is_served() -> None:
    """The defaults are those of the gateway, not others of the simulator."""
    served = Deployment.of(SMALL, "f", endpoints=endpoints()).control_spec
    spec = served_file(str(EXAMPLES / "small.yaml")).spec
    assert spec == msgspec.structs.replace(served, **OF_SIMULATED_ENGINES)


def test_every_setting_has_an_effect_or_is_named() -> None:
    """No setting can be added without a decision; the ones that are not modelled are named, each once."""
    paths = [path for path, _ in leaves(inspect.type_info(GatewaySettings))]
    effects = {path: effect_of(path)[1] for path in paths}
    assert set(effects.values()) == {"modelled", "not modelled", "none"}
    named = not_modelled(every_setting())
    assert named == sorted(set(named))
    assert {"gateway.retries", "gateway.timeouts", "gateway.breaker", "gateway.autoscaling"} <= set(named)
    assert not any(name.startswith(("gateway.policy", "gateway.listen", "gateway.log")) for name in named)
    assert not_modelled({}) == []


@pytest.mark.parametrize(
    ("oracle", "telemetry", "refresh_s"),
    [
        ({}, "none", 1.0),
        ({"source": "push"}, "tier", 1.0),
        ({"source": "prometheus", "prometheus": {"url": "http://p:1", "per_tier": {"rack": "x"}}}, "tier", 5.0),
        (
            {
                "source": "prometheus",
                "prometheus": {"url": "http://p:1", "per_link": {"query": "x"}, "interval": "2 s"},
            },
            "link",
            2.0,
        ),
    ],
)
def test_the_telemetry_is_that_of_the_file(
    tmp_path: Path, oracle: dict[str, Any], telemetry: str, refresh_s: float
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL + yaml.safe_dump({"gateway": {"oracle": oracle}}))
    settings = served_file(str(path)).settings
    assert (settings.telemetry, settings.oracle_refresh_s) == (telemetry, refresh_s)


def burst(count: int, every_s: float = 0.0) -> Trace:
    return Trace("burst", tuple(TracedRequest(place * every_s, 2_000, 4, (), 16) for place in range(count)))


def ran(service: GrantedService, trace: Trace, spec: ControlSpec | None = None) -> Run:
    cluster = load(EXAMPLES / "small.yaml")
    spec = spec or ControlSpec(decode="netkv", overcommit=True)
    return simulate(cluster, trace, spec, SimSpec(), tenancy=service.tenancy(len(trace.requests)))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
def test_of_a_burst_as_many_are_served_as_fit_in_flight_and_in_the_queue(
    count: int, in_flight: int, queue: int
) -> None:
    run = ran(GrantedService(AdmissionLimits(in_flight, queue, 1e6)), burst(count))
    served = min(count, in_flight + queue)
    assert (run.summary.requests.finished, run.summary.requests.rejected) == (served, count - served)
    assert run.summary.reject_reason == (None if served == count else "the gateway is full")


def test_a_request_that_waits_too_long_is_refused() -> None:
    """One at a time takes about 0.26 s: of ten waiting ones only those that start within a second are served."""
    run = ran(GrantedService(AdmissionLimits(1, 100, 1.0)), burst(11))
    assert 3 <= run.summary.requests.finished <= 6
    assert run.summary.requests.finished + run.summary.requests.rejected == 11
    assert run.summary.reject_reason == "the gateway is full: the request waited 1 s in the queue"


def test_the_wait_for_admission_counts_in_the_limit_on_the_first_token() -> None:
    """Requests that have waited longer than their limit are refused when their turn comes, a thousand in one go."""
    spec = ControlSpec(decode="netkv", overcommit=True, predicts=True)
    run = ran(GrantedService(AdmissionLimits(1, 2_000, 1e6), ttft_max_s=0.6), burst(1_500), spec)
    assert 1 <= run.summary.requests.finished <= 3
    assert run.summary.requests.finished + run.summary.requests.rejected == 1_500
    assert "the first token is expected" in (run.summary.reject_reason or "")


def test_a_request_waits_for_its_turn_no_longer_than_the_limit() -> None:
    service = GrantedService(AdmissionLimits(2048, 512, 0.5), work_s=0.2)
    run = ran(service, burst(40), ControlSpec(decode="netkv", overcommit=True, predicts=True))
    assert 0 < run.summary.requests.rejected < 40
    assert "has waited too long for its turn" in (run.summary.reject_reason or "")


def test_the_admission_is_the_gateways() -> None:
    admission = GatewayAdmission(AdmissionLimits(1, 1, 5.0))
    assert [admission.arrive(number, 1.0) for number in range(3)] == [None, 6.0, "the gateway is full"]
    assert admission.leave(0, 2.0) == [1]
    assert admission.expire(9.0)[0] == []


@pytest.mark.parametrize("policy", ["round-robin", "foresight", "foresight-joint"])
def test_a_prompt_that_no_instance_can_hold_is_rejected(policy: str) -> None:
    """KV memory for 30,512 tokens holds 30,000 of a prompt with its output, and not 40,000."""
    text = (EXAMPLES / "small.yaml").read_text().replace("180 GB", "10 GB")
    spec = msgspec.structs.replace(simulated_spec(GatewaySettings()), decode=policy)
    rows = tuple(TracedRequest(10.0 * index, tokens, 10, (), 16) for index, tokens in enumerate((30_000, 40_000)))
    requests = simulate(parse(text), Trace("two", rows), spec, SimSpec()).summary.requests
    assert (requests.finished, requests.rejected) == (1, 1)
