"""What one TCP connection does with a long way: how much it carries at most, and how long it takes to get going."""

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


FIRST_WINDOW_BYTES = 10 * 1448.0
"""What a connection may send before the first acknowledgement (RFC 6928): ten segments."""


def slow_start_s(
    nbytes: float, rtt_s: float, bytes_per_s: float, first_window_bytes: float = FIRST_WINDOW_BYTES
) -> float:
    """Seconds in which a fresh connection waits for acknowledgements instead of sending, until its window fills the way
    or nothing is left to send.

    The window doubles with every round trip (RFC 5681, 3.1, with every segment acknowledged), and what a window holds
    leaves at the link's rate: a round trip with window w < rate * RTT idles for RTT - w / rate (Cardwell, Savage and
    Anderson, INFOCOM 2000, eq. 13 to 15, without loss or delayed acknowledgements).

    Args:
        nbytes: of the transfer.
        rtt_s: round trip in seconds, queues left out; 0 waits for nothing.
        bytes_per_s: of the narrowest link of the way; 0 waits for nothing either: nothing moves.
        first_window_bytes: above 0.
    """
    waits_s, window, left = 0.0, first_window_bytes, nbytes
    while left > window and window < bytes_per_s * rtt_s:
        waits_s += rtt_s - window / bytes_per_s
        left -= window
        window *= 2.0
    return waits_s
