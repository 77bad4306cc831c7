"""Counts and logs a lack of file descriptors, and warns when their limit is lower than the settings need."""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING, Literal

from kvroute.http.forwarding.stream_forwarder import STREAMS_MAX
from kvroute.http.open_files import exhausted
from kvroute.serve.observe.admin.connections import CONNECTIONS_MOST as ADMIN_CONNECTIONS_MOST
from kvroute.serve.observe.logs import log_event

if TYPE_CHECKING:
    from kvroute.serve.observe.metrics.metrics import Metrics

LOG_EVERY_S = 10.0
"""Minimum interval between two log lines; each has a count."""
_ENGINE_EACH = 16
_REST = 256
"""Descriptors for each engine apart from requests (health checks, metrics, KV events), and for everything else."""

Use = Literal["engine", "client"]


def wanted(connections: int, instances: int) -> int:
    """Return the descriptors that the settings need: one for each client connection, two for its legs to engines, one
    for each connection of the admin port, and the rest."""
    return 3 * connections + _ENGINE_EACH * instances + ADMIN_CONNECTIONS_MOST + _REST


def streams_to_forward(connections: int, instances: int) -> int:
    """Return the number of streams whose sockets may be duplicated: as many as the settings leave descriptors for, and
    in any case a sixteenth of the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return STREAMS_MAX
    return min(STREAMS_MAX, max(soft // 16, soft - wanted(connections, instances)))


def warn_if_too_low(connections: int, instances: int) -> None:
    """Log a warning if the limit of open files is below what the settings need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted(connections, instances)
    if soft != resource.RLIM_INFINITY and soft < need:
        most = (soft - wanted(0, instances)) // 3
        lower = f" or set limits.connections to {most}" if most > 0 else ""
        reason = (
            f"the hard limit of open files is {soft}, but limits.connections: {connections} and {instances} engines "
            f"may need {need}; raise it (ulimit -Hn, LimitNOFILE= of systemd){lower}"
        )
        log_event("warning", "open_files_limit", reason=reason)


class OpenFiles:
    """Counts and logs that the gateway has no file descriptor left: a fault of its limits, not of an engine."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._count = 0
        """Occurrences since the last line."""
        self._logged_at = float("-inf")

    def check(self, now: float) -> None:
        """Check whether a client could connect now: if no descriptor is left, the event loop closes the connection
        without an error."""
        number = exhausted()
        if number is not None:
            self.report("client", now, number)

    def report(self, use: Use, now: float, number: int = errno.EMFILE) -> None:
        """Count that a connection from a client or to an engine could not be opened."""
        self._metrics.out_of_files(use)
        self._count += 1
        if now - self._logged_at < LOG_EVERY_S:
            return
        if number == errno.ENFILE:
            limit = "the system's limit of open files (sysctl fs.file-max)"
        else:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = f"the limit of {soft} open files of this process (ulimit -n, LimitNOFILE= of systemd)"
        reason = (
            f"no file descriptor is left: {limit} is reached; connections to clients and engines fail until you "
            "raise it or lower limits.connections"
        )
        log_event("error", "out_of_files", reason=reason, count=self._count)
        self._count, self._logged_at = 0, now
