"""The three closed formulas of NetKV for the network: pure functions of numbers or arrays."""

from __future__ import annotations

import numpy as np

from kvroute.types import FloatArray, InputError, IntArray

_ONE: FloatArray = np.array(1.0)
"""An array, because numpy takes a microsecond to convert a Python number: most of the time for five tiers."""


def effective_bytes_per_s(bytes_per_s: FloatArray, congestion: FloatArray, in_flight: IntArray) -> FloatArray:
    """Bandwidth that one more transfer can expect (NetKV eq. 4): B * (1 - c) / (1 + n_inflight).

    Args:
        bytes_per_s: static bandwidth, any shape.
        congestion: share used by others, in [0, 1).
        in_flight: own transfers in progress besides the new one.
    """
    effective: FloatArray = bytes_per_s * (_ONE - congestion) / (_ONE + in_flight)
    return effective


def staleness_bound(
    fast_bytes_per_s: float, fast_congestion: float, slow_bytes_per_s: float, slow_congestion: float
) -> float:
    """Largest error of both congestion values that is certain to keep the order of two tiers (NetKV eq. 9).

    Errors strictly below the bound keep the faster tier ahead. A bound <= 0 means that no error is safe.

    Raises:
        InputError: the proposition does not hold: `fast_bytes_per_s` is smaller, or a bandwidth is not positive.
    """
    if not fast_bytes_per_s >= slow_bytes_per_s > 0:
        raise InputError(
            f"the faster tier has {fast_bytes_per_s:g} bytes/s, the slower one {slow_bytes_per_s:g}",
            hint="give the faster tier first, both above zero",
        )
    ahead = fast_bytes_per_s * (1.0 - fast_congestion) - slow_bytes_per_s * (1.0 - slow_congestion)
    return ahead / (fast_bytes_per_s + slow_bytes_per_s)


def network_wins(
    near_hit: float,
    far_hit: float,
    bandwidth_ratio: float,
    near_congestion: float = 0.0,
    far_congestion: float = 0.0,
    *,
    near_bytes_per_s: float = 1.0,
    kv_bytes: float = 1.0,
    queue_gap_s: float = 0.0,
) -> bool:
    """Whether the near instance beats a far one with the warmer cache (NetKV Proposition 1, eq. 8).

    Args:
        near_hit, far_hit: cached share of the prompt on each instance (rho), in [0, 1].
        bandwidth_ratio: near over far static bandwidth (k), >= 1.
        near_congestion, far_congestion: c of each tier, in [0, 1).
        near_bytes_per_s: static bandwidth of the near tier; used only with a queue gap.
        kv_bytes: KV cache of the whole prompt (s_r), > 0; used only with a queue gap.
        queue_gap_s: queueing delay of the far instance minus that of the near one.
    """
    if kv_bytes <= 0 or far_congestion >= 1:
        raise InputError(
            f"kv_bytes is {kv_bytes:g} and far_congestion {far_congestion:g}",
            hint="kv_bytes must be above zero and far_congestion below one",
        )
    residual = 1.0 - near_congestion
    far_side = bandwidth_ratio * residual / (1.0 - far_congestion) * (1.0 - far_hit)
    return 1.0 - near_hit < far_side + near_bytes_per_s * residual / kv_bytes * queue_gap_s
