"""The examples of docs/extending.md, applied to a copy of the sources: each works as the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SOURCES = ("src", "engine/src", "studies/src")
BLOCK = re.compile(r'^```(python|diff) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

PROTOCOL = """
from pathlib import Path
from kvroute.serve.engines.pd_protocol import KvHandshake
from kvroute.serve.engines.protocols import PROTOCOLS
from kvroute.serve.api.requests import read_completion
from kvroute.topology import load

text = Path("examples/vllm-tp8.yaml").read_text()
Path("store.yaml").write_text(text.replace("endpoint: {", "endpoint: {protocol: shared-store, "))
assert {instance.protocol for instance in load(Path("store.yaml")).instances} == {"shared-store"}
completion = read_completion(b"/v1/completions", b'{"model": "m", "prompt": "hello", "max_tokens": 9}')
protocol = PROTOCOLS["shared-store"]
prefill, decode = (body(completion, KvHandshake(), None) for body in (protocol.prefill_body, protocol.decode_body))
print(prefill.decode(), decode.decode(), sep="\\n")
"""
SERVED_PROTOCOL = """
import asyncio, json
from tests.serve.stub_engines import completion, engines_of, stub_rig

async def main():
    prefill, decode = engines_of("shared-store")
    async with stub_rig([*prefill, *decode]) as front:
        response = await front.post(completion(prompt="hello", max_tokens=9))
        assert response.status == 200, response.text
    for engine in (*prefill, *decode):
        for received in engine.received:
            print(received.body.decode())

asyncio.run(main())
"""
FEATURE = """
from pathlib import Path
from kvroute.control import ControlSpec
from kvroute.topology import load
from kvroute.types import Arrived, PrefillFinished, Reject, Request

control = ControlSpec(decode="netkv", prefill="cache-aware").build(load(Path("examples/small.yaml")))

def arrive(number, ttft_max_s=None):
    (decision,) = control.handle(Arrived(0.0, Request(id=number, input_tokens=100), ttft_max_s=ttft_max_s))
    return decision

late = arrive(1, ttft_max_s=1.0)
assert isinstance(late, Reject) and late.ttft_s > 2.0
first, second, third = arrive(2), arrive(3), arrive(4)
assert first.terms.parts["cold_s"].tolist() == [2.0, 2.0], "a rejected request is not recorded"
assert second.terms.parts["cold_s"].tolist() == [0.0, 2.0]
assert (first.instance, second.instance) == ("prefill0", "prefill1"), "the added time is booked"
assert first.terms.parts["prefill_s"].min() > 2.0 > third.terms.parts["prefill_s"].max()
assert "cold_s" not in third.terms.parts
(decode,) = control.handle(PrefillFinished(3.0, 2))
assert "cold_s" not in decode.terms.parts
"""
EVENT = """
from pathlib import Path
from kvroute.control import ControlSpec, LogRecord
from kvroute.control.log.entries import decode_record, encode
from kvroute.topology import load
from kvroute.types import Arrived, BatchLimited, PrefillFinished, Request

cluster = load(Path("examples/small.yaml"))

def second_wait_s(limit):
    control = ControlSpec(decode="load-aware").build(cluster)
    waits_s = []
    for number in (1, 2):
        control.handle(Arrived(0.0, Request(id=number, input_tokens=100, max_output_tokens=10)))
        (decision,) = control.handle(PrefillFinished(1.0, number))
        if number == 1:
            first = decision.target
            if limit:
                event = BatchLimited(1.0, first, 0)
                assert decode_record(encode(LogRecord(event, control.handle(event)))).event == event
        waits_s.append(float(decision.terms.parts["queue_s"][decision.terms.names.index(first)]))
    return waits_s[1]

assert second_wait_s(limit=False) == 0.0
assert second_wait_s(limit=True) > 0.0
"""
EXPERIMENT = """
from kvroute_studies.shared.cells import cells
from kvroute_studies.netkv.cases import EXPERIMENTS
from kvroute_studies.netkv.readings import reading
from kvroute_studies.netkv.setup import Study, run_cell

sweep = cells(EXPERIMENTS["netkv-limit"], "paper", ("chatbot",), (0,))
study = Study(reading("paper", ()), warmup_s=0.0, measure_s=1.0)
print([run_cell(study, cell).summary.slo_attainment for cell in sweep if cell.policy == "netkv"])
"""


def _sections() -> dict[str, str]:
    """The text of each section, by its heading."""
    _, *parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _edit(path: Path, diff: str) -> None:
    """Apply the hunks of a diff, which blank lines separate. The old lines of each must occur once."""
    text = path.read_text(encoding="utf-8")
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.splitlines()
        assert all(line[0] in " +-" for line in lines), (path, hunk)
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert f"\n{text}".count(f"\n{old}") == 1, (path, hunk)
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the sources and all examples of the page."""
    folder = tmp_path_factory.mktemp("extended")
    for sources in SOURCES:
        shutil.copytree(ROOT / sources, folder / sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "examples", folder / "examples")
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) > 10
    for language, name, code in blocks:
        if language == "python":
            assert not (folder / name).exists(), name
            (folder / name).write_text(code, encoding="utf-8")
        else:
            _edit(folder / name, code)
    return folder


