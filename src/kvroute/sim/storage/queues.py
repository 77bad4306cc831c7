"""First-in, first-out queues of agents as linked lists in arrays."""

from __future__ import annotations

from kvroute.compiled import compiled_in_place
from kvroute.sim.storage.state import NOTHING, Queues


@compiled_in_place
def put(queues: Queues, queue: int, agent: int) -> None:
    """Append an agent to a queue."""
    queues.next[agent] = NOTHING
    if queues.head[queue] == NOTHING:
        queues.head[queue] = agent
    else:
        queues.next[queues.tail[queue]] = agent
    queues.tail[queue] = agent


@compiled_in_place
def take(queues: Queues, queue: int) -> int:
    """Remove the first agent of a queue and return it. The queue must not be empty."""
    agent = queues.head[queue]
    queues.head[queue] = queues.next[agent]
    return int(agent)
