"""Sessions of agents in PrfaaS's experiments: the load is a number of users, with the same sessions in every
scenario."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvroute.planner.comparison.cells import Cell
from kvroute.planner.throughput.lengths import incremental
from kvroute.planner.throughput.search import deployment
from kvroute.sim.workload import Agents, Trace
from kvroute.types import InputError
from kvroute_studies.prfaas.agents import (
    END_S,
    FROM_S,
    UserGroup,
    agent_lengths,
    answer_tokens,
    cycle_s,
    trace_of_groups,
    users_for,
)
from kvroute_studies.prfaas.burst import SCENARIOS, offload_of, requests_of, static
from kvroute_studies.prfaas.burst import TO_S as BURST_TO_S
from kvroute_studies.prfaas.case_study import ITERATION_S, MOST, assumptions
from kvroute_studies.prfaas.queue import AGENTS, PrfaasStudy, config_of, planned, source
from kvroute_studies.prfaas.run import BURST, CASE_STUDY, of_study, run_cell

BLOCK = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 sessions of eight turns, each 20 blocks longer than the previous one; every third ends in a prompt beyond the
    published profile; one more has only such a prompt."""
    lines = []
    for number in range(30):
        sizes = [100 + 20 * turn + number for turn in range(8)]
        if number % 3 == 0:
            sizes[6] = MOST // BLOCK + 1
        lines.append([
            {"t": 20.0 * k, "in": size * BLOCK, "out": 40, "api": 5.0, "think": 15.0 * (k > 0), "h": [1, size]}
            for k, size in enumerate(sizes)
        ])  # fmt: skip
    lines.append([{"t": 0.0, "in": 200_000, "out": 5, "api": 1.0, "think": 0.0, "h": [1, 3_125]}])
    file = tmp_path_factory.mktemp("agents") / "sessions.jsonl"
    file.write_text("".join(json.dumps({"id": str(k), "bs": BLOCK, "req": r}) + "\n" for k, r in enumerate(lines)))
    return file


@pytest.fixture(scope="module")
def study(path: Path) -> PrfaasStudy:
    """The study of these sessions."""
    return PrfaasStudy(assumptions(["rule=auto"]), str(path))


def sessions(study: PrfaasStudy) -> Agents:
    """Return the sessions as the experiments use them."""
    recorded = source(study.trace)
    assert isinstance(recorded, Agents)
    return recorded


def at_places(trace: Trace) -> dict[int, float]:
    """Return the time of each session's first turn, by its first block."""
    firsts: dict[int, float] = {}
    for request in trace.requests:
        firsts.setdefault(request.blocks[0], request.at_s)
    return firsts


def test_sessions_end_at_the_longest_profiled_prompt(study: PrfaasStudy) -> None:
    """No prompt of Table 5 has more than 131,072 tokens: 20 sessions are whole, 10 have six turns, one is left out."""
    recorded = sessions(study)
    assert sorted(len(session.turns) for session in recorded.sessions) == [6] * 10 + [8] * 20
    assert max(turn.input_tokens for session in recorded.sessions for turn in session.turns) <= MOST
    with pytest.raises(InputError, match="the first prompt of every session has more than 63 tokens"):
        recorded.within(63)


def test_the_plan_uses_the_uncached_tokens_of_one_cache(study: PrfaasStudy) -> None:
    """The uncached tokens equal those of a cache without limit over all requests, for any order of sessions."""
    recorded = sessions(study)
    left, _ = incremental(recorded.open_loop(seed=0), None)
    ours = sorted(max(prompt_tokens, 1) for session in recorded.sessions for prompt_tokens in session.uncached_tokens())
    assert ours == sorted(left.tolist())
    assert agent_lengths(recorded).mix.mean_tokens == pytest.approx(left.mean())
    assert answer_tokens(recorded) == 40


def test_a_load_is_a_number_of_users(study: PrfaasStudy) -> None:
    """Little's law with a pause of 15 s before all turns but the first."""
    recorded = sessions(study)
    plan = deployment(planned(study, "prfaas", 100.0))
    turns = 20 * 8 + 10 * 6
    think_s = 15.0 * (turns - 30) / turns
    assert cycle_s(recorded, plan) == pytest.approx(plan.ttft_s.mean + 40 * ITERATION_S + think_s)
    assert users_for(recorded, plan, 0.5) == round(0.5 * plan.lambda_max_per_s * cycle_s(recorded, plan))
    assert users_for(recorded, plan, 1e-9) == 1


def test_the_case_study_with_agents_below_saturation(study: PrfaasStudy) -> None:
    """Far below saturation users get responses at the rate of their requests, and cached tokens are reused: 20 blocks
    are new."""
    cell = Cell(
        experiment=CASE_STUDY.name, reading="paper", profile=AGENTS, settings={"load": 0.02}, policy="prfaas", seed=0
    )
    record = run_cell(study, cell)
    offered_per_s = 0.02 * record.figures["lambda_max_per_s"]
    assert record.figures["keeps_up_per_s"] == pytest.approx(offered_per_s, rel=0.15)
    assert record.summary.prefill_cache_hit == pytest.approx(0.85, abs=0.08)
    assert record.summary.requests.rejected == 0
    assert record.summary.measured == pytest.approx(offered_per_s * (END_S - FROM_S), rel=0.15)
    assert config_of(study)["trace"].startswith("sessions.jsonl, XXH64 ")


def test_additional_users_do_not_change_the_sessions_of_existing_users(study: PrfaasStudy) -> None:
    """When the load doubles, the usual users play the same sessions from the same times as in the calm scenario; a
    repeated session does not share blocks with its first run."""
    recorded = sessions(study)
    usual, more = UserGroup(5, 0.0, 50.0, 400.0), UserGroup(5, 100.0, 0.0, 200.0)
    calm = trace_of_groups(recorded, (usual,), 3, places=10)
    busy = trace_of_groups(recorded, (usual, more), 3, places=10)
    assert at_places(calm).items() <= at_places(busy).items()
    added = set(at_places(busy)) - set(at_places(calm))
    assert added
    assert all(100.0 <= request.at_s <= 200.0 for request in busy.requests if request.blocks[0] in added)
    assert trace_of_groups(recorded, (usual,), 4, places=10) != calm
    whole = trace_of_groups(recorded, (UserGroup(9, 0.0, 0.0, 1_000.0),), 0, places=9)
    assert len({request.blocks[0] for request in whole.requests}) > len(recorded.sessions)
    assert all(request.at_s <= 1_000.0 for request in whole.requests)


def test_bursts_with_agents(study: PrfaasStudy) -> None:
    """The planner's threshold is one of the static ones; no user starts after the burst because of it."""
    one = of_study(BURST, study)
    best = deployment(planned(study, "prfaas", study.assumed.burst_wan_gbps)).threshold_tokens
    assert best is not None
    assert one.versus[1] == static(best)
    assert one.versus[1] in one.policies
    assert "longer-prompts" not in one.profiles
    assert of_study(CASE_STUDY, study).profiles == (AGENTS,)
    calm, doubled = (requests_of(study, SCENARIOS[name], 0.0, 0) for name in ("calm", "load-doubles"))
    assert doubled.loop is not None
    assert sorted(set(doubled.loop.until_s))[0] == BURST_TO_S
    assert len(doubled.requests) > 1.2 * len(calm.requests)
    assert offload_of(static(5_000), "auto").rule == "auto"