def _python(folder: Path, *arguments: str) -> str:
    """Run Python with the copy; kernels are not compiled, because that would take a minute in a new folder."""
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, [*(folder / name for name in SOURCES), ROOT]))}
    environment["NUMBA_DISABLE_JIT"] = "1"
    out = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
    assert out.returncode == 0, out.stderr
    return out.stdout


def _commands(section: str) -> list[list[str]]:
    return [line.split()[1:] for line in re.findall(r"^    (kvroute .*)$", _sections()[section], re.MULTILINE)]


def test_each_example_touches_as_many_files_as_the_table_says() -> None:
    table = re.findall(r"^\| an? .+ \| (\d) \| \[.+\]\(#([\w-]+)\) \|$", PAGE, re.MULTILINE)
    assert len(table) == 6
    by_anchor = {re.sub(r"[^\w ]", "", name).lower().replace(" ", "-"): text for name, text in _sections().items()}
    for count, anchor in table:
        files = {name for _, name, _ in BLOCK.findall(by_anchor[anchor])}
        assert len(files) == int(count), (anchor, files)
        assert all(name.startswith(SOURCES) for name in files)


def test_a_new_policy_routes_a_simulated_cluster(extended: Path) -> None:
    """The printed command works, and the log has the policy's own term."""
    (command,) = _commands("A policy")
    out = _python(extended, "-m", "kvroute.cli.app", *command, "--log", "room.log")
    assert "most-room has a mean TTFT" in out
    assert '"free_kv_bytes":[' in (extended / "room.log").read_text()


def test_a_new_policy_with_state_sees_its_state(extended: Path) -> None:
    """Some decisions of the log were made while transfers were in progress, and each transfer has ended."""
    (command,) = _commands("A policy with state")
    _python(extended, "-m", "kvroute.cli.app", *command)
    lines = [json.loads(line) for line in (extended / "run.log").read_text().splitlines()[1:]]
    counts = [
        decision["terms"]["parts"]["arrivals"]
        for line in lines
        for decision in line["decisions"]
        if decision["type"] == "decode"
    ]
    assert len(counts) == 30
    assert max(max(each) for each in counts) >= 1.0
    assert min(max(each) for each in counts) == 0.0


def test_a_new_feature_is_offered_and_attached_as_the_core_calls_it(extended: Path) -> None:
    """It changes candidates and terms, is attached after the forecast, and is in the log of the printed command."""
    _python(extended, "-c", FEATURE)
    (command,) = _commands("A feature of the dispatcher")
    _python(extended, "-m", "kvroute.cli.app", *command)
    lines = (extended / "cold.log").read_text().splitlines()
    assert '"cold_s":[2.0,2.0]' in next(line for line in lines if '"type":"prefill"' in line)
    assert sum('"cold_s"' in line for line in lines) == 2


def test_a_new_protocol_is_valid_and_makes_both_bodies(extended: Path) -> None:
    prefill, decode = map(json.loads, _python(extended, "-c", PROTOCOL).splitlines())
    assert decode == {"model": "m", "prompt": "hello", "max_tokens": 9}
    assert (prefill["max_tokens"], prefill["stream"]) == (1, False)


def test_a_gateway_serves_with_a_new_protocol(extended: Path) -> None:
    """The example's methods take what the gateway passes: a request reaches a prefill and a decode engine."""
    prefill, decode = map(json.loads, _python(extended, "-c", SERVED_PROTOCOL).splitlines())
    assert (prefill["prompt"], prefill["max_tokens"]) == ("hello", 1)
    assert (decode["prompt"], decode["max_tokens"]) == ("hello", 9)


def test_a_new_event_changes_decisions_and_can_be_logged(extended: Path) -> None:
    _python(extended, "-c", EVENT)


def test_a_new_experiment_is_listed_and_its_axis_is_applied(extended: Path) -> None:
    (command, _) = _commands("An experiment")
    assert "netkv-limit" in _python(extended, "-m", "kvroute.cli.app", *command)
    attained = json.loads(_python(extended, "-c", EXPERIMENT))
    assert len(attained) == 4
    assert attained == sorted(attained)
    assert attained[0] < attained[-1]
