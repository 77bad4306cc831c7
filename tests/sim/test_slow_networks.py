"""The default policy in clusters whose network is too slow for the transfers of all prompts."""

from __future__ import annotations

from kvroute.control import ControlSpec
from kvroute.policies import NO_BOUND
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import PROFILES, apply_profile, generate, rescale, take
from kvroute.topology import parse
from kvroute.topology.drafts.draft import draft


def mean_ttft_s(**parameters: float) -> float:
    """Simulate chatbot requests on four prefill and eight decode engines with NICs of 2 Gbps."""
    text = draft(
        "slow",
        [f"http://p{index}:8000" for index in range(4)],
        [f"http://d{index}:8000" for index in range(8)],
        model="llama-3-70b",
        nic_bytes_per_s=2e9 / 8,
    )
    trace = rescale(take(apply_profile(generate(1_500, rate_per_s=3.4, seed=3), PROFILES["chatbot"]), 250), 2.46)
    spec = ControlSpec(parameters=parameters)
    mean_s = simulate(parse(text), trace, spec, SimSpec(), seed=3).summary.ttft_s.mean
    assert mean_s is not None
    return mean_s


def test_first_tokens_do_not_wait_for_a_network_that_is_too_slow() -> None:
    """Requests are served alone before transfers queue: the mean TTFT is at most three times that without any limit on
    delays, and a tenth of that of pairs."""
    default_s, unlimited_s = mean_ttft_s(), mean_ttft_s(token_delay_max=NO_BOUND)
    assert default_s <= 3 * unlimited_s
    assert default_s <= 0.1 * mean_ttft_s(aggregated=0)
