"""The event log of a live gateway: it replays, names its requests, stays small, and never fails a request."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.disk import files_no_longer_than
from tests.serve.rig import CLUSTER, MODEL, rig
from tests.waiting import HANGS_S

from kvroute.cli.app import main
from kvroute.control import ControlSpec, LogHashing, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, check_whole, read_log, remove_oldest, rotate
from kvroute.control.log.entries import TERMS_ALL, TERMS_BEST, trim_terms
from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.api.requests import read_completion
from kvroute.serve.assembly import Deployment
from kvroute.serve.observe.event_log import EventLogWriter, LogBounds
from kvroute.sim.workload import read as read_trace
from kvroute.topology import parse
from kvroute.types import Arrived, Decode, InputError, InstanceDown, Terms

HEADER = LogHeader(cluster=CLUSTER, spec=ControlSpec())
ROOMY = LogBounds(file_bytes=1e9, total_bytes=1e9)
SMALL = LogBounds(file_bytes=20_000, total_bytes=100_000)
TOKEN, KEY = "S3CRET-0123456789abcdef", hash_text("a client's key")


def _decode(costs: list[float], feasible: list[bool], chosen: int) -> Decode:
    names = tuple(f"d{number:03}" for number in range(len(costs)))
    cost = np.array(costs)
    terms = Terms(names, cost, np.array(feasible), {"queue_s": cost / 3})
    return Decode(1, "p", names[chosen], 1, 1.0, 1.0, 0, terms)


@given(st.data())
def test_a_log_keeps_the_chosen_and_the_cheapest_candidates(data: st.DataObject) -> None:
    """The log keeps the chosen candidate and the cheapest ones, in their order and with their own terms; it keeps all
    if they are few."""
    count = data.draw(st.integers(1, 3 * TERMS_ALL))
    costs = data.draw(st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count))
    feasible = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    decision = _decode(costs, feasible, data.draw(st.integers(0, count - 1)))
    kept = trim_terms(decision).terms
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


def test_a_shortened_record_is_compared_in_the_terms_that_it_contains(tmp_path: Path) -> None:
    """Equal decisions compare as equal, a difference in a kept term is detected, and a full record compares all
    terms."""
    costs = [float(number % 50) for number in range(200)]
    decision = _decode(costs, [True] * 200, 150)
    for terms, size in (("best", 4_000), ("all", 100_000)):
        path = tmp_path / terms
        with EventLog(path, HEADER, terms="best" if terms == "best" else "all") as log:
            assert log.write(InstanceDown(1.0, "d"), (decision,)) < size
        [record] = list(read_log(path)[1])
        assert decisions_equal(record.decisions, (decision,))
        for number in (0, 150):
            other = _decode([cost + (n == number) for n, cost in enumerate(costs)], [True] * 200, 150)
            assert not decisions_equal(record.decisions, (other,))
    unkept = _decode([cost + (n == 49) for n, cost in enumerate(costs)], [True] * 200, 150)
    assert decisions_equal(next(read_log(tmp_path / "best")[1]).decisions, (unkept,))
    assert not decisions_equal(next(read_log(tmp_path / "all")[1]).decisions, (unkept,))


def test_an_old_log_is_renamed_when_a_new_one_begins(tmp_path: Path) -> None:
    """The old log is renamed with the next free number; a file that is not a log is neither overwritten nor removed."""
    path, kept = tmp_path / "run.log", tmp_path / "run.log.1"
    assert rotate(path) is None
    for at in (1.0, 2.0, 3.0):
        assert rotate(path) == (tmp_path / f"run.log.{at - 1:.0f}" if at > 1 else None)
        with EventLog(path, HEADER) as log:
            log.write(InstanceDown(at, "d"), ())
    files = [kept, tmp_path / "run.log.2", path]
    assert [record.event.at for file in files for record in read_log(file)[1]] == [1.0, 2.0, 3.0]
    (tmp_path / "run.log.9").write_text("somebody's notes")
    assert rotate(path) == tmp_path / "run.log.10"
    path.write_text("somebody's notes")
    with pytest.raises(InputError, match=r"run.log: exists and is not a kvroute log"):
        rotate(path)
    assert remove_oldest(path, 0) == [kept, tmp_path / "run.log.2", tmp_path / "run.log.10"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.log", "run.log.9"]


@pytest.mark.parametrize("how", ["write", "flush", "close"])
def test_an_event_log_stops_without_an_exception_after_a_write_error(tmp_path: Path, how: str) -> None:
    """Write, flush or close may find that the disk is full; all later records are dropped."""
    lost: list[str] = []
    recording = EventLogWriter(tmp_path / "run.log", HEADER, "best", ROOMY, lambda: lost.append("lost"))
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
    assert (header.cluster, header.spec, header.part) == (HEADER.cluster, HEADER.spec, 1)
    assert [record.event.at for record in records][:3] == [0.0, 1.0, 2.0]


def test_a_full_disk_ends_the_log_and_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log reports and counts it once; requests before, during and after it are answered and release their
    resources."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with rig(f"  log: {{events: {log}}}\n") as gate:
            assert (await gate.ask("before")).status == 200
            with files_no_longer_than(20_000):
                page = ""
                while "kvroute_logs_lost_total 1" not in page:
                    responses = await asyncio.gather(*[gate.ask(f"{n} " * 2_000) for n in range(8)])
                    assert [response.status for response in responses] == [200] * 8
                    page = (await gate.get("/metrics")).body.decode()
            assert (await gate.ask("after")).status == 200
            assert await gate.becomes_idle(), gate.held_resources()

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await run()

    uvloop.run(bounded())
    assert [record.message for record in caplog.records].count("event_log_lost") == 1
    header, records = read_log(log)
    assert all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(parse(CLUSTER)), records)
    )


def test_a_request_is_found_by_the_id_of_its_client(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The ID is in the event log, for `explain`, and in the access log, which also has the request's number."""
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
        ("passed", None, 200, "embeddings"),
        ("wrong", None, 400, "completions"),
    ]
    assert all(line["client"] == "127.0.0.1" and line["seconds"] >= 0 for line in lines)


