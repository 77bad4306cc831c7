"""Numbers of instances that stay the same while instances join and leave and so change their indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Slots:
    """A slot for each instance of a cluster. What is stored by slot need not move when the cluster changes.

    The slot of an instance that has left is used again, the lowest first.
    """

    def __init__(self, instances: int) -> None:
        self.of: IntArray | None = None
        """Slot of each instance by its index, [n]; None: slot and index are equal."""
        self.count = instances
        """Number of slots that have ever been used."""
        self._instances = instances
        self._free: list[int] = []
        """Slots without an instance, the lowest last."""

    def slot(self, index: int) -> int:
        """Return the slot of one instance."""
        return index if self.of is None else int(self.of[index])

    def pair(self, source: int, target: int) -> tuple[int, int]:
        """Return the slots of two instances."""
        return (source, target) if self.of is None else (int(self.of[source]), int(self.of[target]))

    def slots(self, indices: IntArray) -> IntArray:
        """Return the slots of some instances."""
        return indices if self.of is None else self.of.take(indices)

    @property
    def indices(self) -> IntArray:
        """Index of the instance of each slot, [count]; -1: none."""
        of = np.arange(self._instances) if self.of is None else self.of
        indices = np.full(self.count, -1, dtype=np.int64)
        indices[of] = np.arange(len(of))
        return indices

    def change(self, before: IntArray) -> tuple[list[int], list[int]]:
        """Follow a change of the cluster.

        Args:
            before: earlier index of each instance, [n]; -1: it is new.

        Returns:
            the slots that instances have left, and those that new instances have got; a slot may be in both. The caller
            discards what it stores for the former.
        """
        old = np.arange(self._instances) if self.of is None else self.of
        of = np.where(before < 0, -1, old[before]) if len(old) else np.full(len(before), -1, dtype=np.int64)
        left = sorted(set(old.tolist()) - set(of.tolist()))
        self._free = sorted({*self._free, *left}, reverse=True)
        taken = []
        for index in np.flatnonzero(of < 0).tolist():
            if not self._free:
                self._free.append(self.count)
                self.count += 1
            of[index] = self._free.pop()
            taken.append(int(of[index]))
        self.of, self._instances = of.astype(np.int64), len(before)
        return left, taken
