"""The file that KVROUTE_ALL_REDUCE names: servers of the ranks, the switch, and the scheme for each size of tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvroute_engine.all_reduce import VARIABLE
from kvroute_engine.all_reduce.channel import own_host
from kvroute_engine.all_reduce.rules import HIERARCHICAL, SWITCHED, GroupRules, LiveScheme, Rule
from kvroute_engine.files.document import read_mapping_file
from kvroute_engine.files.form import Lines
from kvroute_engine.files.units import Duration, Size

_BEGIN = "begin with `schemes: [{scheme: ring}]`"
_Port = Annotated[str, msgspec.Meta(pattern=r"^.+:\d{1,5}\Z")]


class SizeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheme of tensors up to a size."""

    scheme: LiveScheme
    up_to: Size | None = None
    """Largest tensor to which the rule applies; none: any."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one tensor-parallel group reduces its tensors; the same file on all ranks."""

    schemes: tuple[SizeRule, ...] = (SizeRule("ring"),)
    """The first rule that fits a tensor applies; a ring if none does."""
    ranks_per_server: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    """Number of ranks on each server, in the order of the ranks. Hierarchical schemes need it."""
    switch: _Port | None = None
    """`host:port` of `kvroute switch`."""
    job: Annotated[int, msgspec.Meta(ge=0, lt=2**24)] = 1
    """Number of this group at the switch; every group has another one."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=0xFFFF)] = 128
    """Slots of the switch that the group reserves, for each rank of a server with `hierarchical-ina`."""
    timeout: Duration = Duration(2.0)
    """Silence of the switch after which the group falls back to a ring, while all ranks are waiting for it."""
    host: str = ""
    """Address of this rank at which the other ranks reach it; empty: that of its path to the switch, or that of its
    process group."""
    agent: str = ""
    """Folder of the server's agent, which has the scheduler's table; empty: only the rules of `schemes`."""
    group: str = ""
    """Name of this group in the scheduler's cluster file."""
    also: tuple[LiveScheme, ...] = ()
    """Schemes that the scheduler's table may use beside those of `schemes`."""
    rejoin: Duration = Duration(10.0)
    """Least time between a fallback and the return to the switch; with `agent` only."""
    metrics: str = ""
    """File for counters in Prometheus' text format, for node_exporter's textfile collector; `{rank}` is replaced."""

    @property
    def rules(self) -> GroupRules:
        """The rules of `schemes`."""
        whole = ((rule.scheme, rule.up_to) for rule in self.schemes)
        return GroupRules(tuple(Rule(scheme, None if up_to is None else int(up_to)) for scheme, up_to in whole))

    @property
    def prepared(self) -> frozenset[LiveScheme]:
        """Schemes that the group can use."""
        return frozenset({"ring", *self.also, *(rule.scheme for rule in self.schemes)})

    @property
    def switch_address(self) -> tuple[str, int]:
        """Host and port of the switch."""
        assert self.switch is not None, "only schemes that need a switch ask for it"
        host, _, port = self.switch.rpartition(":")
        return host, int(port)


def read_settings(path: Path, ranks: int) -> Settings:
    """Read and check the settings of a group of `ranks` ranks.

    Raises:
        InputError: the file cannot be read, or its values contradict each other or the group.
    """
    settings, lines = read_mapping_file(path, Settings, _BEGIN)
    _check(settings, lines, ranks)
    return settings


def settings_path() -> Path | None:
    """Return the file that KVROUTE_ALL_REDUCE names; None if it is not set."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def settings_from_environment(ranks: int) -> Settings | None:
    """Return the settings of the file that KVROUTE_ALL_REDUCE names; None if it is not set.

    Raises:
        InputError: see `read_settings`.
    """
    path = settings_path()
    return None if path is None else read_settings(path, ranks)


def _check(settings: Settings, lines: Lines, ranks: int) -> None:
    used, place = settings.prepared, ("also" if settings.also else "schemes",)
    if bool(settings.agent) != bool(settings.group):
        given, absent = ("agent", "group") if settings.agent else ("group", "agent")
        hint = "add both `agent: /run/kvroute` and `group: NAME`, or neither"
        raise lines.error(f"`{given}` needs `{absent}`", (given,), hint=hint)
    if settings.also and not settings.agent:
        raise lines.error("`also` needs `agent`", ("also",), hint="add `agent` and `group`, or use `schemes`")
    if used & SWITCHED and settings.switch is None:
        scheme = min(used & SWITCHED)
        raise lines.error(f"the scheme {scheme} needs a switch", place, hint="add `switch: HOST:PORT`")
    if settings.ranks_per_server and sum(settings.ranks_per_server) != ranks:
        what = f"{sum(settings.ranks_per_server)} ranks on servers, but the group has {ranks}"
        raise lines.error(what, ("ranks_per_server",), hint="list the ranks of each server of this group")
    if used & HIERARCHICAL and len(set(settings.ranks_per_server)) != 1:
        scheme, hint = min(used & HIERARCHICAL), "such as `ranks_per_server: [2, 2]`"
        raise lines.error(f"{scheme} needs servers with equally many ranks", ("ranks_per_server",), hint=hint)
    if settings.timeout <= 0:
        raise lines.error("a timeout of 0 s", ("timeout",), hint="give at least 100 ms")
    if settings.rejoin <= 0:
        raise lines.error("a return to the switch after 0 s", ("rejoin",), hint="give at least 100 ms")


def reachable(settings: Settings, otherwise: str) -> Settings:
    """Return the settings with the address at which other ranks reach this one: `host`, that of the path to the switch,
    or `otherwise`."""
    host = settings.host or (own_host(settings.switch_address) if settings.switch is not None else otherwise)
    return msgspec.structs.replace(settings, host=host)


def local_ranks(ranks_per_server: Sequence[int], rank: int) -> tuple[range, range]:
    """Return the ranks of the server of `rank`, and the ranks at its position on all servers.

    All servers have equally many ranks.
    """
    per_server, ranks = ranks_per_server[0], sum(ranks_per_server)
    first = rank // per_server * per_server
    return range(first, first + per_server), range(rank % per_server, ranks, per_server)