def _many(recording: EventLogWriter, first: int, last: int) -> None:
    for number in range(first, last):
        recording.write(InstanceDown(float(number), "d"), ())
        recording.flush()


@pytest.mark.parametrize("name", ["run.log", "run.2026"])
def test_a_log_continues_in_further_files_and_is_read_as_one(tmp_path: Path, name: str) -> None:
    """No file exceeds the size limit by more than one record, only the owner may read the files, and each file stands
    for the whole log. The name of the log may end in a number."""
    path = tmp_path / name
    recording = EventLogWriter(path, HEADER, "best", SMALL, lambda: None)
    _many(recording, 0, 800)
    recording.close()
    files = sorted(tmp_path.iterdir(), key=lambda file: (file == path, file.name))
    assert len(files) > 2
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size < SMALL.file_bytes + 200
        header, records = read_log(file)
        assert header.part == 1
        check_whole(file, header)
        assert [record.event.at for record in records] == [float(at) for at in range(800)]
    files[1].rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"part 2 of this log is missing"):
        read_log(path)


def test_renaming_log_files_while_they_are_read_is_reported(tmp_path: Path) -> None:
    """No record is skipped silently."""
    path = tmp_path / "run.log"
    recording = EventLogWriter(path, HEADER, "best", SMALL, lambda: None)
    _many(recording, 0, 10)
    _, records = read_log(path)
    _many(recording, 10, 800)
    recording.close()
    with pytest.raises(InputError, match=r"no longer part 1 of the log.*read the log again"):
        next(records)
    assert len(list(read_log(path)[1])) == 800


def test_the_files_of_a_log_have_a_total_size_limit(tmp_path: Path) -> None:
    """The oldest files are removed; the others can be read, and a replay reports why it is impossible."""
    path = tmp_path / "run.log"
    recording = EventLogWriter(path, HEADER, "best", SMALL, lambda: None)
    for last in range(1_000, 6_000, 1_000):
        _many(recording, last - 1_000, last)
        taken = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert taken <= SMALL.total_bytes + 200
    recording.close()
    header, records = read_log(path)
    assert header.part > 1
    times = [record.event.at for record in records]
    assert times == [float(at) for at in range(int(times[0]), 5_000)]
    assert len(times) > 500
    with pytest.raises(InputError, match=rf"begins with part {header.part}, but a replay needs the first part"):
        check_whole(path, header)


