"""Sums through the switch with a group's agreement on its end: either every rank has the same bits, or none has any."""

from __future__ import annotations

import time
from contextlib import suppress

from kvroute_engine.all_reduce.peers import Operations, RankPeers, SwitchOperation, Values
from kvroute_engine.switch import AggregationClient, AggregationError

_ASK_S = 0.5
"""Time between two questions to the other ranks whether they have begun an operation."""


class SwitchedSums:
    """All-reduces of one rank through the switch. After the first failure of a generation the group does not use the
    switch again in it."""

    def __init__(self, client: AggregationClient, operations: Operations, peers: RankPeers, timeout_s: float) -> None:
        """`timeout_s`: silence after which the switch counts as dead, if all ranks are waiting for it."""
        self._client, self._operations, self._peers, self._timeout_s = client, operations, peers, timeout_s
        self._generation = 0
        self.failure: str | None = None
        """Why the group stopped using the switch in this generation; None while it uses it."""

    def all_reduce(self, tensor: Values, generation: int = 0) -> Values | None:
        """Return the sum over all ranks; None if all ranks must reduce this tensor in another way, and all later ones
        of its generation.

        `generation`: the same on all ranks in each operation. A higher one than before returns to the switch; all
        ranks have then left the operations of the lower one but the last.

        Raises:
            AggregationError: a rank does not answer the question whether it has the result.
        """
        if generation > self._generation:
            self._return(generation)
        if self.failure is not None:
            return None
        operation = self._operations.begin(generation)
        if not self._operations.abandoned(operation):
            try:
                result = self._client.all_reduce(
                    tensor, _Patience(self._operations, self._peers, operation, self._timeout_s)
                )
                if self._operations.complete(operation, result):
                    return result
                why = "another rank got no answer"
            except AggregationError as error:
                why = str(error)
        else:
            why = "another rank got no answer"
        self._client.close()
        self._operations.abandon(operation)
        try:
            return self._peers.abandon(operation, tensor)
        finally:
            self.failure = why  # all other ranks have abandoned it

    def _return(self, generation: int) -> None:
        self._client.close()
        with suppress(OSError):  # the client stays closed, so the first operation fails
            self._client = self._client.again()
        self._generation, self.failure = generation, None

    def close(self) -> None:
        """Leave the switch, and answer no more questions of other ranks."""
        self._client.close()
        self._peers.close()


class _Patience:
    """When to give an operation up: another rank has, or the switch is silent although all ranks wait for it."""

    def __init__(self, operations: Operations, peers: RankPeers, operation: SwitchOperation, timeout_s: float) -> None:
        self._operations, self._peers, self._operation, self._timeout_s = operations, peers, operation, timeout_s
        self._ask_at_s = 0.0

    def __call__(self, silent_s: float) -> bool:
        if self._operations.abandoned(self._operation):
            return True
        now_s = time.monotonic()
        if silent_s < self._timeout_s or now_s < self._ask_at_s:
            return False
        self._ask_at_s = now_s + _ASK_S
        return self._peers.all_have_begun(self._operation)
