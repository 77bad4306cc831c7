"""The watched file of engines: what it may contain, its errors, and how changes of it are noticed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.lifecycle.membership_rig import write
from tests.serve.stub_engines import run
from tests.waiting import until

from kvroute.serve.discovery.engines_file import EnginesFile, read_engines
from kvroute.types import Discovered, Endpoint, InputErrors, Place

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(str.isascii)
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {
            "name": NAMES,
            "role": st.sampled_from(["prefill", "decode", "both"]),
            "url": st.integers(1, 65535).map(lambda port: f"http://10.0.0.1:{port}"),
        },
        optional={
            "uid": st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=8),
            "node": NAMES,
            "rack": NAMES,
            "ready": st.booleans(),
            "tp": st.integers(1, 8),
            "kv_events": st.just("tcp://10.0.0.1:5557"),
        },
    ),
    unique_by=lambda engine: engine["name"],
    max_size=6,
)


@given(ENTRIES)
def test_yaml_and_json_give_the_same_engines(entries: list[dict[str, object]]) -> None:
    """They are sorted by name, and nothing of them is lost."""
    engines = read_engines(msgspec.yaml.encode(entries).decode(), "engines.yaml")
    assert engines == read_engines(msgspec.json.encode(entries).decode(), "engines.json")
    assert [engine.name for engine in engines] == sorted(str(entry["name"]) for entry in entries)
    by_name = {engine.name: engine for engine in engines}
    for entry in entries:
        engine = by_name[str(entry["name"])]
        assert (engine.role, engine.endpoint.url) == (entry["role"], entry["url"])
        assert (engine.uid, engine.ready, engine.tp) == (
            entry.get("uid", ""),
            entry.get("ready", True),
            entry.get("tp"),
        )
        assert (engine.place.node, engine.place.rack) == (entry.get("node", "10.0.0.1"), entry.get("rack", ""))


def test_an_entry_with_all_fields() -> None:
    """Each field is where the cluster needs it."""
    text = """
- name: p0
  uid: abc
  role: prefill
  url: http://host-1:8000
  protocol: mooncake
  bootstrap: host-1:8998
  kv_events: tcp://host-1:5557
  kv_replay: tcp://host-1:5558
  node: n1
  rack: r1
  pod: s1
  datacenter: d1
  model: llama-3-8b
  tp: 2
  pp: 2
  timing: fast
  ready: false
"""
    assert read_engines(text, "engines.yaml") == (
        Discovered(
            name="p0",
            uid="abc",
            role="prefill",
            endpoint=Endpoint(
                url="http://host-1:8000",
                protocol="mooncake",
                bootstrap="host-1:8998",
                kv_events="tcp://host-1:5557",
                kv_replay="tcp://host-1:5558",
            ),
            place=Place(node="n1", rack="r1", pod="s1", datacenter="d1"),
            model="llama-3-8b",
            tp=2,
            pp=2,
            timing="fast",
            ready=False,
        ),
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: p0\n", "engines.yaml:1: the file is not a list"),
        ("- {name: p0, role: prefil, url: http://h:1}\n", "engines.yaml:1: [0].role"),
        ("- name: p0\n  role: prefill\n  url: host:1\n", "engines.yaml:3: [0].url"),
        ("- name: p0\n  role: prefill\n", "engines.yaml:1: [0]: "),
        ("- {name: p0, role: both, url: http://h:1, port: 3}\n", "engines.yaml:1: [0].port"),
        ("- {name: p0, role: both, url: http://h:1}\n- {name: p0, role: both, url: http://h:2}\n", "2: [1].name"),
        ('[{"name": "p0", "role": "prefill", "url": 3}]', "engines.yaml:1: [0].url"),
        ("- [\n", "this is not YAML"),
    ],
)
def test_an_error_names_line_and_field(text: str, error: str) -> None:
    """In one sentence."""
    with pytest.raises(InputErrors) as raised:
        read_engines(text, "engines.yaml")
    assert error in str(raised.value.problems[0])


@asynccontextmanager
async def followed(path: Path) -> AsyncIterator[list[tuple[Discovered, ...]]]:
    """Follow a file; yield the list of its reports."""
    reports: list[tuple[Discovered, ...]] = []

    def report(engines: tuple[Discovered, ...]) -> None:
        reports.append(engines)

    task = asyncio.create_task(EnginesFile(path).run(report))
    try:
        yield reports
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def entry(name: str) -> dict[str, object]:
    """Return a valid entry."""
    return {"name": name, "role": "both", "url": f"http://{name}:8000"}


def names(reports: list[tuple[Discovered, ...]]) -> list[str]:
    """Return the names of the last report."""
    return [engine.name for engine in reports[-1]] if reports else []


def test_replaced_and_rewritten_files_are_read(tmp_path: Path) -> None:
    """An atomic replacement, a write in place, and a file that appears late."""
    path = tmp_path / "engines.yaml"

    async def main() -> None:
        async with followed(path) as reports:
            write(path, [entry("a")])
            await until(lambda: names(reports) == ["a"])
            write(path, [entry("a"), entry("b")])
            await until(lambda: names(reports) == ["a", "b"])
            path.write_bytes(msgspec.yaml.encode([entry("c")]))
            await until(lambda: names(reports) == ["c"])
            path.write_text("")
            await until(lambda: bool(reports) and reports[-1] == ())
            (tmp_path / "other").write_text("x")
            write(path, [entry("d")])
            await until(lambda: names(reports) == ["d"])
            assert all(first != other for first, other in itertools.pairwise(reports))

    run(main())


def test_a_mounted_volume_swaps_a_symbolic_link(tmp_path: Path) -> None:
    """As Kubernetes does for a ConfigMap: `..data` points to another folder."""
    for number, name in enumerate("ab"):
        (tmp_path / f"..{number}").mkdir()
        write(tmp_path / f"..{number}" / "engines.yaml", [entry(name)])
    (tmp_path / "..data").symlink_to("..0")
    path = tmp_path / "engines.yaml"
    path.symlink_to("..data/engines.yaml")

    async def main() -> None:
        async with followed(path) as reports:
            await until(lambda: names(reports) == ["a"])
            (tmp_path / "..new").symlink_to("..1")
            os.replace(tmp_path / "..new", tmp_path / "..data")
            await until(lambda: names(reports) == ["b"])

    run(main())


def test_a_broken_file_reports_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once with file, line and field; the next valid one counts."""
    path = tmp_path / "engines.yaml"
    write(path, [entry("a")])

    def faults() -> list[str]:
        return [record.__dict__["fields"]["reason"] for record in caplog.records]

    async def main() -> None:
        async with followed(path) as reports:
            await until(lambda: names(reports) == ["a"])
            path.write_text("- {name: b, role: boss, url: http://b:1}\n")
            await until(lambda: len(faults()) == 1)
            assert f"{path}:1: [0].role" in faults()[0]
            path.write_bytes(b"\xff\xfe")
            await until(lambda: len(faults()) == 2)
            assert "UTF-8" in faults()[1]
            write(path, [entry("b")])
            await until(lambda: names(reports) == ["b"])
            assert len(reports) == 2

    run(main())