def test_a_new_log_removes_no_older_log(tmp_path: Path) -> None:
    """A log whose path is taken over by a newer log continues in its own file; no log is lost, however many are
    started."""
    path = tmp_path / "run.log"
    recordings = []
    for number in range(4):
        recordings.append(EventLogWriter(path, HEADER, "best", SMALL, lambda: None))
        _many(recordings[-1], 1_000 * number, 1_000 * number + 50)
    for number, recording in enumerate(recordings):
        _many(recording, 1_000 * number + 50, 1_000 * number + 300)
        recording.close()
    times = [{record.event.at // 1_000 for record in read_log(file)[1]} for file in tmp_path.iterdir()]
    assert {frozenset(of_file) for of_file in times} == {frozenset((float(number),)) for number in range(4)}
    lines = sum(len(file.read_bytes().splitlines()) - 1 for file in tmp_path.iterdir())
    assert lines == 4 * 300


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.binary(min_size=16, max_size=16))
def test_logged_hashes_are_equal_exactly_where_the_blocks_are_equal(blocks: list[int], key: bytes) -> None:
    """Each block is hashed separately, so that equal prefixes stay equal in the log; another key changes all hashes."""
    hashing = LogHashing(key)
    keyed = hashing.blocks(tuple(blocks))
    assert [hashing.blocks((block,))[0] for block in blocks] == list(keyed)
    assert len(set(keyed)) == len(set(blocks))
    assert hashing.blocks(tuple(blocks[:5])) == keyed[:5]
    assert not blocks or LogHashing().blocks(tuple(blocks)) != keyed


def test_the_hash_is_siphash() -> None:
    """The published test vector for a message of eight bytes holds."""
    message = int.from_bytes(bytes(range(8)), "little")
    assert LogHashing(bytes(range(16))).blocks((message,)) == (0x93F5F5799A932462,)


def test_a_live_log_contains_no_secret_and_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over reloads, the log contains no token, key or hash of one, and no hash that a guess of the prompt yields,
    although two equal prompts have equal hashes. All log files exist, replay to the same decisions, and can be read as
    a workload."""
    log = tmp_path / "events.log"
    text = CLUSTER.replace("admin: {port: 0}", f"admin: {{port: 0, push_token: {TOKEN}}}")
    section = f"  keys: {{known: {{anna: '{KEY}'}}}}\n  log: {{events: {log}}}\n"
    prompt = "The number of the account is 123456, and nobody else may know it. " * 4
    guess = Prompts()
    read = read_completion(b"/v1/completions", msgspec.json.encode({"model": MODEL, "prompt": prompt}))
    guessed = guess.blocks_now(read)
    guess.close()
    assert guessed is not None
    assert guessed.blocks

    async def run() -> None:
        async with rig(section, text) as gate:
            gate.session.headers["Authorization"] = "Bearer a client's key"
            endpoints = gate.fleet.ready().instances
            for reload in (True, True, False):
                for _ in range(2):
                    assert (await gate.ask(prompt)).status == 200
                assert await gate.becomes_idle(), gate.held_resources()
                if reload:
                    assert await gate.gateway.reload(lambda: Deployment.of(text + section, "f", endpoints=endpoints))

    uvloop.run(run())
    files = [tmp_path / "events.log.1", tmp_path / "events.log.2", log]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    shown = set()
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in (TOKEN, KEY, KEY.removeprefix("sha256:")))
        assert not any(str(block).encode() in content for block in guessed.blocks)
        header, records = read_log(file)
        control = header.spec.build(parse(header.cluster))
        assert all(decisions_equal(record.decisions, again) for record, again in replay(control, records))
        requests = [record.event.request for record in read_log(file)[1] if isinstance(record.event, Arrived)]
        assert len(requests) == 2
        assert requests[0].blocks == requests[1].blocks
        shown.add(requests[0].blocks)
        assert len(read_trace(file).requests) == 2
        monkeypatch.setattr(sys, "argv", ["kvroute", "replay", str(file)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    assert len(shown) == 3
