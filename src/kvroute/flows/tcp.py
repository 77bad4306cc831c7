"""Model of one TCP connection on a long path: its maximum rate, and the time that slow start costs."""

from __future__ import annotations

import math

MATHIS_C = 1.22
"""sqrt(3/2): an acknowledgement for every segment, losses at random (Mathis et al., CCR 27(3), 1997, eq. 3)."""


def connection_bytes_per_s(rtt_s: float, window_bytes: float, loss: float = 0.0, mss_bytes: float = 1460.0) -> float:
    """Return the steady rate in bytes per second of one connection on an otherwise unlimited link; inf if nothing
    limits it.

    It is the lesser of window / RTT (RFC 7323, 1.1: one window in each round trip) and MSS / RTT * 1.22 / sqrt(loss)
    (Mathis et al. 1997). The second holds for Reno; CUBIC is somewhat faster with a large window and RTT.

    Args:
        rtt_s: round trip in seconds without queueing; 0: no limit.
        window_bytes: the lesser of both sides' buffers.
        loss: share of segments lost, in [0, 1).
        mss_bytes: payload of a segment.
    """
    if rtt_s <= 0.0:
        return math.inf
    by_loss = mss_bytes * MATHIS_C / math.sqrt(loss) if loss > 0.0 else math.inf
    return min(window_bytes, by_loss) / rtt_s


FIRST_WINDOW_BYTES = 10 * 1448.0
"""Bytes that a connection may send before the first acknowledgement (RFC 6928): ten segments."""


def slow_start_s(
    nbytes: float, rtt_s: float, bytes_per_s: float, first_window_bytes: float = FIRST_WINDOW_BYTES
) -> float:
    """Return the seconds that a new connection idles for acknowledgements, until its window fills the path or all is
    sent.

    The window doubles with every round trip (RFC 5681, 3.1, with every segment acknowledged), and each window is sent
    at the link's rate: a round trip with window w < rate * RTT idles for RTT - w / rate (Cardwell, Savage and Anderson,
    INFOCOM 2000, eq. 13 to 15, without loss or delayed acknowledgements).

    Args:
        nbytes: size of the transfer.
        rtt_s: round trip in seconds without queueing; 0: no wait.
        bytes_per_s: rate of the narrowest link of the path; 0: no wait either, because nothing moves.
        first_window_bytes: initial window, above 0.
    """
    waits_s, window, left = 0.0, first_window_bytes, nbytes
    while left > window and window < bytes_per_s * rtt_s:
        waits_s += rtt_s - window / bytes_per_s
        left -= window
        window *= 2.0
    return waits_s
