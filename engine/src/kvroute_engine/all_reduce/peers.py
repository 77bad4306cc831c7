"""Agreement of the ranks of a group on the end of its use of the switch: who has the last result, and that no one else
will get it from the switch.

An all-reduce through a switch may be complete on some ranks while others get no answer. Every rank therefore keeps its
last result and answers two questions of other ranks in a thread: how far it is, and whether it has the result of an
operation. A rank that is asked for a result that it does not have abandons that operation: it will not complete it
through the switch any more. So after a rank has asked all others, either one of them has the result, which it takes, or
all of them reduce the same operation again in another way.

A group that returns to the switch begins a new generation of operations, all ranks before the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute_engine.all_reduce.channel import Address, Channel
from kvroute_engine.switch import AggregationError

Values: TypeAlias = npt.NDArray[Any]


class SwitchOperation(msgspec.Struct, frozen=True):
    """An operation through the switch."""

    generation: int
    number: int
    """Number in its generation, from 0."""


class _Question(msgspec.Struct):
    operation: SwitchOperation
    abandon: bool
    """True: answer with the result, or abandon the operation. False: only say how far you are."""


class _Reply(msgspec.Struct):
    begun: bool
    """Whether the rank has begun the operation."""
    result: bytes | None = None


@dataclass(slots=True)
class _Generation:
    begun: int = 0
    completed: int = 0
    result: Values | None = None
    abandoned: int | None = None
    """Number of the first operation that was abandoned."""

    def has_abandoned(self, number: int) -> bool:
        return self.abandoned is not None and number >= self.abandoned


class Operations:
    """The operations of one rank through the switch; used by its own thread and by that of questions.

    An operation ends as complete or as abandoned, and stays so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = 0
        self._generations = {0: _Generation()}

    def _of(self, operation: SwitchOperation) -> _Generation:
        return self._generations.setdefault(operation.generation, _Generation())

    def begin(self, generation: int = 0) -> SwitchOperation:
        """Begin the next operation; the generation never decreases."""
        with self._lock:
            if generation > self._current:
                # The last operation of the generation before may be incomplete on other ranks, no older one.
                keep = {self._current, *(number for number in self._generations if number >= generation)}
                self._generations = {number: self._generations[number] for number in keep}
                self._current = generation
            own = self._generations.setdefault(generation, _Generation())
            own.begun += 1
            return SwitchOperation(generation, own.begun - 1)

    def has_begun(self, operation: SwitchOperation) -> bool:
        """Return whether this rank has begun an operation."""
        with self._lock:
            return operation.generation < self._current or self._of(operation).begun > operation.number

    def abandoned(self, operation: SwitchOperation) -> bool:
        """Return whether this operation must not be completed through the switch."""
        with self._lock:
            return self._of(operation).has_abandoned(operation.number)

    def complete(self, operation: SwitchOperation, result: Values) -> bool:
        """Keep the result; False if the operation was abandoned before, and the result must not be used."""
        with self._lock:
            own = self._of(operation)
            if own.has_abandoned(operation.number):
                return False
            own.completed, own.result = operation.number + 1, result
            return True

    def abandon(self, operation: SwitchOperation) -> Values | None:
        """Return the result of an operation; if there is none, abandon it and all later ones of its generation.

        Only the last result is kept: no rank completes an operation before all ranks have begun it.
        """
        with self._lock:
            own = self._of(operation)
            if own.completed > operation.number:
                assert own.completed == operation.number + 1, "a later operation needs the rank that asks"
                own.abandoned = own.completed
                return own.result
            own.abandoned = operation.number if own.abandoned is None else min(operation.number, own.abandoned)
            return None


class RankPeers:
    """Questions to the other ranks of a group, and a thread that answers theirs."""

    def __init__(self, operations: Operations, host: str, key: bytes) -> None:
        """`operations`: those of this rank; `host`, `key`: see `Channel`."""
        self._operations = operations
        self._channel = Channel(host, key, self._answer)
        self._others: list[Address] = []

    @property
    def address(self) -> Address:
        """Host and port at which it listens."""
        return self._channel.address

    def connect(self, others: Sequence[Address]) -> None:
        """Set the addresses of the other ranks."""
        self._others = list(others)

    def all_have_begun(self, operation: SwitchOperation) -> bool:
        """Return whether all other ranks that answer have begun an operation."""
        replies = (self._ask(address, _Question(operation, abandon=False)) for address in self._others)
        return all(reply is None or reply.begun for reply in replies)

    def abandon(self, operation: SwitchOperation, own: Values) -> Values | None:
        """Return the result of an operation of which this rank has none; None if no rank has it, and all have abandoned
        it.

        Args:
            operation: the operation, abandoned on this rank.
            own: array of the result's shape and type.

        Raises:
            AggregationError: a rank does not answer.
        """
        found = None
        for address in self._others:
            reply = self._ask(address, _Question(operation, abandon=True))
            if reply is None:
                raise AggregationError(f"rank at {address[0]}:{address[1]} does not answer")
            if reply.result is not None:
                found = np.frombuffer(reply.result, own.dtype).reshape(own.shape).copy()
        return found

    def _ask(self, address: Address, question: _Question) -> _Reply | None:
        answer = self._channel.ask(address, msgspec.msgpack.encode(question))
        try:
            return None if answer is None else msgspec.msgpack.decode(answer, type=_Reply)
        except msgspec.DecodeError:
            return None

    def _answer(self, request: bytes) -> bytes:
        question = msgspec.msgpack.decode(request, type=_Question)
        result = self._operations.abandon(question.operation) if question.abandon else None
        begun = self._operations.has_begun(question.operation)
        return msgspec.msgpack.encode(_Reply(begun, None if result is None else result.tobytes()))

    def close(self) -> None:
        """Answer no more questions."""
        self._channel.close()
