"""Live: PyTorch's backend `kvroute` on ranks in network namespaces, through the switch and in hierarchical rings."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.all_reduce.star import Star, star, start_rank, switch, xdp
from tests.live.vllm.conftest import BIN, HERE
from tests.live.vllm.scheduled import GROUP, in_use, put, used
from tests.waiting import until

from kvroute_engine.agent.schemes import Scheme

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("all_reduce_components"), pytest.mark.timeout(600)]


def start(
    found: Star, folder: Path, settings: str, rounds: int, stop: Path | None = None
) -> list[subprocess.Popen[str]]:
    """Start one rank in the namespace of each worker. SWITCH in the settings is the switch's address there."""
    ranks = []
    for rank in range(found.workers):
        given = (rank, found.workers, found.address(0), 29500, rounds, *([stop] if stop is not None else []))
        command: list[str | Path] = [BIN / "python", HERE / "reduce_tensors.py", *map(str, given)]
        ranks.append(start_rank(found, rank, command, folder / f"rank{rank}.yaml", settings))
    return ranks


def results(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait for the ranks; all have the same bits, and they are the sum in double precision but for rounding."""
    found = []
    for process in ranks:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        found.append(json.loads(out.splitlines()[-1]))
    assert len({outcome["hash"] for outcome in found}) == 1
    assert max(outcome["error"] for outcome in found) < 1.0
    return found


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_every_size_and_type_goes_through_the_switch(tmp_path: Path, loss: float) -> None:
    """Integers are gloo's."""
    with star(3) as found, switch(found, *xdp(found)):
        found.lose(loss)
        done = results(start(found, tmp_path, "switch: SWITCH\nschemes: [{scheme: ina}]\n", 12))
    assert [outcome["calls"] for outcome in done] == [{"ina": 60, "ring": 1}] * 3
    assert [outcome["fallbacks"] for outcome in done] == [{}] * 3


def test_hierarchical_schemes_by_size(tmp_path: Path) -> None:
    """Two servers of two ranks; each position of a server is a group of its own at the switch."""
    schemes = "[{scheme: hierarchical-ina, up_to: 100 KB}, {scheme: hierarchical-ring}]"
    settings = f"switch: SWITCH\nranks_per_server: [2, 2]\nschemes: {schemes}\n"
    with star(4) as found, switch(found):
        done = results(start(found, tmp_path, settings, 12))
    assert [outcome["calls"] for outcome in done] == [{"hierarchical-ina": 48, "hierarchical-ring": 12, "ring": 1}] * 4


@pytest.mark.parametrize(("scheme", "after"), [("ina", "ring"), ("hierarchical-ina", "hierarchical-ring")])
def test_a_switch_that_is_killed_is_replaced_by_a_ring(tmp_path: Path, scheme: str, after: str) -> None:
    """No rank hangs, and all have the same bits."""
    settings = f"switch: SWITCH\nranks_per_server: [1, 1, 1]\nschemes: [{{scheme: {scheme}}}]\n"
    with star(3) as found, switch(found, *xdp(found)) as (process, _):
        ranks = start(found, tmp_path, settings, 300)
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "running\n"
        process.kill()
        done = results(ranks)
    assert all(outcome["fallbacks"] == {scheme: 1} for outcome in done)
    assert all(outcome["calls"][scheme] >= 1 and outcome["calls"][after] >= 1 for outcome in done), done
    assert len({json.dumps(outcome["calls"], sort_keys=True) for outcome in done}) <= 2, (
        "ranks differ by one operation at most"
    )


def change(folder: Path, version: int, scheme: Scheme) -> None:
    """Write a table with this scheme for small tensors, and wait until it is in use."""
    put(folder, version, (scheme, 4_000), ("ring", None))
    asyncio.run(until(lambda: in_use(folder) == version))
    shown: Scheme = "ring" if scheme == "multi-rail-ring" else scheme
    before = used(folder, shown)
    asyncio.run(until(lambda: used(folder, shown) > before))


def test_a_table_that_changes_while_ranks_reduce(tmp_path: Path) -> None:
    """Each scheme of the table is used in turn by all ranks, which have the exact sums throughout."""
    settings = (
        f"switch: SWITCH\nranks_per_server: [2, 2]\nagent: {tmp_path}\ngroup: {GROUP}\n"
        "also: [ina, hierarchical-ring, hierarchical-ina]\n"
    )
    schemes: tuple[Scheme, ...] = ("ina", "hierarchical-ina", "hierarchical-ring", "multi-rail-ring", "ina")
    with star(4) as found, switch(found) as _:
        ranks = start(found, tmp_path, settings, 100_000, tmp_path / "stop")
        asyncio.run(until(lambda: used(tmp_path, "ring") > 0))
        for version, scheme in enumerate(schemes, 1):
            change(tmp_path, version, scheme)
        (tmp_path / "stop").touch()
        done = results(ranks)
    assert all(outcome["calls"] == done[0]["calls"] for outcome in done)
    assert set(done[0]["calls"]) == {"ring", "ina", "hierarchical-ina", "hierarchical-ring"}
    assert [outcome["fallbacks"] for outcome in done] == [{}] * 4


def test_ranks_return_to_a_switch_that_is_back(tmp_path: Path) -> None:
    """The table says `ina` all the time."""
    settings = f"switch: SWITCH\nagent: {tmp_path}\ngroup: {GROUP}\nalso: [ina]\nrejoin: 1 s\n"
    put(tmp_path, 1, ("ina", None))
    with star(3) as found:
        with switch(found, *xdp(found)) as (process, _):
            ranks = start(found, tmp_path, settings, 100_000, tmp_path / "stop")
            asyncio.run(until(lambda: used(tmp_path, "ina") > 0))
            before = used(tmp_path, "ring")
            process.kill()
            asyncio.run(until(lambda: used(tmp_path, "ring") > before + 100))
        before = used(tmp_path, "ina")
        with switch(found, *xdp(found)):
            asyncio.run(until(lambda: used(tmp_path, "ina") > before + 100))
            (tmp_path / "stop").touch()
            done = results(ranks)
    assert [outcome["fallbacks"] for outcome in done] == [{"ina": 1}] * 3
