"""An event log as a workload: prompts and outputs are those of the run, for logs of the simulator and of the
gateway."""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER, rig

from kvroute.cli.app import main
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest, read, write
from kvroute.topology import parse
from kvroute.types import Arrived, Event, Finished, InputError, InputErrors, InstanceDown, Request

SPEC = ControlSpec()
SMALL = CLUSTER.replace("kv_capacity: 60 GB", "kv_capacity: 2 GB")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw requests from time 0 on, with shared prefixes, outputs of no token, and prompts too large for a small
    memory."""
    at_s, requests = 0.0, []
    for number in range(draw(st.integers(1, 12))):
        tokens, group = draw(st.integers(1, 8_000)), draw(st.integers(0, 2))
        chain = tuple(group if depth < 5 else 1_000 * number + depth for depth in range(tokens // 512))
        requests.append(TracedRequest(at_s, tokens, draw(st.sampled_from([0, 1, 7, 200])), chain, 512))
        at_s += draw(st.sampled_from([0.0, 0.1, 1 / 3]))
    return Trace("law", tuple(requests))


def recorded(trace: Trace, text: str, path: Path) -> bytes:
    """Return the log of a simulated run."""
    with EventLog(path, LogHeader(cluster=text, spec=SPEC)) as log:
        simulate(parse(text), trace, SPEC, SimSpec(), log=log)
    return path.read_bytes()


def written(path: Path, *events: Event) -> Path:
    """Write a log of these events."""
    with EventLog(path, LogHeader(cluster=CLUSTER, spec=SPEC)) as log:
        for event in events:
            log.write(event, ())
    return path


def arriving(number: int, tokens: int = 100, answer: int = 0, **more: object) -> Request:
    """Return a request with this number."""
    return msgspec.convert(
        {"id": number, "input_tokens": tokens, "max_output_tokens": answer, **more}, Request, strict=True
    )


@given(traces(), st.sampled_from([CLUSTER, SMALL]))
@settings(max_examples=25, deadline=None)
def test_a_simulated_log_reproduces_its_trace(trace: Trace, text: str) -> None:
    """Arrivals, prompts, blocks and outputs equal the input, and a run of them gives the same log, byte for byte; the
    output of a rejected request is its reservation."""
    with tempfile.TemporaryDirectory() as folder:
        first = recorded(trace, text, Path(folder, "first.log"))
        again = read(Path(folder, "first.log"))
        assert again.requests == trace.requests
        assert recorded(again, text, Path(folder, "second.log")) == first


@given(
    tokens=st.integers(1, 200),
    blocks=st.lists(st.integers(0, 2**64 - 1), max_size=20).map(tuple),
    size=st.sampled_from([1, 16, 64]),
)
def test_a_chain_has_as_many_blocks_as_its_prompt(tokens: int, blocks: tuple[int, ...], size: int) -> None:
    """A gateway that estimates lengths may have more or fewer blocks: known ones come first, the others are unique, and
    the trace can be written and read."""
    requests = [arriving(number, tokens, blocks=blocks, block_tokens=size) for number in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "run.log"), *[Arrived(0.0, request) for request in requests])
        trace = read(path)
        write(trace, Path(folder, "run.jsonl"))
        assert read(Path(folder, "run.jsonl")).requests == trace.requests
    one, other = (request.blocks for request in trace.requests)
    if not blocks:
        assert one == other == ()
        return
    assert len(one) in (tokens // size, -(-tokens // size))
    known = min(len(blocks), len(one))
    assert one[:known] == other[:known] == blocks[:known]
    assert not set(one[known:]) & set(other[known:])


def test_unknown_output_lengths_are_reported(tmp_path: Path) -> None:
    """The output is counted, cut off without a count, rejected, or still in progress when the log ends."""
    path = written(
        tmp_path / "run.log",
        InstanceDown(4.0, "decode0"),
        Arrived(5.0, arriving(0, answer=50)),
        Arrived(5.5, arriving(1, answer=60, one_leg=True, model="a")),
        Arrived(6.0, arriving(2, answer=70, model="b")),
        Finished(6.5, 1),
        Finished(7.0, 0, output_tokens=9),
        Arrived(7.5, arriving(3)),
        Finished(8.0, 99, output_tokens=1),
    )
    trace = read(path)
    rows = [(request.at_s, request.input_tokens, request.output_tokens) for request in trace.requests]
    assert rows == [(0.0, 100, 9), (0.5, 100, 60), (1.0, 100, 70), (2.5, 100, 1)]
    answers, remark, models = trace.remarks
    assert answers.startswith("the output of 3 of 4 requests was not counted")
    assert remark.startswith("1 of 4 requests had several prompts or choices")
    assert models == "requests use 3 models, which a trace does not distinguish: a, b, unnamed"


def test_a_request_id_may_be_reused_after_its_request_ended(tmp_path: Path) -> None:
    """Each output belongs to its own request."""
    path = written(
        tmp_path / "run.log",
        Arrived(0, arriving(1)),
        Finished(1, 1, output_tokens=3),
        Arrived(2, arriving(1)),
        Finished(3, 1, output_tokens=5),
    )
    assert [request.output_tokens for request in read(path).requests] == [3, 5]


def test_a_log_is_recognised_by_its_first_line(tmp_path: Path) -> None:
    """Requests are sorted by time, with a remark."""
    log = written(
        tmp_path / "run.log",
        Arrived(3.0, arriving(1, 7)),
        Arrived(1.0, arriving(2, 8)),
        Arrived(4.0, arriving(3, 9)),
    )
    packed = tmp_path / "trace.csv"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    for path, name in ((log, "run"), (packed, "trace")):
        trace = read(path)
        assert trace.name == name
        assert [(request.at_s, request.input_tokens) for request in trace.requests] == [(0, 8), (2, 7), (3, 9)]
        assert "time went backwards 1 time" in trace.remarks[-1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"event":{"type":"arr', "not a record of an event log"),
        ('{"event":{"type":"arrived","at":1}}', "request"),
        ('{"event":{"type":"arrived","at":1,"request":{"id":1,"input_tokens":0}}}', "field input_tokens: 0"),
        ('{"event":{"type":"arrived","at":1,"request":{"id":1,"input_tokens":1,"blocks":[-1]}}}', "field blocks"),
        ('{"event":{"type":"arrived","at":1,"request":{"id":1,"input_tokens":1,"block_tokens":0}}}', "block_tokens: 0"),
        ('{"event":{"type":"finished","at":1,"request_id":5,"output_tokens":-2}}', "field output_tokens: -2"),
    ],
    ids=["cut off", "no request", "no prompt", "block", "block size", "answer"],
)
def test_an_invalid_line_is_named_or_skipped(tmp_path: Path, line: str, problem: str) -> None:
    """The error has the file and the line, as in any other trace."""
    path = written(tmp_path / "run.log", Arrived(0, arriving(5, answer=4)))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputErrors, match=problem) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    trace = read(path, skip_bad=True)
    assert [request.output_tokens for request in trace.requests] == [4]
    assert "1 invalid line skipped" in trace.remarks


def test_a_log_without_requests_is_rejected(tmp_path: Path) -> None:
    """One sentence names the file."""
    with pytest.raises(InputError, match=r"run\.log: the file has no requests"):
        read(written(tmp_path / "run.log", InstanceDown(0, "decode0")))


Kvroute = Callable[..., tuple[str, str]]


@pytest.fixture
def kvroute(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Kvroute:
    """A command that must succeed; it returns stdout and stderr."""

    def run(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert not ended.value.code, err
        return out, err

    return run


@pytest.fixture
def live_log(tmp_path: Path) -> Path:
    """A gateway's log with streamed and non-streaming responses, retries of both legs, several choices at once, and a
    failure."""
    log = tmp_path / "live.log"

    async def serve() -> None:
        async with rig(f"  log: {{events: {log}}}\n") as gate:
            for leg in ("prefill", "decode"):  # no more: a request has three attempts and may meet all faults
                await gate.command(f"{leg}0", fail_next=1, status=500, leg=leg)
            prompt = "What is a KV cache? " * 40
            requests = [gate.ask(f"{n} {prompt}", tokens=3 + n, stream=n % 2 == 0) for n in range(6)]
            assert [answer.status for answer in await asyncio.gather(*requests)] == [200] * 6
            assert (await gate.ask(prompt, tokens=2, n=3)).status == 200
            for name in ("prefill0", "prefill1"):
                await gate.command(name, fail_next=9, status=500, leg="prefill")
            assert (await gate.ask(prompt, tokens=40)).status == 502
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(serve())
    return log


def test_a_gateways_log_is_a_workload(live_log: Path, tmp_path: Path, kvroute: Kvroute) -> None:
    """The trace has each request once at its arrival with the output that the client got, for any retries; the
    command simulates it and reports what is unknown."""
    arrivals = [record.event for record in read_log(live_log)[1] if isinstance(record.event, Arrived)]
    trace = read(live_log)
    assert len(trace.requests) == 8
    for arrival, request in zip(arrivals, trace.requests, strict=True):
        assert request.at_s == arrival.at - arrivals[0].at
        assert request.input_tokens == arrival.request.input_tokens
        assert request.blocks[: len(arrival.request.blocks)] == arrival.request.blocks
    assert sorted(request.output_tokens for request in trace.requests) == [3, 4, 5, 6, 6, 7, 8, 40]
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    out, err = kvroute(
        *("simulate", str(tmp_path / "cluster.yaml"), "--trace", str(live_log), "--policy", "netkv"),
        *("--seeds", "1", "--workers", "1", "--json"),
    )
    (run,) = msgspec.json.decode(out)["runs"]
    assert run["requests"] == {"arrived": 8, "finished": 8, "rejected": 0, "in_flight": 0}
    assert f"{live_log}: the output of 1 of 8 requests was not counted" in err
    assert "1 of 8 requests had several prompts or choices" in err


def test_a_gateways_log_explains_each_attempt(live_log: Path, kvroute: Kvroute) -> None:
    """No prefill instance served the request: the core decided again after each failure and excluded the failed
    instance. A log that is still being written can be read too."""
    with live_log.open("ab") as log:
        log.write(b'{"event":{"type":"arr')
    assert "bit for bit" in kvroute("replay", str(live_log))[0]
    out, _ = kvroute("explain", str(live_log), "7", "--json")
    tries = msgspec.json.decode(out)["decisions"]
    assert [attempt["kind"] for attempt in tries] == ["prefill"] * 3
    assert [attempt["event"] for attempt in tries] == ["arrived", "prefill_failed", "prefill_failed"]
    ruled_out = [{row["name"]: row["ruled_out"] for row in attempt["candidates"]} for attempt in tries]
    assert ruled_out[0] == {"prefill0": None, "prefill1": None}
    assert ruled_out[1] == {name: "failed" if name == tries[0]["chosen"] else None for name in ruled_out[0]}
    table, _ = kvroute("explain", str(live_log), "7")
    assert f"after a failed prefill: prefill on {tries[1]['chosen']}, by cache-aware" in table
    assert f"{tries[0]['chosen']} (failed)" in table
    remark, _ = kvroute("explain", str(live_log), "6")
    assert ": prefill and decode on decode" in remark
