"""The event log of a live gateway: it replays, names its requests, stays small, and never costs a request."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.disk import files_no_longer_than
from tests.gateway.rig import CLUSTER, MODEL, rig
from tests.waiting import HANGS_S

from kvroute.cli.app import main
from kvroute.control import ControlSpec, EventLog, LogHeader, read_log, replay, same, set_aside
from kvroute.control.log import TERMS_ALL, TERMS_BEST, cheapest
from kvroute.gateway.recording import Recording
from kvroute.topology import parse
from kvroute.types import Arrived, Decode, InputError, InstanceDown, Terms

HEADER = LogHeader(cluster=CLUSTER, spec=ControlSpec())


def _decode(costs: list[float], feasible: list[bool], chosen: int) -> Decode:
    names = tuple(f"d{number:03}" for number in range(len(costs)))
    cost = np.array(costs)
    terms = Terms(names, cost, np.array(feasible), {"queue_s": cost / 3})
    return Decode(1, "p", names[chosen], 1, 1.0, 1.0, 0, terms)


@given(st.data())
def test_what_a_log_keeps_of_many_candidates(data: st.DataObject) -> None:
    """The chosen one and the cheapest, in their order and with their own terms; of few, all."""
    count = data.draw(st.integers(1, 3 * TERMS_ALL))
    costs = data.draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))
    feasible = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    decision = _decode(costs, feasible, data.draw(st.integers(0, count - 1)))
    kept = cheapest(decision).terms
    assert kept is not None
    assert kept.left_out + len(kept.names) == count
    if count <= TERMS_ALL:
        assert kept.left_out == 0
        return
    assert len(kept.names) in (TERMS_BEST, TERMS_BEST + 1)
    assert list(kept.names) == sorted(kept.names)
    assert decision.target in kept.names
    for index, name in enumerate(kept.names):
        number = int(name[1:])
        assert (kept.cost[index], kept.feasible[index]) == (costs[number], feasible[number])
        assert kept.parts["queue_s"][index] == costs[number] / 3
    order = sorted(range(count), key=lambda number: (not feasible[number], feasible[number] and costs[number], number))
    assert {f"d{number:03}" for number in order[:TERMS_BEST]} <= set(kept.names)


def test_a_shortened_record_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    """Equal decisions are the same, a differing kept term is seen, and a whole record needs all terms."""
    costs = [float(number % 50) for number in range(200)]
    decision = _decode(costs, [True] * 200, 150)
    for terms, size in (("best", 4_000), ("all", 100_000)):
        path = tmp_path / terms
        with EventLog(path, HEADER, terms="best" if terms == "best" else "all") as log:
            assert log.write(InstanceDown(1.0, "d"), (decision,)) < size
        [record] = list(read_log(path)[1])
        assert same(record.decisions, (decision,))
        for number in (0, 150):
            other = _decode([cost + (n == number) for n, cost in enumerate(costs)], [True] * 200, 150)
            assert not same(record.decisions, (other,))
    unkept = _decode([cost + (n == 49) for n, cost in enumerate(costs)], [True] * 200, 150)
    assert same(next(read_log(tmp_path / "best")[1]).decisions, (unkept,))
    assert not same(next(read_log(tmp_path / "all")[1]).decisions, (unkept,))


def test_a_log_is_kept_when_another_begins(tmp_path: Path) -> None:
    """One of them, beside it; nothing else ever gives way."""
    path, kept = tmp_path / "run.log", tmp_path / "run.log.1"
    assert set_aside(path) is None
    for at in (1.0, 2.0, 3.0):
        assert set_aside(path) == (kept if at > 1 else None)
        with EventLog(path, HEADER) as log:
            log.write(InstanceDown(at, "d"), ())
    assert [record.event.at for file in (path, kept) for record in read_log(file)[1]] == [3.0, 2.0]
    kept.write_text("somebody's notes")
    with pytest.raises(InputError, match=r"run.log.1: is there already and is no kvroute log"):
        set_aside(path)
    assert path.exists()


@pytest.mark.parametrize("how", ["write", "flush", "close"])
def test_a_recording_gives_up_once_and_quietly(tmp_path: Path, how: str) -> None:
    """Whichever call finds that the disk is full; what it is told afterwards is dropped."""
    lost: list[str] = []
    recording = Recording(tmp_path / "run.log", HEADER, "best", lambda: lost.append("lost"))
    with files_no_longer_than(10_000):
        for number in range(100_000 if how == "write" else 1_000):
            recording.write(InstanceDown(float(number), "d"), ())
        if how == "flush":
            recording.flush()
        assert recording.open == (how == "close")
        recording.close()
    assert lost == ["lost"]
    assert recording.write(InstanceDown(1.0, "d"), ()) == 0
    recording.flush()
    recording.close()
    header, records = read_log(tmp_path / "run.log")
    assert header == HEADER
    assert [record.event.at for record in records][:3] == [0.0, 1.0, 2.0]


def test_a_full_disk_ends_the_log_and_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once and counted; requests before, meanwhile and after are answered, and give back what they held."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with rig(f"  log: {{events: {log}}}\n") as gate:
            assert (await gate.ask("before")).status == 200
            with files_no_longer_than(20_000):
                page = ""
                while "kvroute_logs_lost_total 1" not in page:
                    answers = await asyncio.gather(*[gate.ask(f"{n} " * 2_000) for n in range(8)])
                    assert [answer.status for answer in answers] == [200] * 8
                    page = (await gate.get("/metrics")).body.decode()
            assert (await gate.ask("after")).status == 200
            assert await gate.settles(), gate.leftovers()

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await run()

    uvloop.run(bounded())
    assert [record.message for record in caplog.records].count("event_log_lost") == 1
    header, records = read_log(log)
    assert all(same(record.decisions, again) for record, again in replay(header.spec.build(parse(CLUSTER)), records))


def test_a_request_is_found_by_the_id_that_its_client_gave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the event log, for `explain`, and in the access log, which has its number."""
    log = tmp_path / "events.log"
    caplog.set_level("INFO", "kvroute.access")

    async def run() -> None:
        async with rig(f"  log: {{events: {log}}}\n") as gate:
            for name in ("one", "mine-17", "mine-18"):
                await gate.post({"model": MODEL, "prompt": name, "max_tokens": 2}, headers={"X-Request-Id": name})
            await gate.post({"model": MODEL, "input": "hi"}, "/v1/embeddings", {"X-Request-Id": "passed"})
            await gate.post({"model": MODEL, "prompt": 5}, headers={"X-Request-Id": "wrong"})

    uvloop.run(run())
    named = {record.name: record.event.request.id for record in read_log(log)[1] if isinstance(record.event, Arrived)}
    assert named == {"one": 0, "mine-17": 1, "mine-18": 2}
    shown = []
    for which in ("mine-17", "1", "mine-19"):
        monkeypatch.setattr(sys, "argv", ["kvroute", "explain", str(log), which, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        shown.append((ended.value.code or 0, capsys.readouterr().out))
    assert shown[0] == shown[1] != (0, "")
    assert shown[2] == (2, "")
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "kvroute.access"]
    assert [(line["request_id"], line.get("number"), line["status"], line["endpoint"]) for line in lines] == [
        ("one", 0, 200, "completions"),
        ("mine-17", 1, 200, "completions"),
        ("mine-18", 2, 200, "completions"),
        ("passed", None, 200, "passed_on"),
        ("wrong", None, 400, "completions"),
    ]
    assert all(line["client"] == "127.0.0.1" and line["seconds"] >= 0 for line in lines)
