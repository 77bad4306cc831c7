"""`kvroute trace`: one JSON document, a file that reads back equal, errors that name the wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.cli.trace.command import app
from kvroute.sim.workload import read
from kvroute.types import InputError


def run(*arguments: str | Path) -> tuple[str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_a_generated_profile_has_its_number_rate_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "rag.jsonl.zst"
    options = ("--requests", "400", "--rate", "6", "--seed", "5", "--profile", "rag")
    document, remark = run("generate", path, *options, "--json")
    statistics = json.loads(document)
    assert (statistics["requests"], statistics["rate_per_s"]) == (400, pytest.approx(6))
    assert 4_096 <= statistics["input_tokens"]["min"] <= statistics["input_tokens"]["max"] <= 65_536
    assert "wrote 400 requests" in remark
    first = path.read_bytes()
    run("generate", path, *options)
    assert path.read_bytes() == first
    shown = json.loads(run("show", path, "--json")[0])
    assert {**shown, "name": ""} == {**statistics, "name": ""}


def test_show_prints_the_main_statistics() -> None:
    text, remark = run("show", "--generate", "--requests", "300")
    assert remark == ""
    for phrase in ("prompt", "answer", "p99", "300 in", "per second", "requests reuse one or more"):
        assert phrase in " ".join(text.split()), phrase


def test_show_applies_the_shaping_options(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run("generate", path, "--requests", "300")
    options = ("--requests", "200", "--rate", "9", "--profile", "chatbot", "--p-share", "1", "--json")
    statistics = json.loads(run("show", path, *options)[0])
    assert (statistics["requests"], statistics["rate_per_s"], statistics["block_tokens"]) == (
        min(200, sum(request.input_tokens <= 8_192 for request in read(path).requests)),
        pytest.approx(9),
        16,
    )
    assert statistics["reusing_request_share"] > 0.5


def test_skipped_lines_are_reported_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run("generate", path, "--requests", "30")
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(InputError, match=r"a\.jsonl:31"):
        run("show", path)
    document, remark = run("show", path, "--skip-bad", "--json")
    assert json.loads(document)["requests"] == 30
    assert "a.jsonl:31" in remark
    assert "1 invalid line skipped" in remark


def test_exactly_one_source_and_a_known_profile_are_required() -> None:
    with pytest.raises(InputError, match="either"):
        run("show")
    with pytest.raises(InputError, match="either"):
        run("show", "a.jsonl", "--generate")
    with pytest.raises(InputError, match="no profile 'rags'"):
        run("show", "--generate", "--profile", "rags")
    for rate in ("0", "1e300"):
        wrong = CliRunner().invoke(app, ["show", "--generate", "--rate", rate])
        assert (wrong.exit_code, "--rate" in wrong.output) == (2, True)


def test_simultaneous_requests_may_be_given_a_rate(tmp_path: Path) -> None:
    """The first five requests of a generated trace arrive together: there is one remark and no error."""
    path = tmp_path / "a.jsonl"
    for arguments in (("generate", path), ("show", "--generate"), ("show", path)):
        _, remark = run(*arguments, "--requests", "5", "--rate", "2")
        assert remark.count("all 5 requests arrive at the same time, so the rate has no effect") == 1
    assert len(read(path).requests) == 5
