"""The dashboard's table of a decision: each term of the default policy has a name and a colour of its own."""

from __future__ import annotations

import re
from importlib.resources import files

from kvroute.policies.foresight.aggregated import PARTS

PANELS = files("kvroute.serve.observe").joinpath("dashboard/panels.js").read_text(encoding="utf-8")
SAID_BY_THEIR_NAMES = {"prefill_s", "transfer_s"}


def test_every_time_of_the_default_policy_has_a_name() -> None:
    labels = re.findall(r"(\w+): \"", PANELS.split("const TERM_LABELS = {")[1].split("}")[0])
    times = {name for name in PARTS if name.endswith("_s")}
    assert times - SAID_BY_THEIR_NAMES - set(labels) == set()


def test_colours_are_distinct_and_enough_for_its_times() -> None:
    colours = re.findall(r"#[0-9a-f]{6}", PANELS.split("const TERM_COLOURS = [")[1].split("]")[0])
    times = [name for name in PARTS if name.endswith("_s")]
    assert len(set(colours)) == len(colours) >= len(times)
