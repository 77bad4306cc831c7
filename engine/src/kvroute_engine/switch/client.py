"""All-reduce of float tensors through a switch, over UDP: what a rank calls."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvroute_engine.errors import InputError
from kvroute_engine.switch.fixed_point import FLOAT_TYPES, exponents, merge, split, to_fixed, to_float
from kvroute_engine.switch.wire import (
    CHUNK_VALUES,
    DATA_BYTES,
    SLOTS_MAX,
    Data,
    PacketError,
    PacketKind,
    Reason,
    Reduction,
    Values,
    decode,
    encode,
)
from kvroute_engine.switch.worker import Worker

RETRY_S = 0.01
"""Least time after which a packet without an answer is sent again."""
TIMEOUT_S = 5.0
GiveUp: TypeAlias = Callable[[float], bool]
"""Whether to give an operation up, from the time without an answer in seconds."""
_ASK_S = 0.1
"""Longest time between two calls of it."""
_BUFFER_BYTES = 4 * 2**20
_REASONS = {Reason.SLOTS: "too few slots are free", Reason.SHAPE: "another worker gave other numbers"}


class AggregationError(Exception):
    """The switch did not aggregate: it is down, has no slots, or a worker has restarted. The caller can use a ring."""


def is_answering(switch: tuple[str, int], job: int, wait_s: float) -> bool:
    """Return whether a switch answers within `wait_s`. `job`: number of a group that does not exist.

    Raises:
        InputError: the host is not known.
    """
    probe = Data(PacketKind.DATA, job, 1, 0, 1, 0, 0, Reduction.SUM, 0, np.zeros(CHUNK_VALUES, np.int32))
    with _connected(switch) as connection:
        connection.settimeout(wait_s)
        try:
            connection.send(encode(probe))
            answer = decode(connection.recv(DATA_BYTES + 1))
        except (OSError, PacketError):
            return False
        return answer.kind == PacketKind.STALE


def _connected(switch: tuple[str, int]) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(*switch, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise InputError(f"the switch {switch[0]} is not known: {error.strerror}", hint="check the name") from error
    connection = socket.socket(family, kind)
    connection.connect(address)
    return connection


class AggregationClient:
    """One rank of a group. All ranks call `all_reduce` in the same order with tensors of the same size.

    After an AggregationError the client is closed; no rank has a wrong result, but ranks may differ in whether they
    have one, so a group must agree on its fallback.
    """

    def __init__(
        self,
        switch: tuple[str, int],
        job: int,
        rank: int,
        ranks: int,
        slots: int = 128,
        *,
        retry_s: float = RETRY_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Args:

        switch: host and port.
        job: number of the group; all ranks give the same one, and every group another one.
        rank, ranks: number of this rank, and of ranks.
        slots: packets that the switch aggregates at the same time for this group.
        retry_s: least time after which a packet is sent again.
        timeout_s: time without progress after which `all_reduce` gives up.

        Raises:
            InputError: a rank or a number of slots that is not possible, or a host that is not known.
        """
        if not 0 <= rank < ranks <= 64:
            raise InputError(f"rank {rank} of {ranks} is not possible", hint="give 1 to 64 ranks, numbered from 0")
        if not 0 < slots <= SLOTS_MAX:
            raise InputError(f"{slots} slots are not possible", hint=f"give 1 to {SLOTS_MAX}")
        self._job, self._rank, self._ranks, self._slots = job, rank, ranks, slots
        self._retry_s, self._timeout_s = retry_s, timeout_s
        self._worker = Worker(job, rank, ranks, slots, time.time_ns(), retry_s)
        self._socket = _connected(switch)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._switch: tuple[str, int] = self._socket.getpeername()[:2]

    def again(self) -> AggregationClient:
        """Return another client of this rank, which joins the group as a worker that has restarted. All ranks of the
        group must do so, each after it has closed its own client."""
        return AggregationClient(
            self._switch,
            self._job,
            self._rank,
            self._ranks,
            self._slots,
            retry_s=self._retry_s,
            timeout_s=self._timeout_s,
        )

    @property
    def packets_sent_again(self) -> int:
        """Packets that were sent again because no answer came in time."""
        return self._worker.sent_again

    def all_reduce(self, tensor: npt.NDArray[Any], give_up: GiveUp | None = None) -> npt.NDArray[Any]:
        """Return the sum over all ranks, of the tensor's shape and type; equal on all ranks, bit for bit.

        float16, float32 and float64 are summed in fixed point with a power-of-two scale per 256 values; int32 as it is.

        Args:
            tensor: of any shape.
            give_up: called some times a second while it waits; None: give up after `timeout_s` without an answer.

        Raises:
            InputError: a tensor of another type.
            AggregationError: see the class.
        """
        if self._socket.fileno() < 0:
            raise AggregationError("the client is closed")
        if not tensor.size:
            return tensor.copy()
        if tensor.dtype == np.int32:
            return merge(self._reduce(Reduction.SUM, split(tensor), give_up), tensor.shape)
        if tensor.dtype not in FLOAT_TYPES:
            hint = "convert it to float32"
            raise InputError(f"a tensor of {tensor.dtype} cannot be aggregated", hint=hint)
        chunks = split(tensor)
        own = exponents(chunks)
        common = merge(self._reduce(Reduction.MAX, split(own), give_up), own.shape)
        sums = self._reduce(Reduction.SUM, to_fixed(chunks, common, self._ranks), give_up)
        return merge(to_float(sums, common, self._ranks, tensor.dtype), tensor.shape)

    def _reduce(self, reduction: Reduction, values: Values, give_up: GiveUp | None) -> Values:
        assert values.shape[1] == CHUNK_VALUES
        self._worker.begin(reduction, values)
        heard_s = time.monotonic()
        while self._worker.busy:
            now_s = time.monotonic()
            if self._worker.state in ("refused", "restarted"):
                self._fail(_REASONS.get(self._worker.reason, "a worker has restarted"))
            silent_s = now_s - heard_s
            if give_up(silent_s) if give_up is not None else silent_s > self._timeout_s:
                self._fail(f"the switch or a worker did not answer for {silent_s:.1f} s")
            for packet in self._worker.outgoing(now_s):
                self._send(packet)
            if self._receive(max(min(self._worker.next_s() - now_s, _ASK_S), 1e-4)):
                heard_s = time.monotonic()
        return self._worker.result()

    def _send(self, packet: bytes) -> None:
        try:
            self._socket.send(packet)
        except OSError:
            return  # such as a switch that is down; the packet is sent again

    def _receive(self, wait_s: float) -> bool:
        """Take the packets that have arrived, after at most `wait_s`; return whether there was one."""
        self._socket.settimeout(wait_s)
        received = False
        try:
            while True:
                self._worker.receive(self._socket.recv(DATA_BYTES + 1), time.monotonic())
                received = True
                self._socket.settimeout(0.0)
        except OSError:
            return received

    def _fail(self, why: str) -> None:
        self.close()
        raise AggregationError(why)

    def close(self) -> None:
        """Free the slots, if the switch hears it, and close the socket."""
        if self._socket.fileno() >= 0:
            self._send(self._worker.leave())
            self._socket.close()

    def __enter__(self) -> AggregationClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
