"""Starts `vllm serve` as forks of one process that has imported vLLM already.

A server has three processes, and each process imports vLLM. On a machine with two cores the imports take longer than
the tests themselves. This program runs in vLLM's environment, with `OMP_NUM_THREADS` set. It reads one JSON object per
line from standard input: `argv` (of `vllm`), `env`, `cwd`, `log` (output is appended to this file), `cores` (it runs
on these) and `fresh` (true: the server imports vLLM itself). It answers with a line that has the process ID of the
server, which leads a session and a process group of its own. When standard input ends, it kills the servers that still
run, and ends.

vLLM on a CPU starts its processes by `multiprocessing`'s method `spawn`. Here the method `forkserver` takes its place:
each server has a fork server of its own, which is a fork too, so that all processes of a server are in its group.
"""

from __future__ import annotations

import json
import multiprocessing.context
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any

MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


def main() -> None:
    """Fork a server per line."""
    for name in MODULES:
        import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"an import has started {len(threads) - 1} threads, which a fork would lose"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets servers that ended
    say("ready")
    handles: dict[int, int] = {}
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            serve(**json.loads(line))
        handles[pid] = os.pidfd_open(pid)
        say(str(pid))
    for pid, handle in handles.items():
        if not select.select([handle], [], [], 0)[0]:  # it still runs: the tests were killed
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            with suppress(ProcessLookupError):  # no other process has joined its group
                os.killpg(pid, signal.SIGKILL)


def say(answer: str) -> None:
    """Answer with one line."""
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def serve(argv: list[str], env: dict[str, str], cwd: str, log: str, *, cores: list[int], fresh: bool) -> None:
    """Become a server; does not return."""
    os.setsid()
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)
    os.chdir(cwd)
    if fresh:
        os.execve(sys.executable, [sys.executable, str(Path(sys.executable).with_name("vllm")), *argv], env)
    take_environment(env)
    fork_instead_of_spawn()
    sys.argv = ["vllm", *argv]
    code = 1
    try:
        sys.modules["vllm.entrypoints.cli.main"].main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def take_environment(env: dict[str, str]) -> None:
    """Replace the environment, and with it the folders of PYTHONPATH."""
    for old in os.environ.keys() - env.keys():
        del os.environ[old]
    os.environ.update(env)
    for folder in reversed(env.get("PYTHONPATH", "").split(":")):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)


def fork_instead_of_spawn() -> None:
    """Let this process and all that it starts use a fork server that is forked here."""
    server: Any = forkserver._forkserver
    server.ensure_running = forkserver.ensure_running = lambda: None
    contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]

    prepared, prepare = spawn.get_preparation_data, spawn.prepare

    def with_environment(name: str) -> dict[str, Any]:
        """As `spawn` does, a child gets the environment that its parent has now."""
        return {**prepared(name), "environ": dict(os.environ)}

    def from_environment(data: Mapping[str, Any]) -> None:
        take_environment(data["environ"])
        prepare(dict(data))

    spawn.get_preparation_data, spawn.prepare = with_environment, from_environment

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address := f"\0kvroute-preloaded-{os.getpid()}")
    listener.listen()
    alive, held = os.pipe()
    if not os.fork():
        os.close(held)
        try:
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    listener.close()
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, held


if __name__ == "__main__":
    main()
