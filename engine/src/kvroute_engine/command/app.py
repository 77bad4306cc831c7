"""`kvroute-engine`: joins the commands, and reports wrong input as one sentence on stderr with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvroute_engine import __version__
from kvroute_engine.command.agent import AGENT
from kvroute_engine.command.buffer import BUFFER
from kvroute_engine.command.options import CommandSpec, parser_of
from kvroute_engine.command.output import tell
from kvroute_engine.command.run_worker import ABOUT, run_worker
from kvroute_engine.command.switch import SWITCH
from kvroute_engine.errors import InputError

NAME = "kvroute-engine"
COMMANDS = (
    AGENT,
    BUFFER,
    SWITCH,
    CommandSpec("run-worker", ABOUT, (), lambda: None, f"{NAME} run-worker -- vllm serve my-model"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line, without the program; default: those of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(NAME, COMMANDS, __version__)
    try:
        if words[:1] == ["run-worker"] and words[1:2] not in (["--help"], ["-h"]):
            return _run_worker(words[1:])
        values = vars(parser.parse_args(words))
        values.pop("command").run(**values)
    except InputError as error:
        tell([f"{NAME}: {error}"])
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run_worker(words: list[str]) -> int:
    """Run `run-worker [--wait] [--] COMMAND...`; all from the first word that is no option belongs to the engine."""
    part = argparse.ArgumentParser(add_help=False)
    part.add_argument("--wait", action="store_true")
    part.add_argument("command", nargs=argparse.REMAINDER)
    given = part.parse_args(words)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    return run_worker(command, wait=given.wait, name=f"{NAME} run-worker")


if __name__ == "__main__":
    sys.exit(main())
