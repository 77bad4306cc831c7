"""Agreement of the ranks of a group on the end of its use of the switch: who has the last result, and that no one else
will get it from the switch.

An all-reduce through a switch may be complete on some ranks while others get no answer. Every rank therefore keeps its
last result and answers two questions of other ranks in a thread: how far it is, and whether it has the result of an
operation. A rank that is asked for a result that it does not have abandons that operation: it will not complete it
through the switch any more. So after a rank has asked all others, either one of them has the result, which it takes, or
all of them reduce the same operation again in another way.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.switch import AggregationError

Address: TypeAlias = tuple[str, int]
Values: TypeAlias = npt.NDArray[Any]
KEY_BYTES = 32
_REPLY_S = 30.0


class _Question(msgspec.Struct):
    operation: int
    abandon: bool
    """True: answer with the result, or abandon the operation. False: only say how far you are."""


class _Reply(msgspec.Struct):
    begun: int
    """Number of operations that the rank has begun."""
    result: bytes | None = None


class Operations:
    """The operations of one rank through the switch, numbered from 0; used by its own thread and by that of questions.

    An operation ends as complete or as abandoned, and stays so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._completed = 0
        self._result: Values | None = None
        self._abandoned: int | None = None

    @property
    def begun(self) -> int:
        """Number of operations begun."""
        with self._lock:
            return self._begun

    def begin(self) -> int:
        """Begin the next operation, and return its number."""
        with self._lock:
            self._begun += 1
            return self._begun - 1

    def abandoned(self, operation: int) -> bool:
        """Return whether this operation must not be completed through the switch."""
        with self._lock:
            return self._abandoned is not None and operation >= self._abandoned

    def complete(self, operation: int, result: Values) -> bool:
        """Keep the result; False if the operation was abandoned before, and the result must not be used."""
        with self._lock:
            if self._abandoned is not None and operation >= self._abandoned:
                return False
            self._completed, self._result = operation + 1, result
            return True

    def abandon(self, operation: int) -> Values | None:
        """Return the result of an operation; if there is none, abandon it and all later ones.

        Only the last result is kept: no rank completes an operation before all ranks have begun it.
        """
        with self._lock:
            if self._completed > operation:
                assert self._completed == operation + 1, "a later operation needs the rank that asks"
                self._abandoned = self._completed
                return self._result
            self._abandoned = operation if self._abandoned is None else min(operation, self._abandoned)
            return None


class Peers:
    """Questions to the other ranks of a group, and a thread that answers theirs."""

    def __init__(self, operations: Operations, host: str, key: bytes) -> None:
        """Listen.

        Args:
            operations: those of this rank.
            host: address to listen on.
            key: secret of the group; connections without it are refused.
        """
        self._operations, self._key = operations, key
        self._listener = Listener((host, 0), "AF_INET", backlog=64)  # the key is checked in a thread of each connection
        self._others: list[Address] = []
        threading.Thread(target=self._serve, daemon=True, name="kvroute-all-reduce").start()

    @property
    def address(self) -> Address:
        """Host and port at which it listens."""
        address = self._listener.address
        assert isinstance(address, tuple)
        return address

    def connect(self, others: Sequence[Address]) -> None:
        """Set the addresses of the other ranks."""
        self._others = list(others)

    def all_have_begun(self, operation: int) -> bool:
        """Return whether all other ranks that answer have begun an operation."""
        replies = (self._ask(address, _Question(operation, abandon=False)) for address in self._others)
        return all(reply is None or reply.begun > operation for reply in replies)

    def abandon(self, operation: int, own: Values) -> Values | None:
        """Return the result of an operation of which this rank has none; None if no rank has it, and all have abandoned
        it.

        Args:
            operation: number of the operation, abandoned on this rank.
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
        try:
            with Client(address, "AF_INET", authkey=self._key) as connection:
                connection.send_bytes(msgspec.msgpack.encode(question))
                if not connection.poll(_REPLY_S):
                    return None
                return msgspec.msgpack.decode(connection.recv_bytes(), type=_Reply)
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            return None

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        try:
            with connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                question = msgspec.msgpack.decode(connection.recv_bytes(1024), type=_Question)
                result = self._operations.abandon(question.operation) if question.abandon else None
                reply = _Reply(self._operations.begun, None if result is None else result.tobytes())
                connection.send_bytes(msgspec.msgpack.encode(reply))
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            return

    def close(self) -> None:
        """Answer no more questions."""
        self._listener.close()


def new_key() -> bytes:
    """Return a secret for a group."""
    return secrets.token_bytes(KEY_BYTES)


def own_host(target: Address) -> str:
    """Return the address of this machine on its path to `target`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
