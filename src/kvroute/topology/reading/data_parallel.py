"""Data-parallel ranks: an engine of several ranks as one instance for each rank, and the checks of such instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvroute.topology.place import gpu_list, gpu_text
from kvroute.topology.schema import EndpointEntry, InstanceDefaults, InstanceEntry
from kvroute.types import TRAITS, Discovered, Endpoint, InputError
from kvroute_engine.files.form import FileError, Key, Lines


def rank_name(engine: str, rank: int) -> str:
    """Return the name of the instance that is one rank of an engine; vLLM names its ranks in the same way."""
    return f"{engine}_dp{rank}"


def rank_entries(entry: InstanceEntry, defaults: InstanceDefaults) -> list[InstanceEntry]:
    """Return an instance for each rank of an entry with `dp`; the entry itself if it has one rank, or a fault that
    `placing.place` finds."""
    if entry.dp is None or entry.engine is not None or entry.rank is not None:
        return [entry]
    if entry.dp == 1:
        return [msgspec.structs.replace(entry, dp=None)]
    tp, pp = entry.tp or defaults.tp, entry.pp or defaults.pp
    try:
        gpus = gpu_list(entry.gpus)
    except InputError:
        return [entry]
    if len(gpus) != entry.dp * tp * pp:
        return [entry]
    per_rank = tp * pp
    return [
        msgspec.structs.replace(
            entry,
            name=rank_name(entry.name, rank),
            dp=None,
            engine=entry.name,
            rank=rank,
            gpus=gpu_text(gpus[rank * per_rank : (rank + 1) * per_rank]),
            endpoint=_of_rank(entry.endpoint, rank, tp),
        )
        for rank in range(entry.dp)
    ]


def endpoint_of_rank(endpoint: Endpoint, rank: int, tp: int) -> Endpoint:
    """Return the endpoint of a rank of the engine with this endpoint: the URL is the same.

    vLLM adds the rank to the ports of KV events. kvroute's connector has a port for each shard of each rank, one
    after the other; the bootstrap server of Mooncake serves all ranks.
    """
    step = 0 if TRAITS[endpoint.protocol].needs_bootstrap else tp
    return msgspec.structs.replace(
        endpoint,
        bootstrap=_raised(endpoint.bootstrap, rank * step),
        kv_events=_raised(endpoint.kv_events, rank),
        kv_replay=_raised(endpoint.kv_replay, rank),
    )


def discovered_ranks(engine: Discovered, ranks: int) -> list[Discovered]:
    """Return an engine for each data-parallel rank of a discovered one; the engine itself if it has one rank."""
    if ranks == 1:
        return [engine]
    tp = engine.tp or 1
    return [
        msgspec.structs.replace(
            engine,
            name=rank_name(engine.name, rank),
            engine=engine.name,
            rank=rank,
            endpoint=endpoint_of_rank(engine.endpoint, rank, tp),
        )
        for rank in range(ranks)
    ]


def _of_rank(entry: EndpointEntry | None, rank: int, tp: int) -> EndpointEntry | None:
    if entry is None:
        return None
    moved = endpoint_of_rank(entry.endpoint(), rank, tp)
    return msgspec.structs.replace(
        entry, bootstrap=moved.bootstrap, kv_events=moved.kv_events, kv_replay=moved.kv_replay
    )


def _raised(address: str, by: int) -> str:
    """Return an address with a higher port; one without a port stays as it is."""
    head, colon, port = address.rpartition(":")
    return f"{head}{colon}{int(port) + by}" if colon and port.isascii() and port.isdecimal() else address


def rank_faults(entries: Sequence[InstanceEntry], lines: Lines) -> Iterator[FileError]:
    """Yield the faults of the ranks of an expanded file: the engines that they name, their numbers and addresses."""
    engines: dict[str, dict[int, int]] = {}
    names = {entry.name for entry in entries}
    for index, entry in enumerate(entries):
        key: Key = ("instances", index)
        if entry.dp is not None:
            continue
        if entry.engine is None:
            if entry.rank is not None:
                yield lines.error("`rank` requires `engine`", (*key, "rank"), "add the name of the engine")
            continue
        if entry.engine in names:
            what = f"{entry.engine!r} is the name of an instance and of an engine"
            yield lines.error(what, (*key, "engine"), "give the engine another name")
        ranks = engines.setdefault(entry.engine, {})
        other = ranks.setdefault(entry.rank or 0, index)
        if other != index:
            what = f"{entries[other].name} is rank {entry.rank or 0} of {entry.engine}, too"
            yield lines.error(what, (*key, "rank"), "number the ranks of an engine from 0")
        yield from _endpoint_faults(entry, entries[next(iter(ranks.values()))], key, lines)
    for engine, ranks in engines.items():
        missing = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
        if missing < len(ranks):
            key = ("instances", next(iter(ranks.values())), "rank")
            what = f"{engine} has {len(ranks)} ranks, but none is rank {missing}"
            yield lines.error(what, key, "number the ranks of an engine from 0")


def _endpoint_faults(entry: InstanceEntry, first: InstanceEntry, key: Key, lines: Lines) -> Iterator[FileError]:
    endpoint, place = entry.endpoint, (*key, "endpoint")
    if endpoint is None:
        return
    if first.endpoint is not None and endpoint.url.rstrip("/") != first.endpoint.url.rstrip("/"):
        what = f"{entry.name} and {first.name} are ranks of one engine, but have different URLs"
        yield lines.error(what, (*place, "url"), "remove `engine` and `rank` if each rank is a server of its own")
    if not TRAITS[endpoint.protocol].rank_header:
        what = f"{endpoint.protocol} engines do not take the rank of a request from a header"
        yield lines.error(what, (*place, "protocol"), "start a server for each rank, and list each as an instance")
    for name in ("kv_events", "kv_replay"):
        if getattr(endpoint, name).startswith("ipc:"):
            what = f"the ranks of an engine cannot share {getattr(endpoint, name)}"
            yield lines.error(what, (*place, name), "use `tcp://HOST:PORT`: rank r publishes on the port plus r")
