"""The examples of docs/extending.md, applied to a copy of the sources: each works as the page says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.pages.extended_gateway import LEGS, statuses_of_full_engines

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
SHARED_STATE = """
from tests.control.churn_rig import base, engine, join
from tests.control.live_rig import request
from tests.control.replica_rig import Gateways
from kvroute.control import ControlSpec
from kvroute.types import Arrived, Decode, PrefillFinished

gateways = Gateways("a", "b", spec=ControlSpec(decode="fewest-arrivals"))
gateways.settle()
first, second = gateways.living
number = gateways.arrive(first)
gateways.advance(first, number)
gateways.exchange()
own, others = (member.control.parts.view.states.acting._count.sum() for member in (first, second))
assert (own, others) == (1.0, 1.0), (own, others)
while number in first.flights:
    gateways.advance(first, number)
gateways.exchange()
assert [member.control.parts.view.states.acting._count.sum() for member in (first, second)] == [0.0, 0.0]

control = ControlSpec(decode="fewest-arrivals").build(base())
join(control, 1.0, engine("p", "prefill"), engine("d", node=1))
control.handle(Arrived(2.0, request(1, 100, 4)))
(decision,) = control.handle(PrefillFinished(3.0, 1))
assert isinstance(decision, Decode)
join(control, 4.0, engine("e", node=2))
counts = control.parts.view.states.acting._count
assert counts[control.cluster.index("d")] == counts.sum() == 1.0, counts
"""
TRACE = """
from pathlib import Path
from kvroute.sim.workload import read
from kvroute.types import InputErrors

head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
Path("burst.csv").write_text(f"{head}\\n5,ChatGPT,472,18,490,Conversation log\\n45,GPT-4,1087,230,1317,API log\\n")
found = [(request.at_s, request.input_tokens, request.output_tokens) for request in read("burst.csv").requests]
assert [(tokens, output) for _, tokens, output in found] == [(472, 18), (1087, 230)]
assert found[1][0] - found[0][0] == 40.0
Path("broken.csv").write_text(f"{head}\\n5,ChatGPT,none,18,18,API log\\n")
try:
    read("broken.csv")
    raise AssertionError("a broken line is read")
except InputErrors as broken:
    assert "broken.csv:2" in str(broken) and "Request tokens" in str(broken), str(broken)
"""
STORE = """
from pathlib import Path
from kvroute_engine.block_keys import KEY_BYTES, NO_PARENT
from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.location import StoreLocation

where = StoreLocation(f"sqlite://{Path('blocks.db').absolute()}", capacity_bytes=0)
where.check()
form = BlockFormat("m", 2, 4, 8)
first, second = (bytes([number]) * KEY_BYTES for number in (1, 2))
store = where.open(form, "part")
assert not store.write(second, first, memoryview(bytes(16))), "the parent is missing"
assert store.write(first, NO_PARENT, memoryview(bytes(range(16))))
assert store.write(second, first, memoryview(bytes(range(16, 32))))
again = where.open(form, "part")
assert again.match([first, second, bytes(KEY_BYTES)]) == 2
into = bytearray(16)
assert again.read([first, second], range(1, 2), memoryview(into)) == 2
assert into == bytes([*range(8, 16), *range(24, 32)])
assert where.open(form, "other").match([first]) == 0
"""
SCHEME = """
from kvroute.collectives import SCHEMES, AllReduce, all_reduce, all_seconds
from kvroute.topology import load

cluster = load("examples/small.yaml")
group = tuple((node, gpu) for node in (0, 1) for gpu in (0, 1))
assert "tree" in SCHEMES
found = all_reduce("tree", AllReduce(group, 8e6), cluster)
assert sum(flow.nbytes for flow in found.flows) == 2 * 3 * 8e6
small, large = (all_seconds(AllReduce(group, nbytes), cluster, None) for nbytes in (1e3, 8e6))
assert small["tree"] < small["ring"]
assert large["tree"] > large["hierarchical-ring"]
"""
KEY = """
from pathlib import Path
from kvroute.topology import load
from kvroute.types import InputErrors

text = Path("examples/small.yaml").read_text()
Path("shared.yaml").write_text(text.replace("role: decode", "role: decode, kv_share: 1.5"))
try:
    load(Path("shared.yaml"))
    raise AssertionError("a share above 1 is read")
except InputErrors as wrong:
    assert "kv_share" in str(wrong) and "shared.yaml" in str(wrong), str(wrong)
"""
ALONE = {"trace": TRACE, "store": STORE, "scheme": SCHEME, "key": KEY, "shared state": SHARED_STATE}
"""Scripts that one process runs, each in a fork."""
FORKS = """
import json, os, sys, traceback
failed = {}
for name, script in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        with open(read) as said:
            failed[name] = said.read()
        os.wait()
        continue
    try:
        exec(script, {})
    except BaseException:
        os.write(write, traceback.format_exc().encode())
    os._exit(0)
print(json.dumps(failed))
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
    for others in ("examples", "deploy/grafana"):
        shutil.copytree(ROOT / others, folder / others)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/metrics.md", folder / "docs")
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


@pytest.fixture(scope="module")
def faults(extended: Path) -> dict[str, str]:
    """What was wrong with each script of `ALONE`; empty: nothing."""
    found: dict[str, str] = json.loads(_python(extended, "-c", FORKS, json.dumps(ALONE)))
    return found


