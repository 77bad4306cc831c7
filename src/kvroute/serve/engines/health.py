"""Active health checks: an instance is down after a number of failures in a row, and up again after a number of
successes. The first check of an instance decides alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvroute.http.client.callbacks import weakly
from kvroute.http.client.poller import Poller, PollResult, PollSpec
from kvroute.http.client.pool import UpstreamPool


class Health:
    """Health of one instance by its checks. Without an earlier state it is up until its first check decides."""

    __slots__ = ("_against", "_failures", "_successes", "checked", "up")

    def __init__(self, failures: int, successes: int, known: bool | None = None) -> None:
        """Args: `failures` and `successes` in a row that change the state, 1 or more; `known`: an earlier state."""
        self.up = known is not False
        self.checked = known is not None
        """Whether any check has ended."""
        self._failures = failures
        self._successes = successes
        self._against = 0
        """Number of checks in a row that contradict `up`."""

    def record(self, well: bool) -> bool:
        """Record a check's result; return whether it has changed `up`."""
        first, self.checked = not self.checked, True
        self._against = 0 if well is self.up else self._against + 1
        if self._against == 0 or not (first or self._against >= (self._failures if self.up else self._successes)):
            return False
        self.up = well
        self._against = 0
        return True


class HealthChecks:
    """Sends GET requests to every engine; a status from 200 to 299 is healthy, all else (also a timeout) is not."""

    def __init__(
        self,
        names: Sequence[str],
        pool_of: Callable[[str], UpstreamPool | None],
        on_change: Callable[[str, bool, float], None],
        now: Callable[[], float],
        settings: PollSpec,
        *,
        failures: int = 2,
        known: Mapping[str, bool] | None = None,
    ) -> None:
        """
        Args:
            names, pool_of, settings: see `Poller`.
            on_change: called with (instance, whether it is up, time) if that changes or, while it is down, if `present`
                changes.
            now: the clock of `on_change`.
            failures: see `Health`.
            known: whether an instance is up, from `known` of earlier checks.
        """
        known = known or {}
        self._failures = failures
        self._health = {name: Health(failures, 1, known.get(name)) for name in names}
        self._on_change = on_change
        self._now = now
        self._why: dict[str, str] = {}
        self._passed = set(known)
        """Instances that have passed a check or were checked earlier."""
        self._absent = {name for name, up in known.items() if not up}
        self._poller = Poller(names, pool_of, weakly(self._answered), settings)

    def add(self, name: str) -> None:
        """Check another instance from now on, the first time at once. It is down until a check succeeds."""
        self._health[name] = Health(self._failures, 1, False)
        self._absent.add(name)
        self._poller.add(name)

    def remove(self, name: str) -> None:
        """Check an instance no more."""
        self._poller.remove(name)
        del self._health[name]
        self._absent.discard(name)
        self._passed.discard(name)
        self._why.pop(name, None)

    def start(self) -> None:
        """Start; the event loop must be running."""
        self._poller.start()

    def close(self) -> None:
        """Stop the checks."""
        self._poller.close()

    def up(self, name: str) -> bool:
        """Whether an instance is up."""
        return self._health[name].up

    def present(self, name: str) -> bool:
        """Whether a process listens at the instance's address and has passed a check before; True before any check."""
        return name not in self._absent

    def why(self, name: str) -> str:
        """Return why the last check failed; empty if it did not."""
        return self._why.get(name, "")

    def known(self) -> dict[str, bool]:
        """Return whether each instance is up, for those that have been checked."""
        return {name: health.up for name, health in self._health.items() if health.checked}

    @property
    def all_checked(self) -> bool:
        """Whether every instance has been checked at least once."""
        return all(health.checked for health in self._health.values())

    def _answered(self, name: str, answer: PollResult) -> None:
        well = 200 <= answer.status < 300
        self._why[name] = "" if well else answer.failure or f"HTTP status {answer.status}"
        if well:
            self._passed.add(name)
        was_present = self.present(name)
        if well or (name in self._passed and not answer.refused):
            self._absent.discard(name)
        else:
            self._absent.add(name)
        health = self._health[name]
        if health.record(well) or (not health.up and self.present(name) != was_present):
            self._on_change(name, health.up, self._now())
