"""Reads the Dockerfile: its stages, each a list of instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword and the rest of its lines, joined."""

    keyword: str
    rest: str

    @property
    def arguments(self) -> list[str]:
        """The strings of the exec form, or the parts of the shell form without options."""
        start = self.rest.find("[")
        if start >= 0:
            return [str(argument) for argument in json.loads(self.rest[start:])]
        return [part for part in self.rest.split() if not part.startswith("--")]


def stages(path: Path = ROOT / "Dockerfile") -> list[list[Instruction]]:
    """Return the instructions of each stage, FROM first."""
    stages_read: list[list[Instruction]] = []
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in re.sub(r"\\\n *", "", "\n".join(lines)).splitlines():
        keyword, rest = line.split(maxsplit=1)
        if keyword == "FROM":
            stages_read.append([])
        stages_read[-1].append(Instruction(keyword, rest))
    return stages_read


def of(stage: list[Instruction], keyword: str) -> list[Instruction]:
    """Return the instructions with this keyword, in order."""
    return [instruction for instruction in stage if instruction.keyword == keyword]
