"""A target for the time per output token rules the choice between a pair and one instance alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvroute.control import ControlSpec
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute_studies.aggregated.network_cases import NETWORK_CASES, network_cluster, network_trace

TPOT_S = 0.05


def p99_tpot_s(number: int, **parameters: float) -> float:
    (case,) = [network_case for network_case in NETWORK_CASES.values() if network_case.number == number]
    spec = ControlSpec(decode="foresight-joint", parameters=parameters)
    rows = simulate(network_cluster(case), network_trace(case, 0), spec, SimSpec()).outcomes
    some = rows.output_tokens > 1
    return float(np.nanquantile(((rows.finished_s - rows.first_token_s) / (rows.output_tokens - 1.0))[some], 0.99))


@pytest.mark.parametrize("number", [97, 56, 25])
def test_it_is_kept_where_pairs_keep_it(number: int) -> None:
    """Long prompts and high load, behind fast and slow networks.
    Without the target, prompts delay tokens; with it, only those that delay none beyond it."""
    assert p99_tpot_s(number) > 2 * TPOT_S
    assert p99_tpot_s(number, aggregated=0.0) < TPOT_S
    assert p99_tpot_s(number, tpot=TPOT_S) <= TPOT_S
