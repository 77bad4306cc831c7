"""docs/switching.md translates each option of the installed vllm-router and SGLang gateway, and no other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from bench.measurement import Failed
from bench.peers.environment import programs
from tests.live.services import missing

pytestmark = pytest.mark.live
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "switching.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("product", "command"), [("vllm-router", ["vllm-router"]), ("the SGLang gateway", ["smg", "launch"])]
)
def test_each_option_of_the_peer_has_a_row(product: str, command: list[str]) -> None:
    try:
        folder = programs("routers")
    except Failed as error:
        missing(str(error))
    out = subprocess.run([folder / command[0], *command[1:], "--help"], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    options = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", out.stdout, re.MULTILINE)) - {"--help"}
    [table] = re.findall(rf"^\| Option of {product} \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    named = {option for row in table.splitlines() for option in re.findall(r"`(--[\w-]+)`", row.split("|")[1])}
    assert len(options) > 50
    assert named == options
