"""Prefill in steps that prompts share equals a model that counts token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec
from kvroute.sim.agenda import Agenda
from kvroute.sim.groups.chunked_prefill import ChunkedPrefill
from kvroute.sim.groups.pipelines import PipelinePrompt
from kvroute.sim.metrics import FINISHED
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest, generate
from kvroute.timing import PrefillTime, prefill_time
from kvroute.topology import Cluster, load
from kvroute.topology.reading.assembly import parse
from kvroute.types import InputError, LinearPrefill, PiecewisePrefill, PrefillSpec, QuadraticPrefill

EXAMPLE = Path(__file__).parents[2] / "examples" / "fat-tree-64gpu.yaml"
BASE_S, STEP_S = 0.012, 0.008


@dataclass(frozen=True)
class Submitted:
    """A prompt, and its time of arrival."""

    at: float
    tokens: int
    cached_tokens: int = 0


def by_token(prompts: list[Submitted], time: PrefillTime, step_tokens: int, prompts_max: int) -> list[float]:
    """Compute the ends token by token: every step gives its tokens to the first prompts that have arrived."""
    ready = sorted((prompt.at + BASE_S - STEP_S, number) for number, prompt in enumerate(prompts))
    position = [prompt.cached_tokens for prompt in prompts]
    last = [max(prompt.tokens, prompt.cached_tokens) for prompt in prompts]
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(prompts):
        queue = [number for at, number in ready if at <= now and number not in ends]
        if not queue:
            now = min(at for at, number in ready if number not in ends)
            continue
        end, left, used = now + STEP_S, step_tokens, 0
        chosen: list[int] = []
        for number in queue:
            if not left or len(chosen) == prompts_max:
                break
            chosen.append(number)
            own = 0
            while left and position[number] < last[number]:
                # The step's tokens cost as much as those of one prompt, and more for the tokens computed before.
                end += time.seconds(used + 1, used) - time.seconds(own + 1, own)
                end += time.seconds(position[number] + 1, position[number]) - time.seconds(0)
                position[number] += 1
                own, used, left = own + 1, used + 1, left - 1
        now = end
        ends |= {number: now for number in chosen if position[number] == last[number]}
    return [ends[number] for number in range(len(prompts))]


def run(prompts: list[Submitted], time: PrefillTime, step_tokens: int, prompts_max: int) -> list[float]:
    """Return the ends by `ChunkedPrefill`."""
    agenda = Agenda()
    engine = ChunkedPrefill(agenda, time, step_tokens, STEP_S, prompts_max)
    ends: dict[int, float] = {}
    begun: list[int] = []

    def submit(number: int, _: int) -> None:
        prompt = prompts[number]
        tokens = max(prompt.tokens - prompt.cached_tokens, 0)
        ended: Callable[[int], None] = lambda own: ends.setdefault(own, agenda.now)  # type: ignore[assignment]  # noqa: E731
        start = lambda own, _: begun.append(own)  # noqa: E731
        engine.submit(PipelinePrompt(number, tokens, 0.0, start, ended, cached_tokens=prompt.cached_tokens))

    for number, prompt in enumerate(prompts):
        agenda.at(prompt.at, submit, number)
    while agenda.due:
        agenda.now = agenda.due[0][0]
        agenda.act()
    assert sorted(begun) == list(range(len(prompts))), "each prompt begins once"
    return [ends[number] for number in range(len(prompts))]


SPECS: list[PrefillSpec] = [
    LinearPrefill(per_token_s=1e-4, base_s=BASE_S),
    QuadraticPrefill(base_s=BASE_S, per_token_s=1e-4, per_token2_s=1e-8),
    PiecewisePrefill(tokens=(0, 100, 400), seconds=(BASE_S, 0.03, 0.2)),
]
prompts = st.lists(
    st.builds(
        Submitted,
        at=st.integers(0, 3_000).map(lambda step: step * 0.000_100_173_7),  # never at the end of a step
        tokens=st.integers(1, 400),
        cached_tokens=st.sampled_from([0, 0, 16, 400]),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda prompt: prompt.at,  # the first of several prompts that arrive together begins alone
)


@settings(deadline=None)
@given(prompts, st.sampled_from(SPECS), st.sampled_from([1, 7, 64, 256, 10_000]), st.sampled_from([1, 2, 64]))
def test_steps_equal_those_of_the_model_by_token(
    submitted: list[Submitted], spec: PrefillSpec, step_tokens: int, prompts_max: int
) -> None:
    """Every prompt ends at the same time."""
    time = prefill_time(spec)
    expected = by_token(submitted, time, step_tokens, prompts_max)
    assert run(submitted, time, step_tokens, prompts_max) == pytest.approx(expected, rel=1e-9, abs=1e-7)


@given(st.sampled_from(SPECS), st.integers(1, 5_000), st.integers(1, 2_000))
def test_a_prompt_alone_takes_the_time_of_the_prefill_model(spec: PrefillSpec, tokens: int, step_tokens: int) -> None:
    """Every step after the first adds its fixed time."""
    time, steps = prefill_time(spec), -(-tokens // step_tokens)
    (end,) = run([Submitted(0.0, tokens)], time, step_tokens, 64)
    assert end == pytest.approx(time.seconds(tokens) + (steps - 1) * STEP_S)


def test_short_prompts_share_a_step_and_a_long_one_is_divided() -> None:
    """Steps of 400 tokens at 0.1 ms each and 8 ms; 4 ms pass before a prompt can be scheduled. The first step has the
    first prompt alone, the second 300 tokens of the long prompt and both short ones; the third its last 100."""
    time = prefill_time(LinearPrefill(per_token_s=1e-4, base_s=BASE_S))
    ends = run([Submitted(0.0, 100), Submitted(1e-4, 50), Submitted(2e-4, 50), Submitted(3e-4, 400)], time, 400, 64)
    first, second, third = 0.004 + 0.018, 0.022 + 0.048, 0.070 + 0.018
    assert ends == pytest.approx([first, second, second, third])


def cluster_with(defaults: dict[str, object] | None = None, **scheduler: object) -> Cluster:
    """Return the example's cluster, whose engines have this scheduler."""
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["timing"]["default"]["scheduler"] = scheduler
    document["defaults"] |= defaults or {}
    return parse(yaml.safe_dump(document), "test")


