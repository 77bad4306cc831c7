"""Sets of flows that start together, prepared once and started many times with different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlowSet:
    """Flows for one unit of size, in the form that the kernels take: slot, path length and links of each flow."""

    count: int
    longest: int
    """Links of the longest path, private links of ceilings included."""
    template: IntArray
    slot_at: IntArray
    """[flow]: position of its slot in `template`."""
    nbytes: FloatArray
    """[flow]: for one unit."""
    limited: IntArray
    """Flows with a ceiling."""
    private_at: IntArray
    """Positions in `template` of their private links."""
    ceilings_bytes_per_s: FloatArray

    @classmethod
    def of(
        cls, paths: Sequence[Sequence[int]], nbytes: Sequence[float], ceilings_bytes_per_s: Sequence[float]
    ) -> FlowSet:
        """Return the set of flows over these paths, with an infinite ceiling for flows without one."""
        ints, slot_at, limited, private_at = list[int](), list[int](), list[int](), list[int]()
        for number, (path, ceiling) in enumerate(zip(paths, ceilings_bytes_per_s, strict=True)):
            links = list(dict.fromkeys(path))
            slot_at.append(len(ints))
            ints += [-1, len(links), *links]
            if ceiling < np.inf:
                limited.append(number)
                private_at.append(len(ints))
                ints[slot_at[-1] + 1] += 1
                ints.append(-1)
        return cls(
            count=len(paths),
            longest=max((ints[at + 1] for at in slot_at), default=0),
            template=np.array(ints, np.int64),
            slot_at=np.array(slot_at, np.int64),
            nbytes=np.array(nbytes, np.float64),
            limited=np.array(limited, np.int64),
            private_at=np.array(private_at, np.int64),
            ceilings_bytes_per_s=np.array([ceilings_bytes_per_s[number] for number in limited], np.float64),
        )
