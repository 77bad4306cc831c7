"""`kvroute replay` and `kvroute explain`: a log replays bit for bit, and each deviation is found with its line."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
from tests.cli.cli_rig import CLUSTER, Kvroute, document

from kvroute.control.log import read_log
from kvroute.types import Decode, Terms


def test_a_log_replays_bit_for_bit(kvroute: Kvroute, log: Path) -> None:
    """19 requests have two decisions each, and one needs no decode."""
    output = document(kvroute("replay", str(log), "--json"))
    assert (output["decisions"], output["equal"], output["first_difference_line"]) == (39, True, None)
    assert output["events"] == len(log.read_bytes().splitlines()) - 1
    assert "bit for bit" in kvroute("replay", str(log)).out


def test_a_truncated_log_is_reported(kvroute: Kvroute, log: Path) -> None:
    """The complete lines are replayed; a complete log causes no warning, and an unknown request ID gives the range of
    IDs."""
    assert kvroute("replay", str(log)).err == ""
    wrong = kvroute("explain", str(log), "99999")
    assert (wrong.code, "the log has 20 requests, numbered from 0 to 19" in wrong.err) == (2, True)
    log.write_bytes(log.read_bytes()[:-40])
    ended = kvroute("replay", str(log))
    assert (ended.code, "bit for bit" in ended.out) == (0, True)
    assert "the last line is incomplete and was skipped" in ended.err


def test_a_skipped_line_is_reported_without_a_hint(kvroute: Kvroute, trace: str) -> None:
    """The place and the error of the line are printed once; without `--skip-bad` the message names this option."""
    Path(trace).write_text(Path(trace).read_text() + '{"timestamp": 1}\n')
    assert "skip invalid lines (--skip-bad)" in kvroute("trace", "show", trace).err
    ended = kvroute("trace", "show", trace, "--skip-bad")
    assert ended.code == 0
    assert "skipped: " in ended.err
    assert "--skip-bad" not in ended.err


def test_a_log_is_replayed_with_another_policy(kvroute: Kvroute, log: Path) -> None:
    """The recorded run is unchanged; the policy of the log itself makes equal decisions."""
    output = document(kvroute("replay", str(log), "--shadow", "round-robin", "--json"))
    assert output["equal"]
    assert output["shadow"]["policy"] == "round-robin"
    assert 0 < output["shadow"]["differ"] < output["shadow"]["decisions"] == 19
    printed = kvroute("replay", str(log), "--shadow", "round-robin").out
    assert f"differs from netkv in {output['shadow']['differ']} of 19 decode decisions" in " ".join(printed.split())
    assert "agrees with netkv in all 19" in " ".join(kvroute("replay", str(log), "--shadow", "netkv").out.split())
    wrong = kvroute("replay", str(log), "--shadow", "netkw")
    assert (wrong.code, wrong.out) == (2, "")
    assert "did you mean 'netkv'?" in wrong.err


def test_a_modified_decision_is_found_with_its_line(kvroute: Kvroute, log: Path) -> None:
    """One target is exchanged for the other: the exit code is 1, and the line is named."""
    lines = log.read_text().splitlines(keepends=True)
    number = next(index for index, line in enumerate(lines) if '"type":"decode"' in line)
    other = {"decode0": "decode1", "decode1": "decode0"}
    target = msgspec.json.decode(lines[number])["decisions"][0]["target"]
    lines[number] = lines[number].replace(f'"target":"{target}"', f'"target":"{other[target]}"')
    log.write_text("".join(lines))
    ended = kvroute("replay", str(log))
    assert ended.code == 1
    assert f"differ starting at line {number + 1} of run.log" in ended.out
    again = kvroute("replay", str(log), "--json")
    assert again.code == 1
    assert json.loads(again.out)["first_difference_line"] == number + 1


def test_an_impossible_event_is_found_with_its_line(kvroute: Kvroute, log: Path) -> None:
    """One arrival is removed: the next event of that request is rejected."""
    lines = log.read_text().splitlines(keepends=True)
    gone = next(index for index, line in enumerate(lines) if '"type":"arrived"' in line)
    number = msgspec.json.decode(lines.pop(gone))["event"]["request"]["id"]
    log.write_text("".join(lines))
    first = next(index for index, line in enumerate(lines) if f'"request_id":{number}}}' in line)
    ended = kvroute("replay", str(log))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"kvroute: run.log:{first + 1}: ")
    assert f"request {number} is not in flight" in ended.err


def _terms(decision: Decode) -> Terms:
    assert decision.terms is not None
    return decision.terms


def test_explain_shows_the_terms_in_the_log(kvroute: Kvroute, log: Path) -> None:
    """Every term of every candidate is shown, as JSON and as a table."""
    _, records = read_log(log)
    decisions = [made for record in records for made in record.decisions if isinstance(made, Decode)]
    decision = max(decisions, key=lambda made: float(np.ptp(_terms(made).cost)))
    terms = _terms(decision)
    assert np.ptp(terms.cost) > 0
    shown = document(kvroute("explain", str(log), str(decision.request_id), "--json"))
    assert (shown["request"], shown["policy"]) == (decision.request_id, "netkv")
    assert [made["kind"] for made in shown["decisions"]] == ["prefill", "decode"]
    last = shown["decisions"][-1]
    assert (last["chosen"], last["unit"]) == (decision.target, "s")
    assert [row["name"] for row in last["candidates"]] == list(terms.names)
    for part, values in {**terms.parts, "cost": terms.cost}.items():
        assert [row[part] for row in last["candidates"]] == values.tolist()
    table = kvroute("explain", str(log), str(decision.request_id)).out
    assert all(f"{cost * 1e3:,.2f}" in table for cost in terms.cost.tolist())
    assert all(
        heading in table for part in terms.parts for heading in part.removesuffix("_bytes_per_s").split("_")[:-1]
    )


def test_an_invalid_option_does_not_change_an_older_log(kvroute: Kvroute, log: Path, trace: str) -> None:
    """Invalid options are found before the file is opened for writing."""
    before = log.read_bytes()
    for wrong in (["--policy", "netkw"], ["--policy", "netkv", "--constraint", "podd:fail"], []):
        ended = kvroute("simulate", CLUSTER, "--trace", trace, "--seeds", "1", "--log", str(log), *wrong)
        assert ended.code == 2
        assert log.read_bytes() == before