def test_a_scheduler_without_fields_changes_no_result() -> None:
    """All fields are optional, and their defaults are the engine without a scheduler."""
    trace = generate(60, seed=3)
    runs = [
        simulate(cluster, trace, ControlSpec(decode="netkv"), SimSpec()) for cluster in (load(EXAMPLE), cluster_with())
    ]
    assert runs[0].outcomes.first_token_s.tolist() == runs[1].outcomes.first_token_s.tolist()


def test_a_simulation_uses_the_scheduler() -> None:
    """Twelve prompts at once on four engines: in steps of 8,192 tokens all prompts of an engine share one. A decode
    request takes 50 ms more, and each transfer starts between steps."""
    trace = Trace("burst", tuple(TracedRequest(0.001 * n, 1_000, 20, (), 16) for n in range(12)))
    spec = ControlSpec(decode="netkv")
    plain = simulate(cluster_with(), trace, spec, SimSpec()).outcomes
    chunked = simulate(cluster_with(step_tokens=8192, step="20 ms"), trace, spec, SimSpec()).outcomes
    later = simulate(cluster_with(decode_request="50 ms"), trace, spec, SimSpec()).outcomes
    assert chunked.prefill_finished_s.max() < plain.prefill_finished_s.max()
    assert len({round(end, 9) for end in chunked.prefill_finished_s}) < len({*plain.prefill_finished_s.round(9)})
    assert (later.first_token_s - plain.first_token_s).min() == pytest.approx(0.05, abs=0.02)
    for outcomes in (chunked, later):
        assert (outcomes.state == plain.state).all()


def test_transfers_between_steps_wait_for_busy_engines_only() -> None:
    """The first request of each of the 12 decode instances meets an idle engine. For others a transfer waits up to two
    iterations of 12.6 to 13.8 ms, and the mean of these waits is one and a half."""
    trace = Trace("long", tuple(TracedRequest(0.3 * n, 100, 900, (), 16) for n in range(150)))
    spec = ControlSpec(decode="round-robin")
    at_once = simulate(cluster_with(), trace, spec, SimSpec()).outcomes
    between = simulate(cluster_with(transfers="between-steps"), trace, spec, SimSpec()).outcomes
    waits_s = between.landed_s - at_once.landed_s
    assert waits_s[:12] == pytest.approx(0.0, abs=1e-9)
    assert waits_s[12:].min() > 0.0126
    assert waits_s[12:].max() < 2 * 0.0138
    assert waits_s[12:].mean() == pytest.approx(1.5 * 0.0132, rel=0.1)


@pytest.mark.parametrize("transfer", ["serial", "layerwise"])
def test_every_request_ends_with_a_scheduler(transfer: str) -> None:
    """With prefixes, several policies of transfers, and everything that a scheduler has."""
    cluster = cluster_with(step_tokens=2048, step="10 ms", decode_request="5 ms", transfers="between-steps")
    options = msgspec.convert({"transfer": transfer}, SimSpec)
    run_ = simulate(cluster, generate(120, seed=5), ControlSpec(decode="foresight", prefill="cache-aware"), options)
    assert (run_.outcomes.state == FINISHED).all()
    assert (run_.outcomes.first_token_s > run_.outcomes.landed_s).all()


def test_bad_schedulers_are_refused() -> None:
    """One sentence each, with the field."""
    with pytest.raises(InputError, match=r"step_tokens"):
        cluster_with(step="1 ms")
    with pytest.raises(InputError, match=r"longer than the base of a prefill"):
        cluster_with(step_tokens=512, step="3 s")
    with pytest.raises(InputError, match=r"transfers"):
        cluster_with(transfers="sometimes")
    with pytest.raises(InputError, match=r"several pipeline stages"):
        simulate(cluster_with({"tp": 2, "pp": 2}, step_tokens=512), generate(3, seed=1), ControlSpec(), SimSpec())
