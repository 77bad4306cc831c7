"""What one TCP connection can carry at most over a long way, from its window, its loss and its round trip."""

from __future__ import annotations

import math

MATHIS_C = 1.22
"""sqrt(3/2): an acknowledgement for every segment, losses at random (Mathis et al., CCR 27(3), 1997, eq. 3)."""


def connection_bytes_per_s(rtt_s: float, window_bytes: float, loss: float = 0.0, mss_bytes: float = 1460.0) -> float:
    """Steady bytes per second of a lone connection on a link that is wide enough; inf where nothing bounds it.

    The lesser of window / RTT (RFC 7323, 1.1: one window in each round trip) and MSS / RTT * 1.22 / sqrt(loss) (Mathis
    et al. 1997). The second holds for Reno; CUBIC does somewhat better where window and round trip are large.

    Args:
        rtt_s: round trip in seconds, queues left out; 0 bounds nothing.
        window_bytes: the lesser of both sides' buffers.
        loss: share of segments lost, in [0, 1).
        mss_bytes: payload of a segment.
    """
    if rtt_s <= 0.0:
        return math.inf
    by_loss = mss_bytes * MATHIS_C / math.sqrt(loss) if loss > 0.0 else math.inf
    return min(window_bytes, by_loss) / rtt_s
