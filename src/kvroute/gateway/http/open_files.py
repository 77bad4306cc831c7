"""File descriptors: raises the process's limit, and detects and reports when none is left."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING, Literal

from kvroute.gateway.observe.admin_connections import CONNECTIONS_MOST as ADMIN_CONNECTIONS_MOST
from kvroute.gateway.observe.logs import note

if TYPE_CHECKING:
    from kvroute.gateway.observe.metrics import Metrics

LOG_EVERY_S = 10.0
"""Minimum interval between two log lines; each has a count."""
RAISE_MOST = 1 << 20
"""Maximum soft limit, even if the hard limit is higher: the kernel's default of `fs.nr_open`."""
_ENGINE_EACH = 16
_REST = 256
"""Descriptors for each engine apart from requests (health checks, metrics, KV events), and for everything else."""

Use = Literal["engine", "client"]


def out_of_files(error: OSError | UnicodeError) -> bool:
    """Whether an attempt to connect failed because no descriptor was left. Errors of the resolver, and errors of
    several addresses together, do not show it: then a probe decides."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return True
    return isinstance(error, OSError) and (number is None or number < 0) and exhausted() is not None


def exhausted() -> int | None:
    """Return the error number with which the process gets no descriptor now; None: a descriptor is free."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return error.errno
    return None


def wanted(connections: int, instances: int) -> int:
    """Return the descriptors that the settings need: one for each client connection, two for its legs to engines, one
    for each connection of the admin port, and the rest."""
    return 3 * connections + _ENGINE_EACH * instances + ADMIN_CONNECTIONS_MOST + _REST


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = RAISE_MOST if hard == resource.RLIM_INFINITY else min(hard, RAISE_MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
        note("warning", "open_files_limit", reason=reason)


class OpenFiles:
    """Counts and logs that the gateway has no file descriptor left: a fault of its limits, not of an engine."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._count = 0
        """Occurrences since the last line."""
        self._logged_at = float("-inf")

    def look(self, now: float) -> None:
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
            f"no file descriptor is left: {limit} is reached; clients and engines cannot be connected until it is "
            "raised or limits.connections is lower"
        )
        note("error", "out_of_files", reason=reason, count=self._count)
        self._count, self._logged_at = 0, now
