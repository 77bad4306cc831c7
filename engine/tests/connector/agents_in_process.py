"""Agents with NIXL's interface that copy within this process. As over UCX's TCP, a read makes progress only while the
owner of the memory calls its agent, and after a failed read all others from this agent fail until it is added again."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(eq=False)
class Reading:
    """A read between two agents."""

    reader: LocalAgent
    peer: str
    local: list[tuple[int, int]]
    remote: list[tuple[int, int]]
    state: str = "NEW"


@dataclass
class Fabric:
    """The agents, by name, and faults in their reads."""

    agents: dict[str, LocalAgent] = field(default_factory=dict)
    held: threading.Event = field(default_factory=threading.Event)
    """While it is set, reads make no progress."""
    failing: int = 0
    """Number of reads that will fail."""
    rejecting: bool = False
    """True: no agent can be added."""
    defective: str = ""
    """Name of an agent that can no longer be called."""
    reads: list[Reading] = field(default_factory=list)

    def agent(self) -> LocalAgent:
        """Create an agent."""
        name = f"agent{len(self.agents)}"
        self.agents[name] = LocalAgent(name, self)
        return self.agents[name]

    @property
    def reading(self) -> int:
        """Number of reads in progress."""
        return sum(read.state == "PROC" for read in self.reads)


class LocalAgent:
    """One agent."""

    def __init__(self, name: str, fabric: Fabric) -> None:
        self.name, self._fabric = name, fabric
        self.registered: list[tuple[int, int]] = []
        self._asked: list[Reading] = []
        self.released = 0
        self.known: list[str] = []
        """Names of the agents that have been added."""
        self._broken: set[str] = set()

    def register_memory(self, reg_list: Any, mem_type: str) -> None:
        """Register ranges."""
        assert mem_type == "DRAM"
        self.registered += [
            (address, nbytes) for address, nbytes, device, name in reg_list if (device, name) == (0, "")
        ]

    def get_agent_metadata(self) -> bytes:
        """Return the name."""
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Return the name. Raises RuntimeError if agents are rejected."""
        if self._fabric.rejecting:
            raise RuntimeError("NIXL_ERR_BACKEND")
        assert metadata.decode() not in self.known
        self.known.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        """Forget an agent that nothing is read from."""
        assert not [
            read for read in self._fabric.reads if (read.reader, read.peer, read.state) == (self, agent, "PROC")
        ]
        self.known.remove(agent)
        self._broken.discard(agent)

    def get_xfer_descs(self, descs: Any, mem_type: str) -> list[tuple[int, int]]:
        """Return (address, bytes) of spans."""
        assert mem_type == "DRAM"
        assert descs.dtype == np.uint64
        assert not descs[:, 2].any()
        return [(int(address), int(nbytes)) for address, nbytes, _ in descs]

    def initialize_xfer(self, operation: str, local: Any, remote: Any, remote_agent: str) -> Reading:
        """Check that the spans correspond and are registered."""
        assert operation == "READ"
        assert remote_agent in self.known
        assert [nbytes for _, nbytes in local] == [nbytes for _, nbytes in remote]
        for spans, agent in ((local, self), (remote, self._fabric.agents[remote_agent])):
            for address, nbytes in spans:
                assert any(a <= address and address + nbytes <= a + n for a, n in agent.registered), "not registered"
        read = Reading(self, remote_agent, local, remote)
        self._fabric.reads.append(read)
        self._fabric.agents[remote_agent]._asked.append(read)
        return read

    def transfer(self, handle: Reading) -> str:
        """Begin."""
        handle.state = "ERR" if handle.peer in self._broken else "PROC"
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Reading) -> str:
        """Return the state."""
        if handle.state == "ERR":
            self._broken.add(handle.peer)
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def release_xfer_handle(self, handle: Reading) -> None:
        """Count; only a read that has ended may be released."""
        assert handle.state in ("DONE", "ERR")
        self.released += 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Let others read from this agent's memory."""
        if self.name == self._fabric.defective:
            raise RuntimeError("NIXL_ERR_UNKNOWN")
        while self._asked and not self._fabric.held.is_set():
            read = self._asked.pop(0)
            if read.state != "PROC":
                continue
            if self._fabric.failing:
                self._fabric.failing -= 1
                read.state = "ERR"
                continue
            for (to, nbytes), (source, _) in zip(read.local, read.remote, strict=True):
                ctypes.memmove(to, source, nbytes)
            read.state = "DONE"
        return {}
