"""`kvroute explain` on the comparison of a pair with instances that serve a request aggregated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog
from kvroute.serve.observe.decision_view import judgement_of
from kvroute.topology import parse
from kvroute.topology.drafts.draft import draft
from kvroute.types import Admitted, Arrived, Decode, Event, InstanceDown, Prefill, Request

TEXT = draft(
    "explained",
    ["http://p0:8000", "http://p1:8000"],
    [f"http://d{index}:8000" for index in range(3)],
    model="llama-3-70b",
)
DECODE = ("decode0", "decode1", "decode2")


def log_of(path: Path, spec: ControlSpec, asked: Request, only: tuple[str, ...] | None) -> Path:
    """Write a log in which each decode instance runs ten requests, decode2 is full of KV caches, and then `asked`
    arrives."""
    control = spec.build(parse(TEXT))
    number = 1
    events: list[Event] = []
    for name in DECODE:
        for _ in range(10):
            tokens = 12_000 if name == "decode2" else 1
            one = Request(id=number, input_tokens=tokens, max_output_tokens=10, one_leg=True)
            events += [Arrived(0.0, one, only=(name,)), Admitted(0.0, number)]
            number += 1
    events += [InstanceDown(0.0, "decode1"), Arrived(0.5, asked, only=only)]
    file = path / "run.log"
    with EventLog(file, LogHeader(cluster=TEXT, spec=spec)) as log:
        for event in events:
            log.write(event, control.handle(event))
    return file


def explained(file: Path, *options: str) -> str:
    ended = CliRunner().invoke(app, ["explain", str(file), "1000", *options], env={"COLUMNS": "240"})
    assert ended.exit_code == 0, ended.stderr
    return ended.stdout


def aggregated(file: Path) -> Any:
    return json.loads(explained(file, "--json"))["decisions"][0]["aggregated"]


ASKED = Request(id=1_000, input_tokens=3_000, max_output_tokens=10)


def test_a_pair_is_explained_with_the_instances_that_could_have_served_aggregated(tmp_path: Path) -> None:
    """Each with its price and the reason why it was excluded; the pair is the last one."""
    file = log_of(tmp_path, ControlSpec(parameters={"aggregated": 1}, overcommit=True), ASKED, None)
    found = aggregated(file)
    rows = {row["name"]: row for row in found["candidates"]}
    pair = found["candidates"][-1]["name"]
    assert list(rows) == [*DECODE, pair]
    assert {name: row["ruled_out"] for name, row in rows.items() if row["ruled_out"]} == {
        "decode1": "down",
        "decode2": "no room",
    }
    assert found["not_compared"] == {"prefill0": "role", "prefill1": "role"}
    assert rows["decode0"]["delay_s"] == pytest.approx(10 * 3_000 * 360e-6)
    assert rows[pair]["cost"] < rows["decode0"]["cost"]
    text = explained(file)
    assert "decode2 (no room)" in text
    assert "decode1 (down)" in text
    assert "Not compared as the only instance: prefill0 (role), prefill1 (role)." in text


def test_prefill_instances_and_decode_instances_are_explained_together(tmp_path: Path) -> None:
    found = aggregated(log_of(tmp_path, ControlSpec(overcommit=True), ASKED, ("prefill0", "decode0", "decode1")))
    assert [row["name"] for row in found["candidates"]][:5] == [*DECODE, "prefill0", "prefill1"]
    assert {row["name"]: row["ruled_out"] for row in found["candidates"] if row["ruled_out"]} == {
        "decode1": "down",
        "decode2": "not allowed",
        "prefill1": "not allowed",
    }
    assert found["not_compared"] == {}


@pytest.mark.parametrize(
    ("parameters", "request_", "reason"),
    [
        ({"aggregated": 0}, ASKED, "aggregated: 0"),
        ({}, Request(id=1_000, input_tokens=10, adapter="any"), "LoRA adapter"),
    ],
)
def test_without_a_comparison_the_reason_is_given(
    tmp_path: Path, parameters: dict[str, float], request_: Request, reason: str
) -> None:
    found = aggregated(log_of(tmp_path, ControlSpec(parameters=parameters, overcommit=True), request_, None))
    assert found["candidates"] == []
    assert found["not_compared"] == {
        name: "down" if name == "decode1" else reason for name in (*DECODE, "prefill0", "prefill1")
    }


def test_the_dashboard_shows_the_same_comparison() -> None:
    """A pair shows those that could have served it aggregated; an aggregated request has them as candidates."""
    control = ControlSpec(parameters={"aggregated": 1}).build(parse(TEXT))
    (decode,) = control.handle(Arrived(0.0, ASKED))
    assert isinstance(decode, Decode)
    shown = judgement_of(1, 0.0, "foresight-joint", decode)
    assert {candidate.name for candidate in shown.candidates} > set(DECODE)
    assert shown.aggregated == ()
    for number in range(150):
        one = Request(id=number, input_tokens=1, max_output_tokens=10, one_leg=True)
        control.handle(Arrived(0.0, one, only=(DECODE[number % 3],)))
    (prefill,) = control.handle(Arrived(0.0, Request(id=2_000, input_tokens=3_000, max_output_tokens=10)))
    assert isinstance(prefill, Prefill)
    shown = judgement_of(2, 0.0, "foresight-joint", prefill)
    assert prefill.aggregated is not None
    assert {candidate.name for candidate in shown.aggregated} == set(prefill.aggregated.names)
