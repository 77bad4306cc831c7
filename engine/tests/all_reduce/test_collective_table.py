"""Ranks never disagree on an option, whatever the network does to messages, and a fair network makes progress."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute_engine.all_reduce.collective_table import Acknowledged, Commit, Leader, Rank, TableEntry

Rules = tuple[tuple[str, int], ...]
"""An option: schemes by size."""
FIRST: Rules = (("ring", 0),)


def rules(number: int) -> Rules:
    return ((f"scheme {number}", number), *FIRST)


class RecklessLeader(Leader[Rules]):
    """A leader that does not wait for acknowledgements."""

    def may_start(self) -> bool:
        return True


@dataclass
class Group:
    """A group whose operations end when every rank has started them, as all-reduces do; a rank starts up to `early`
    operations more before they end."""

    draw: random.Random
    ranks: int
    ahead: int
    loss: float
    reckless: bool = False
    early: int = 0
    incarnation: int = 0
    version: int = 0
    messages: list[tuple[int, Commit[Rules]] | Acknowledged] = field(default_factory=list)
    started: list[dict[int, Rules]] = field(default_factory=list)
    """[operation]: option by rank."""

    def __post_init__(self) -> None:
        self.boot()

    def boot(self) -> None:
        """All ranks start again, with operation 0; messages of the old incarnation stay in the network."""
        self.incarnation += 1
        kind = RecklessLeader if self.reckless else Leader
        others = frozenset(range(1, self.ranks))
        self.leader = kind(Rank(self.incarnation, 0, FIRST), others, self.ahead, self.early)
        self.others = {number: Rank(self.incarnation, number, FIRST) for number in others}
        self.at = dict.fromkeys(range(self.ranks), 0)
        self.started = []

    def ready(self, rank: int) -> bool:
        """Whether a rank has completed its operations but `early`: all ranks have started the one before them."""
        before = self.at[rank] - 1 - self.early
        return before < 0 or len(self.started[before]) == self.ranks

    def start(self, rank: int) -> None:
        """Let a rank start its next operation, if it can."""
        if not self.ready(rank) or (rank == 0 and not self.leader.may_start()):
            return
        operation = self.at[rank]
        option = self.leader.start()[1] if rank == 0 else self.others[rank].option_of(operation)
        if len(self.started) == operation:
            self.started.append({})
        self.started[operation][rank] = option
        self.at[rank] += 1
        assert len(set(self.started[operation].values())) == 1, "ranks disagree: they would wait for ever"

    def send(self, message: tuple[int, Commit[Rules]] | Acknowledged) -> None:
        """Lose, repeat or delay a message."""
        if self.draw.random() >= self.loss:
            self.messages += [message] * self.draw.choice((1, 1, 2))

    def deliver(self) -> None:
        """Deliver any message that is under way."""
        if not self.messages:
            return
        message = self.messages.pop(self.draw.randrange(len(self.messages)))
        if isinstance(message, Acknowledged):
            self.leader.receive(message)
            return
        answer = self.others[message[0]].receive(message[1])
        if answer is not None:
            self.send(answer)

    def step(self, restarts: bool = True) -> None:
        """One random event."""
        event = self.draw.random()
        if event < 0.55:
            self.start(self.draw.randrange(self.ranks))
        elif event < 0.8:
            self.deliver()
        elif event < 0.9:
            for message in self.leader.pending():
                self.send(message)
        elif event < 0.995 or not restarts:
            self.version += self.draw.choice((0, 1, 1, 2))
            self.leader.receive_entry(TableEntry(self.version, rules(self.draw.randrange(4))))
        else:
            self.boot()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(2, 5),
    ahead=st.integers(1, 8),
    loss=st.sampled_from([0.0, 0.2, 0.7]),
    early=st.sampled_from([0, 1, 5]),
)
def test_ranks_never_disagree(seed: int, ranks: int, ahead: int, loss: float, early: int) -> None:
    """2,000 random events: operations, lost, repeated and reordered messages, new tables, restarts."""
    group = Group(random.Random(seed), ranks, ahead, loss, early=early)
    for _ in range(2_000):
        group.step()


def test_the_leader_waits_for_operations_that_ranks_start_early() -> None:
    """A rank that may start two operations early starts operation 3 when the leader has started operation 0."""
    leader = Leader(Rank(1, 0, "ring"), frozenset({1}), ahead=1, early=2)
    leader.receive_entry(TableEntry(1, "ina"))
    ((_, commit),) = leader.pending()
    assert commit.first_operation == 3
    assert not leader.may_start()


def test_ranks_disagree_without_the_confirmation() -> None:
    """The same events with a leader that does not wait make ranks disagree in most runs."""
    disagreed = 0
    for seed in range(20):
        group = Group(random.Random(seed), 3, 2, 0.5, reckless=True)
        try:
            for _ in range(2_000):
                group.step()
        except AssertionError:
            disagreed += 1
    assert disagreed >= 15


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5), loss=st.sampled_from([0.0, 0.3]))
def test_a_fair_network_makes_progress(seed: int, ranks: int, loss: float) -> None:
    """Operations go on, and the newest version is used by all ranks in the end."""
    group = Group(random.Random(seed), ranks, 3, loss)
    for _ in range(500):
        group.step()
    group.leader.receive_entry(TableEntry(group.version + 1, rules(7)))
    for _ in range(4_000):
        group.deliver()
        group.start(group.draw.randrange(ranks))
        for message in group.leader.pending():
            group.send(message)
    assert set(group.started[-2].values()) == {rules(7)}
    assert not list(group.leader.pending())


def test_older_versions_and_other_incarnations_are_ignored() -> None:
    leader = Leader(Rank(2, 0, rules(0)), frozenset({1}), ahead=1)
    leader.receive_entry(TableEntry(5, rules(3)))
    leader.receive_entry(TableEntry(4, rules(1)))
    ((rank, commit),) = leader.pending()
    assert (rank, commit) == (1, Commit(2, 5, rules(3), 1))
    assert Rank(1, 1, rules(0)).receive(commit) is None
    leader.receive(Acknowledged(1, 1, 5))
    leader.receive(Acknowledged(2, 1, 4))
    assert not leader.may_start()
    leader.receive(Acknowledged(2, 1, 5))
    assert leader.start() == (0, rules(0))
    assert leader.start() == (1, rules(3))


def test_a_group_of_one_needs_no_acknowledgement() -> None:
    leader = Leader(Rank(1, 0, "ring"), frozenset(), ahead=1)
    leader.receive_entry(TableEntry(0, "ina"))
    assert [leader.start() for _ in range(2)] == [(0, "ring"), (1, "ina")]