@pytest.fixture(scope="module")
def served(extended: Path) -> dict[str, Any]:
    """What `extended_gateway` finds."""
    _python(extended, "-m", "tests.pages.extended_gateway", "served.json")
    found: dict[str, Any] = json.loads((extended / "served.json").read_text())
    return found


def _commands(section: str) -> list[list[str]]:
    return [line.split()[1:] for line in re.findall(r"^    (kvroute .*)$", _sections()[section], re.MULTILINE)]


def test_each_example_touches_as_many_source_files_as_the_table_says() -> None:
    """Pages and files of deployments do not count. The table has all examples, in the order of the page."""
    table = re.findall(r"^\| an?(?:other)? .+ \| (\d+) \| \[.+\]\(#([\w-]+)\) \|$", PAGE, re.MULTILINE)
    by_anchor = {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-"): text for name, text in _sections().items()}
    counts = {}
    for anchor, text in by_anchor.items():
        files = {name for _, name, _ in BLOCK.findall(text)}
        counts[anchor] = len({name for name in files if name.startswith(SOURCES)})
        assert all(name.startswith((*SOURCES, "deploy/", "docs/")) for name in files)
    assert [(anchor, int(count)) for count, anchor in table] == list(counts.items())
    assert counts["a-policy-with-state-that-gateways-share"] <= 4


def test_a_new_policy_routes_a_simulated_cluster(extended: Path) -> None:
    """The printed command works, and the log has the policy's own term."""
    (command,) = _commands("A policy")
    out = _python(extended, "-m", "kvroute.cli.app", *command, "--log", "room.log")
    assert "most-room has a mean TTFT" in out
    assert '"free_kv_bytes":[' in (extended / "room.log").read_text()


def test_a_new_policy_with_state_sees_its_state(extended: Path) -> None:
    """Some decisions of the log were made while transfers were in progress, and each transfer has ended."""
    (command,) = _commands("A policy with state that gateways share")
    _python(extended, "-m", "kvroute.cli.app", *command)
    lines = [json.loads(line) for line in (extended / "run.log").read_text().splitlines()[1:]]
    counts = [
        decision["terms"]["parts"]["arrivals"]
        for line in lines
        for decision in line["decisions"]
        if decision["type"] == "decode"
    ]
    assert len(counts) == 30
    assert max(max(count) for count in counts) >= 1.0
    assert min(max(count) for count in counts) == 0.0


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


def test_a_gateway_serves_with_a_new_protocol(served: dict[str, Any]) -> None:
    """The example's methods take what the gateway passes: a request reaches a prefill and a decode engine."""
    prefill, decode = map(json.loads, served["bodies"])
    assert (prefill["prompt"], prefill["max_tokens"]) == ("hello", 1)
    assert (decode["prompt"], decode["max_tokens"]) == ("hello", 9)


@pytest.mark.parametrize("name", ALONE)
def test_a_new_part_works_without_a_gateway(faults: dict[str, str], name: str) -> None:
    """A trace is read and a broken line named; a store keeps blocks; a scheme has flows and costs; a key has a range;
    a policy's state hears of the transfers of other gateways, and of its own again when an engine joins."""
    assert faults[name] == ""


def test_a_new_metric_is_on_all_pages(extended: Path, served: dict[str, Any]) -> None:
    """The gateway counts; its dashboard, Grafana's and the page of metrics have the value by the same name."""
    pages = served["pages"]
    assert [(endpoint, int(nbytes) > 0) for endpoint, nbytes in pages["bytes"]] == [("passthrough", True)]
    assert pages["shown"]
    assert "tick.body_bytes_per_s" in (extended / "src/kvroute/serve/observe/dashboard/panels.js").read_text()
    dashboard = json.loads((extended / "deploy/grafana/kvroute.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert sum("kvroute_request_bytes_total" in query for query in queries) == 1
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))
    documented = re.findall(r"^\| `(kvroute_\w+)", (extended / "docs/metrics.md").read_text(), re.MULTILINE)
    assert sorted(documented) == [name for name in pages["families"] if name in documented]
    assert "kvroute_request_bytes_total" in documented


def test_a_gateway_uses_a_new_key_of_the_cluster_file(served: dict[str, Any]) -> None:
    """Half of the KV memory of the prefill engines, which have the key."""
    *prefill, decode, other = sorted(served["pages"]["kv_bytes"])
    assert prefill == [decode / 2, decode / 2]
    assert decode == other


def test_a_new_endpoint_is_passed_on_and_described(served: dict[str, Any]) -> None:
    assert served["pages"]["status"] == 200
    assert served["pages"]["described"]


def test_one_place_decides_what_a_429_means(served: dict[str, Any]) -> None:
    """Its change reaches every leg, requests that are passed on, and the endpoint picker."""
    assert asyncio.run(statuses_of_full_engines()) == dict.fromkeys(LEGS, 503)
    assert served["statuses"] == dict.fromkeys(LEGS, 429)


def test_a_new_event_changes_decisions_and_can_be_logged(extended: Path) -> None:
    _python(extended, "-c", EVENT)


def test_a_new_experiment_is_listed_and_its_axis_is_applied(extended: Path) -> None:
    (command, _) = _commands("An experiment")
    assert "netkv-limit" in _python(extended, "-m", "kvroute.cli.app", *command)
    attained = json.loads(_python(extended, "-c", EXPERIMENT))
    assert len(attained) == 4
    assert attained == sorted(attained)
    assert attained[0] < attained[-1]
