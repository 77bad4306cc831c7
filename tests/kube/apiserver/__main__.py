"""Starts the API server as a process: `python -m tests.kube.apiserver --port 0 --ready FILE`."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path

from tests.kube.apiserver.access import ADMIN
from tests.kube.apiserver.requests import User
from tests.kube.apiserver.server import Server, Settings


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the command line; tokens are `TOKEN=USER[:GROUP,...]`."""
    tokens = {"admin": ADMIN}
    for text in arguments.token:
        token, _, rest = text.partition("=")
        user, _, groups = rest.partition(":")
        tokens[token] = User(user, groups=(*filter(None, groups.split(",")), "system:authenticated"))
    given = vars(arguments)
    names = ("host", "port", "journal", "certificate", "key", "cleanup_s", "controllers")
    return Settings(tokens=tokens, **{name: given[name] for name in names})


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; write the URL to the ready file first."""
    server = Server(settings(arguments))
    url = await server.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if arguments.ready is not None:
        partial = arguments.ready.with_suffix(".partial")
        partial.write_text(json.dumps({"url": url}), encoding="utf-8")
        partial.rename(arguments.ready)
    await stop.wait()
    await server.stop()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="tests.kube.apiserver", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--token", action="append", default=[], help="TOKEN=USER[:GROUP,...]; may be repeated")
    parser.add_argument("--journal", type=Path, help="file that keeps the objects over a restart")
    parser.add_argument("--certificate", type=Path, help="PEM file; the server speaks HTTPS")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--cleanup-s", type=float, default=0.0, help="seconds until a deleted definition is gone")
    parser.add_argument("--controllers", action="store_true", help="the controller of Deployments writes their status")
    parser.add_argument("--ready", type=Path, help="file that gets the URL as JSON once the server listens")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
