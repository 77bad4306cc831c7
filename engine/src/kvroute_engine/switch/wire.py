"""Packets between workers and the switch: one UDP payload each, a fixed header and, for data, 256 integers.

All numbers are little-endian. Everything here is a pure function over bytes; docs/switch.md has the table of fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = 0x4B52
PROTOCOL = 1
CHUNK_VALUES = 256
"""Number of int32 values in a data packet."""
WORKERS_MAX = 64
"""Maximum number of workers of a job: the bits of a slot's bitmap."""
SLOTS_MAX = 0xFFFF
EPOCH_JOIN_MAX = 2**31
"""Largest epoch in a JOIN. The switch begins a later one, which must fit into the field."""
_COMMON = "<HBBIIBB"
_DATA = struct.Struct(_COMMON + "HBBQ")
_CONTROL = struct.Struct(_COMMON + "HBxQQQ")
DATA_BYTES = _DATA.size + 4 * CHUNK_VALUES
CONTROL_BYTES = _CONTROL.size

_RESULT = bytes([2])
Values: TypeAlias = npt.NDArray[np.int32]


class PacketKind(IntEnum):
    """What a packet is."""

    DATA = 1
    """Worker to switch: its values of one chunk."""
    RESULT = 2
    """Switch to worker: the sum or maximum over all workers."""
    JOIN = 3
    """Worker to switch: it is ready for a new epoch."""
    JOINED = 4
    """Switch to worker: all workers have joined; the epoch begins."""
    REFUSED = 5
    """Switch to worker: the job gets no slots."""
    STALE = 6
    """Switch to worker: the epoch of its data is over, or the switch does not know the job."""
    LEAVE = 7
    """Worker to switch: it sends nothing more."""


class Reduction(IntEnum):
    """How the switch combines the values of the workers."""

    SUM = 0
    MAX = 1


class Reason(IntEnum):
    """Why a worker may not join."""

    NONE = 0
    SLOTS = 1
    """Too few slots are free."""
    SHAPE = 2
    """The job exists with another number of workers or slots."""


class PacketError(ValueError):
    """Bytes that are not a packet of this protocol."""


@dataclass(frozen=True, slots=True)
class Data:
    """A packet of kind DATA or RESULT."""

    kind: PacketKind
    job: int
    epoch: int
    worker: int
    workers: int
    slot: int
    """Number of the slot in the job's range."""
    version: int
    """0 or 1: which of the slot's two versions."""
    reduction: Reduction
    chunk: int
    """Number of the chunk in the epoch."""
    values: Values
    """Shape [CHUNK_VALUES]."""


@dataclass(frozen=True, slots=True)
class ControlPacket:
    """A packet of any other kind. Fields that a kind does not use are 0."""

    kind: PacketKind
    job: int
    epoch: int
    """JOIN: the last epoch of the worker, 0 before the first; JOINED: the new one; STALE: that which is over."""
    worker: int
    workers: int
    slots: int = 0
    """Number of slots requested or granted."""
    reason: Reason = Reason.NONE
    session: int = 0
    """JOIN: session of the worker, 0 for a new one; JOINED: the session that continues or begins."""
    operations: int = 0
    """JOIN: complete operations of the session; JOINED: the first operation to do."""
    incarnation: int = 0
    """JOIN: number that increases each time the worker starts; the answer has that of the JOIN."""


def encode(packet: Data | ControlPacket) -> bytes:
    """Encode a packet: DATA_BYTES or CONTROL_BYTES bytes."""
    common = (MAGIC, PROTOCOL, packet.kind, packet.job, packet.epoch, packet.worker, packet.workers)
    if isinstance(packet, ControlPacket):
        rest = (packet.slots, packet.reason, packet.session, packet.operations, packet.incarnation)
        return _CONTROL.pack(*common, *rest)
    header = _DATA.pack(*common, packet.slot, packet.version, packet.reduction, packet.chunk)
    return header + packet.values.astype("<i4", copy=False).tobytes()


def as_result(data: bytes, values: Values) -> bytes:
    """Return the RESULT packet for an encoded DATA packet: the same header, other values."""
    return b"".join((data[:3], _RESULT, data[4 : _DATA.size], values.astype("<i4", copy=False).tobytes()))


def decode(content: bytes) -> Data | ControlPacket:
    """Decode a packet and check every field.

    Raises:
        WireError: it is not a packet of this protocol.
    """
    if len(content) == DATA_BYTES:
        return _decode_data(content)
    if len(content) == CONTROL_BYTES:
        return _decode_control(content)
    raise PacketError(f"a packet has {DATA_BYTES} or {CONTROL_BYTES} bytes, not {len(content)}")


def _decode_data(content: bytes) -> Data:
    magic, protocol, kind, job, epoch, worker, workers, slot, version, reduction, chunk = _DATA.unpack_from(content)
    _check_common(magic, protocol, worker, workers)
    if kind not in (PacketKind.DATA, PacketKind.RESULT):
        raise PacketError(f"a data packet cannot be of kind {kind}")
    if version > 1 or reduction > 1 or not epoch:
        raise PacketError(f"version {version}, reduction {reduction} or epoch {epoch} is out of range")
    values = np.frombuffer(content, "<i4", CHUNK_VALUES, _DATA.size)
    return Data(PacketKind(kind), job, epoch, worker, workers, slot, version, Reduction(reduction), chunk, values)


def _decode_control(content: bytes) -> ControlPacket:
    unpacked = _CONTROL.unpack(content)
    magic, protocol, kind, job, epoch, worker, workers, slots, reason, session, operations, incarnation = unpacked
    _check_common(magic, protocol, worker, workers)
    if not PacketKind.JOIN <= kind <= PacketKind.LEAVE:
        raise PacketError(f"a control packet cannot be of kind {kind}")
    if reason > Reason.SHAPE or (reason != Reason.NONE) != (kind == PacketKind.REFUSED):
        raise PacketError(f"reason {reason} does not fit kind {kind}")
    if kind in (PacketKind.JOIN, PacketKind.JOINED) and not slots:
        raise PacketError("a job needs a slot")
    if kind == PacketKind.JOIN and epoch > EPOCH_JOIN_MAX:
        raise PacketError(f"epoch {epoch} of a JOIN is above {EPOCH_JOIN_MAX}")
    reason = Reason(reason)
    return ControlPacket(PacketKind(kind), job, epoch, worker, workers, slots, reason, session, operations, incarnation)


def _check_common(magic: int, protocol: int, worker: int, workers: int) -> None:
    if magic != MAGIC or protocol != PROTOCOL:
        raise PacketError(f"magic {magic:#06x}, protocol {protocol}: expected {MAGIC:#06x} and {PROTOCOL}")
    if not worker < workers <= WORKERS_MAX:
        raise PacketError(f"worker {worker} of {workers}: at most {WORKERS_MAX} workers, numbered from 0")
