"""Data-parallel ranks of an engine in a pod: how many share one port, and the first of them in the whole engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.kube.api.command_line import EngineCommand
from kvroute.kube.api.objects import KubePod
from kvroute.kube.discovery.labels import DP, DP_ALIAS, DP_START_ALIAS, PORT, WORKER_INDEX
from kvroute.types import TRAITS, InputError, KvProtocol

ARGS = "spec.containers[].args"
_APART = ("--data-parallel-rank", "--data-parallel-external-lb", "--data-parallel-multi-port-external-lb")
"""Options with which each rank has a server of its own."""
_START = ("--data-parallel-rank", "--data-parallel-start-rank")
_HYBRID = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank")
"""Options with which a server has the ranks of its node."""
_RANKS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks of one pod."""

    count: int = 1
    """Ranks behind each port; requests select one by a header if there are several."""
    first: int = 0
    """Number of the first one in the whole engine, which vLLM adds to the ports of KV events."""


def ranks_of(
    pod: KubePod, command: EngineCommand | None, protocol: KvProtocol, ports: int, warnings: list[InputError]
) -> Ranks:
    """Return the ranks of a pod.

    Args:
        pod: the pod.
        command: the engine's command line; None: not known.
        protocol: KV protocol of the engine.
        ports: number of HTTP ports of the pod; several are a server for each rank.
        warnings: gets a warning if ranks share a port that the gateway cannot tell apart.

    Raises:
        InputError: the label is no number of ranks.
    """
    if ports > 1:
        return Ranks()
    own, where = pod.value(DP), DP
    if not own:
        own, where = pod.labels.get(DP_ALIAS, ""), DP_ALIAS
    started, why = _started(command)
    count = _number(own, where) if own else started
    if count > 1 and not TRAITS[protocol].rank_header:
        count, why = 1, f"{count} data-parallel ranks share one port, and {protocol} engines take no rank from a header"
    if why:
        hint = f"give each rank a port of its own and list them with {PORT}"
        warnings.append(InputError(f"{why}, so the gateway sees them as one engine", where=ARGS, hint=hint))
    return Ranks(count, _first(pod, command, count))


def serves_its_ranks(command: EngineCommand | None) -> bool:
    """Return whether a server answers for the ranks of its own pod, so that every pod of the engine has one."""
    return command is not None and command.has(*_HYBRID) and not command.has("--headless")


def _first(pod: KubePod, command: EngineCommand | None, count: int) -> int:
    """Return the number of the pod's first rank in the whole engine. Scripts compute it from the index of the pod in
    its group; pods of one engine have equal numbers of ranks then."""
    labelled = pod.labels.get(DP_START_ALIAS, "")
    if labelled:
        return _number(labelled, DP_START_ALIAS, least=0)
    if command is None or not command.has(*_START):
        return 0
    given = command.number(*_START)
    if given is not None:
        return given
    index = pod.labels.get(WORKER_INDEX, "0")
    return int(index) * count if index.isascii() and index.isdecimal() and len(index) <= 4 else 0


def _started(command: EngineCommand | None) -> tuple[int, str]:
    """Return the ranks behind the port by the command line, and why several of them cannot be told apart."""
    if command is None or command.has(*_APART):
        return 1, ""
    size = command.number("--data-parallel-size", "--dp-size", "--dp") or 1
    local = command.number("--data-parallel-size-local") or size
    if size > local and not command.has(*_HYBRID):
        return 1, f"the {size} data-parallel ranks of one port run in several pods"
    return min(local, _RANKS_MAX), ""


def _number(text: str, where: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text[:6]) <= _RANKS_MAX):
        what = f"{text!r} is not a number of data-parallel ranks"
        raise InputError(what, where=where, hint=f"give a number from {least} to {_RANKS_MAX}")
    return int(text)
