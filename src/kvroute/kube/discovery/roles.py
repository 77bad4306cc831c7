"""What an engine is: its container, role, model and number of shards, from labels and from its command line."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, cast, get_args

from kvroute.kube.api.command_line import EngineCommand, engine_command
from kvroute.kube.api.objects import Container, KubePod
from kvroute.kube.discovery.data_parallel import serves_its_ranks
from kvroute.kube.discovery.labels import (
    CONTAINER,
    MODEL,
    MODEL_ALIASES,
    NOT_AN_ENGINE,
    PORT,
    PP,
    ROLE,
    ROLE_ALIASES,
    TP,
    WORKER_INDEX,
)
from kvroute.types import InputError, Role

ARGS = "spec.containers[].args"
_KV_ROLES: dict[object, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_SHARD_OPTIONS = {
    "vllm": (("--tensor-parallel-size",), ("--pipeline-parallel-size",)),
    "sglang": (("--tp-size", "--tp", "--tensor-parallel-size"), ("--pp-size", "--pipeline-parallel-size")),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A pod and its container that runs the engine."""

    pod: KubePod
    container: Container
    command: EngineCommand | None
    """None: the container's command line is not that of a known engine."""
    ports: tuple[int, ...] = ()
    """Ports that the pod's InferencePool gives, each of which serves HTTP; empty: the pod is not read for a pool."""

    def named(self, key: str) -> str:
        """Return kvroute's label or annotation with this key; empty if there is none."""
        return self.pod.value(key)


def source_of(pod: KubePod) -> Source:
    """Return the container that a label names, else the first one that starts a known engine, else the first one.

    Raises:
        InputError: a label names a container that does not exist.
    """
    wanted = pod.value(CONTAINER)
    if wanted:
        for container in pod.containers:
            if container.name == wanted:
                return Source(pod, container, engine_command(container))
        known = ", ".join(container.name for container in pod.containers)
        raise InputError(f"the pod has no container {wanted!r}", where=CONTAINER, hint=f"its containers: {known}")
    for container in pod.containers:
        command = engine_command(container)
        if command is not None:
            return Source(pod, container, command)
    return Source(pod, pod.containers[0] if pod.containers else Container(), None)


def role_of(source: Source, selected: bool, warnings: list[InputError]) -> Role | None:
    """Return the role of the engine; None if the pod is no engine, or another pod answers for it.

    Args:
        selected: whether the user has selected the pod; then it is an error if nothing tells what it is.
        warnings: gets a warning if labels and command line contradict each other.

    Raises:
        InputError: the label is wrong, or the role is not known. A member of an InferencePool serves whole requests if
            nothing says otherwise.
    """
    if _follows(source):
        return None
    labelled = _labelled(source.pod)
    command = source.command
    if labelled == NOT_AN_ENGINE:
        return None
    if command is not None and command.kind == "dynamo" and not (source.named(PORT) or source.ports):
        what = "the container runs a Dynamo worker, which has no HTTP server"
        raise InputError(what, where=ARGS, hint=f"run `vllm serve` or SGLang, or give the port of one with {PORT}")
    started, known = _started(command)
    if labelled is not None:
        if known and started != labelled and {started, labelled} == {"prefill", "decode"}:
            what = f"the engine is started for {started}, and a label says {labelled}"
            warnings.append(InputError(what, where=ARGS, hint=f"change --kv-transfer-config or {ROLE}"))
        return labelled
    if command is None and not selected:
        return None
    if not known and not source.ports:
        what = "no label gives the role, and the command line leaves it open"
        raise InputError(what, where=ROLE, hint=f"add the label {ROLE}: prefill, decode, both or none")
    return started


def _follows(source: Source) -> bool:
    """Return whether the pod is a part of a multi-node engine whose leader is another pod."""
    command = source.command
    if source.pod.labels.get(WORKER_INDEX, "0") != "0" and not serves_its_ranks(command):
        return True
    return command is not None and (command.has("--headless") or (command.number("--node-rank") or 0) > 0)


def _labelled(pod: KubePod) -> Role | Literal["none"] | None:
    own = pod.value(ROLE)
    if own:
        if own != NOT_AN_ENGINE and own not in get_args(Role):
            near = get_close_matches(own, get_args(Role), 1)
            hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(get_args(Role))}, none"
            raise InputError(f"unknown role {own!r}", where=ROLE, hint=hint)
        return cast(Role | Literal["none"], own)
    for key, roles in ROLE_ALIASES.items():
        found = roles.get(pod.labels.get(key, ""))
        if found is not None:
            return found
    return None


def _started(command: EngineCommand | None) -> tuple[Role, bool]:
    """Return the role by the command line, and whether the command line tells it."""
    if command is None or command.kind == "dynamo":
        return "both", False
    if command.kind == "sglang":
        mode = command.first("--disaggregation-mode")
        return (
            (cast(Role, mode), True) if mode in ("prefill", "decode") else ("both", "--config" not in command.options)
        )
    transfer = command.mapping("--kv-transfer-config")
    if transfer is None:
        return "both", not command.has("--kv-transfer-config", "--config")
    role = _KV_ROLES.get(transfer.get("kv_role"))
    return (role, True) if role else ("both", False)


def model_of(source: Source) -> str:
    """Return the name that clients use for the model; empty if nothing tells it."""
    own = source.named(MODEL)
    if own:
        return own
    command = source.command
    if command is not None:
        started = command.first("--served-model-name") or command.model or command.first("--model", "--model-path")
        if started:
            return started
    return next(
        (name for key in MODEL_ALIASES if (name := source.pod.annotations.get(key) or source.pod.labels.get(key))), ""
    )


def shards_of(source: Source) -> tuple[int | None, int | None]:
    """Return the degrees of tensor and pipeline parallelism; None for one that is not known.

    Raises:
        InputError: a label is no number above 0.
    """
    options = _SHARD_OPTIONS.get(source.command.kind) if source.command else None
    tensor, pipeline = options or ((), ())
    return _shards(source, TP, tensor), _shards(source, PP, pipeline)


def _shards(source: Source, key: str, names: tuple[str, ...]) -> int | None:
    own = source.named(key)
    if own:
        if not (own.isascii() and own.isdecimal() and 0 < int(own[:6]) <= 4096):
            raise InputError(f"{own!r} is not a number of shards", where=key, hint="give a number from 1 to 4096")
        return int(own)
    command = source.command
    if command is None or not names:
        return None
    if command.has(*names):
        return command.number(*names) or None
    return None if command.has("--config") else 1
