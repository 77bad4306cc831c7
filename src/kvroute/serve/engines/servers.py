"""Which instances are data-parallel ranks of one server: health checks and metrics pages are those of the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvroute.types import Instance


class Servers:
    """The servers of a cluster and their instances: one, or one for each data-parallel rank."""

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._ranks: dict[str, dict[str, int]] = {}
        """Rank of each instance, by server; ascending by rank."""
        self._of: dict[str, str] = {}
        for instance in instances:
            self.add(instance.name, instance.server, instance.rank)

    @classmethod
    def without_ranks(cls, names: Iterable[str]) -> Servers:
        """Return the servers of instances without data-parallel ranks."""
        servers = cls()
        for name in names:
            servers.add(name, name)
        return servers

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the servers."""
        return iter(self._ranks)

    def __contains__(self, name: str) -> bool:
        """Return whether an instance of this name is known."""
        return name in self._of

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all instances."""
        return tuple(self._of)

    def add(self, name: str, server: str, rank: int = 0) -> bool:
        """Add an instance; return whether it is the first one of its server."""
        ranks = {**self._ranks.get(server, {}), name: rank}
        self._ranks[server] = dict(sorted(ranks.items(), key=lambda entry: (entry[1], entry[0])))
        self._of[name] = server
        return len(ranks) == 1

    def remove(self, name: str) -> bool:
        """Remove an instance; return whether its server has no other one."""
        server = self._of.pop(name)
        del self._ranks[server][name]
        if self._ranks[server]:
            return False
        del self._ranks[server]
        return True

    def of(self, name: str) -> str:
        """Return the server of an instance."""
        return self._of[name]

    def instances(self, server: str) -> Mapping[str, int]:
        """Return the rank of each instance of a server, ascending; empty for an unknown one."""
        return self._ranks.get(server, {})
