"""Agreement of the ranks of a tensor-parallel group on the option of each all-reduce: sans-I/O state machines.

Ranks that reduce the same tensor with different schemes would wait for each other for ever. Tables come from one
central scheduler and have versions. The leader of a group commits a version from an operation on, and every rank
acknowledges the commit. The leader does not start the operation before that one until it has all acknowledgements, and
without the leader no rank can complete it, so no rank reaches the first operation of a version that it does not know.
Where ranks start operations before earlier ones are complete, as on GPUs, the leader stops that many operations
earlier. An option is any immutable value, such as a scheme or rules by size.

Messages may be lost, repeated and reordered; the caller sends `Leader.pending` again from time to time. Ranks that
restart form a new incarnation of the group, which begins with operation 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Option = TypeVar("Option")
_AHEAD = 64
"""Operations between the decision to commit and the first operation of the version, so that acknowledgements usually
arrive before the leader would have to wait."""


@dataclass(frozen=True, slots=True)
class TableEntry(Generic[Option]):
    """The scheduler's choice for one group."""

    version: int
    """Increases with every change."""
    option: Option


@dataclass(frozen=True, slots=True)
class Commit(Generic[Option]):
    """Leader to rank: use an option from an operation on."""

    incarnation: int
    version: int
    option: Option
    first_operation: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Rank to leader: it knows a commit."""

    incarnation: int
    rank: int
    version: int


@dataclass(slots=True)
class Rank(Generic[Option]):
    """A rank of a group; the leader contains one, too."""

    incarnation: int
    number: int
    option: Option
    """Option of operation 0."""
    _commits: dict[int, Commit[Option]] = field(default_factory=dict)
    """By version."""

    def receive(self, commit: Commit[Option]) -> Acknowledged | None:
        """Take a commit; return the acknowledgement, also for a commit that is known. Commits of other incarnations are
        ignored."""
        if commit.incarnation != self.incarnation:
            return None
        self._commits.setdefault(commit.version, commit)
        return Acknowledged(self.incarnation, self.number, commit.version)

    def option_of(self, operation: int) -> Option:
        """Return the option of an operation: that of the last version whose first operation is not later."""
        reached = [commit for commit in self._commits.values() if commit.first_operation <= operation]
        if not reached:
            return self.option
        newest = max(reached, key=lambda commit: commit.version)
        for commit in reached:
            if commit is not newest:
                del self._commits[commit.version]  # no later operation needs it
        return newest.option


@dataclass(slots=True)
class Leader(Generic[Option]):
    """The leader of a group: takes entries of the scheduler's table and commits them one after the other."""

    own: Rank[Option]
    ranks: frozenset[int]
    """Numbers of the other ranks."""
    ahead: int = _AHEAD
    early: int = 0
    """Operations that ranks may have started and not completed when they start another one."""
    _operation: int = 0
    """Next operation that the leader starts."""
    _version: int = -1
    _waiting: TableEntry[Option] | None = None
    """Newest entry that is not committed yet."""
    _commit: Commit[Option] | None = None
    """Commit that some ranks have not acknowledged."""
    _missing: set[int] = field(default_factory=set)

    def receive_entry(self, entry: TableEntry[Option]) -> None:
        """Take an entry of the scheduler's table; older versions are ignored."""
        newest = self._waiting.version if self._waiting is not None else self._version
        if entry.version > newest:
            self._waiting = entry
        self._begin()

    def _begin(self) -> None:
        """Commit the newest entry if no commit is under way."""
        if self._commit is not None or self._waiting is None:
            return
        entry, self._waiting = self._waiting, None
        self._version = entry.version
        first = self._operation + self.early + max(self.ahead, 1)
        self._commit = Commit(self.own.incarnation, entry.version, entry.option, first)
        self.own.receive(self._commit)
        self._missing = set(self.ranks)
        self._end()

    def receive(self, message: Acknowledged) -> None:
        """Take an acknowledgement; those of other incarnations and versions are ignored."""
        if self._commit is None or (message.incarnation, message.version) != (
            self._commit.incarnation,
            self._commit.version,
        ):
            return
        self._missing.discard(message.rank)
        self._end()

    def _end(self) -> None:
        if self._commit is not None and not self._missing:
            self._commit = None
            self._begin()

    def pending(self) -> Iterable[tuple[int, Commit[Option]]]:
        """Return the commit for each rank that has not acknowledged it."""
        return [(rank, self._commit) for rank in sorted(self._missing)] if self._commit is not None else []

    def may_start(self) -> bool:
        """Return whether the leader may start its next operation: not one after which a rank could start the first
        operation of a commit that it may not know."""
        return self._commit is None or self._operation < self._commit.first_operation - 1 - self.early

    def start(self) -> tuple[int, Option]:
        """Start the next operation; return its number and option. Only if `may_start`."""
        assert self.may_start(), "a rank may not know the version of an operation that it could start then"
        operation = self._operation
        self._operation += 1
        return operation, self.own.option_of(operation)
