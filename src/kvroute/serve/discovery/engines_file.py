"""A YAML or JSON file that lists engines, followed while it changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, field

from kvroute.serve.discovery.inotify import DirectoryWatch
from kvroute.serve.observe.logs import log_event
from kvroute.topology.reading.data_parallel import discovered_ranks
from kvroute.topology.schema import Count, Entry, Name, Ranks, ZmqEndpoint
from kvroute.types import Discovered, Endpoint, InputError, InputErrors, KvProtocol, Place, Reporter, Role
from kvroute_engine.files.document import read_list
from kvroute_engine.files.units import read_quantity

POLL_S = 1.0
"""Interval at which the file is checked if the kernel reports no change, as on some network file systems."""
_BEGIN = "begin with `- {name: prefill0, role: prefill, url: http://HOST:PORT}`"
_UNREADABLE_SHOWN = 3


class EngineEntry(Entry, frozen=True, kw_only=True):
    """One engine of the file."""

    name: Name
    uid: str = ""
    """Different for each engine that ever had the name; needed only if all other fields stay the same."""
    role: Role
    url: Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+\Z", examples=["http://10.0.0.1:8000"])]
    protocol: KvProtocol = "vllm"
    bootstrap: str = ""
    kv_events: ZmqEndpoint = ""
    kv_replay: ZmqEndpoint = ""
    node: Name | None = None
    """None: the host of `url`."""
    rack: Name | None = None
    pod: Name | None = None
    datacenter: Name | None = None
    model: str = ""
    tp: Count | None = None
    pp: Count | None = None
    dp: Ranks | None = None
    """Data-parallel ranks behind the URL; each becomes an instance `NAME_dpR`."""
    timing: Name | None = field(default=None)
    ready: bool = True
    """Whether it takes requests."""

    def discovered(self) -> list[Discovered]:
        """Return the same as an engine, or as each of its data-parallel ranks."""
        whole = Discovered(
            name=self.name,
            uid=self.uid,
            role=self.role,
            endpoint=Endpoint(
                url=self.url.rstrip("/"),
                protocol=self.protocol,
                bootstrap=self.bootstrap,
                kv_events=self.kv_events,
                kv_replay=self.kv_replay,
            ),
            place=Place(
                node=self.node or _host(self.url),
                rack=self.rack or "",
                pod=self.pod or "",
                datacenter=self.datacenter or "",
            ),
            model=self.model,
            tp=self.tp,
            pp=self.pp,
            timing=self.timing or "",
            ready=self.ready,
        )
        return discovered_ranks(whole, self.dp or 1)


def _host(url: str) -> str:
    """Return the host of a URL as the name of a node."""
    return (urlsplit(url).hostname or "").replace(":", "-").strip("-")


def read_engines(text: str, source: str) -> tuple[Discovered, ...]:
    """Return the engines of a file's text, ascending by name.

    Raises:
        InputErrors: every fault, each with its line and field.
    """
    entries = _quickly(text)
    if entries is None:
        entries, lines = read_list(text, source, EngineEntry, _BEGIN)
    else:
        lines = None
    first: dict[str, int] = {}
    faults: list[InputError] = []
    for number, entry in enumerate(entries):
        if first.setdefault(entry.name, number) != number:
            lines = lines or read_list(text, source, EngineEntry, _BEGIN)[1]
            hint = f"entry {first[entry.name] + 1} has it, too"
            faults.append(lines.error(f"the name {entry.name!r} is used twice", (number, "name"), hint))
    if faults:
        raise InputErrors(faults)
    return tuple(sorted((rank for entry in entries for rank in entry.discovered()), key=lambda engine: engine.name))


def _quickly(text: str) -> Sequence[EngineEntry] | None:
    """Return the entries of a JSON text, which is read much faster than YAML; None if it is not valid JSON."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return msgspec.json.decode(text, type=list[EngineEntry], dec_hook=read_quantity)
    except msgspec.DecodeError:
        return None


class EnginesFile:
    """The source `discovery.file`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._failure = ""
        """The fault of the file that was logged last; empty: none."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the file cannot be read, if it cannot."""
        return (self._failure,) if self._failure else ()

    @property
    def findings(self) -> dict[str, int]:
        """None: an entry is an engine, or the file is invalid."""
        return {}

    async def run(self, report: Reporter) -> None:
        """See `DiscoverySource`. A file that is missing or invalid reports nothing: the engines of the last valid one
        stay."""
        changed = asyncio.Event()
        with DirectoryWatch(changed.set) as watch:
            while True:
                changed.clear()
                watch.follow({self._path.parent, self._path.resolve().parent})
                await self._read(report)
                await _within(changed, POLL_S)

    async def _read(self, report: Reporter) -> None:
        """Read the file if it is another one or has another content than before."""
        try:
            status = os.stat(self._path)
            seen = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
            if seen == self._seen:
                return
            engines = await asyncio.to_thread(self._engines)
        except InputErrors as errors:
            self._seen = seen
            rest = f" (and {len(errors.problems) - 1} more errors)" if len(errors.problems) > 1 else ""
            self._fault(f"{errors.problems[0]}{rest}")
        except OSError as error:
            self._seen = None
            self._fault(f"{self._path}: cannot be read ({error.strerror})")
        except UnicodeDecodeError:
            self._seen = seen
            self._fault(f"{self._path}: is not UTF-8 text")
        else:
            self._seen, self._failure = seen, ""
            report(engines)

    def _engines(self) -> tuple[Discovered, ...]:
        return read_engines(self._path.read_text(encoding="utf-8"), str(self._path))

    def _fault(self, why: str) -> None:
        if why != self._failure:
            self._failure = why
            log_event("error", "engines_file_invalid", file=str(self._path), reason=why)


async def _within(changed: asyncio.Event, seconds: float) -> None:
    """Wait until the event or until the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        pass
