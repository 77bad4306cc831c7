"""Test rig for the command line: example files, the result of a command, and its JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLUSTER = str(Path(__file__).resolve().parents[2] / "examples" / "small.yaml")
EXAMPLES = Path(CLUSTER).parent


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Kvroute = Callable[..., Ended]


def document(ended: Ended) -> Any:
    """Return stdout, which must be one JSON document without NaN."""
    assert ended.code == 0, ended.err

    def never(text: str) -> None:
        raise AssertionError(f"{text} in JSON")

    return json.loads(ended.out, parse_constant=never)
