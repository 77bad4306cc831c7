"""`run-worker`: waits for the topology labels of a pod, then becomes the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvroute_engine.command.output import tell
from kvroute_engine.errors import InputError
from kvroute_engine.topology_labels import MissingTopology, TopologyWorkerSpec, engine_environment, wait_for_labels

ABOUT = """Wait for the topology labels of this pod, then become the engine.

Reads the files of a Downward API volume. If the level in KVROUTE_KV_TRANSFER_TOPOLOGY_LEVEL has no value within
KVROUTE_TOPOLOGY_WAIT_S (30) seconds, the engine is not started. It does nothing unless KVROUTE_TOPOLOGY_ENABLED is
true. The names of Dynamo (DYN_TOPOLOGY_ENABLED, ...) work as well.

Exit code: that of the engine; 1 the level has no value, 2 a variable is wrong, 127 the engine cannot be started."""


def run_worker(command: Sequence[str], *, wait: bool, name: str) -> int:
    """Wait for the labels; then replace this process by the engine, so that it gets the pod's signals itself.

    Args:
        command: the engine and its options; empty with `wait`.
        wait: only wait, and start nothing.
        name: the command that the user has given, for messages.

    Returns:
        The exit code, if the engine is not started.

    Raises:
        InputError: the arguments or a variable are wrong.
    """
    if bool(command) == wait:
        raise InputError("give either a command or --wait", where=name, hint="put it after `--`")
    settings = TopologyWorkerSpec.read(os.environ)
    try:
        labels = wait_for_labels(settings)
    except MissingTopology as missing:
        tell([f"kvroute: {missing}"])
        return 1
    except OSError as error:
        raise InputError(
            error.strerror or str(error), where=str(settings.folder), hint="mount a Downward API volume there"
        ) from None
    if not command:
        return 0
    try:
        os.execvpe(command[0], list(command), engine_environment(os.environ, labels))
    except (OSError, ValueError) as error:  # ValueError: the name is empty
        why = error.strerror if isinstance(error, OSError) else "it has no name"
        tell([f"kvroute: {command[0]!r} cannot be started ({why}); check the command after `--`"])
        return 127
