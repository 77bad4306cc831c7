"""Live: vLLM with TP=2 on two network namespaces generates the tokens of TP=1; all-reduces through the switch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.all_reduce.star import Star, star, start_rank, switch, xdp
from tests.live.services import FULL
from tests.live.vllm.conftest import BIN, HERE, ROOT, environment, make_model
from tests.live.vllm.scheduled import GROUP, in_use, put, used
from tests.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
OUTPUT_TOKENS, MANY_TOKENS = 48, 192
LARGEST = 256 * 1024
"""Larger tensors take the ring, in bytes."""
SCHEMES = f"schemes: [{{scheme: ina, up_to: {LARGEST} B}}, {{scheme: ring}}]"


class Generation:
    """vLLM's environment, the model, and the tokens of TP=1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_model(folder)
        _install_plug_in(folder)
        quiet = {"PYTHONPATH": f"{ROOT / 'engine/src'}:{folder}", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.environment = environment() | quiet
        done = subprocess.run(
            self._command(1, MANY_TOKENS), env=self.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])

    def expected(self, output_tokens: int) -> list[list[int]]:
        """Return the first tokens of TP=1."""
        return [tokens[:output_tokens] for tokens in self.tokens]

    def _command(self, ranks: int, output_tokens: int) -> list[str]:
        return [str(BIN / "python"), str(HERE / "tensor_parallel.py"), str(self.model), str(ranks), str(output_tokens)]

    def start(
        self, found: Star, output_tokens: int, schemes: str = SCHEMES, **more: str
    ) -> list[subprocess.Popen[str]]:
        """Start both ranks of a tensor-parallel vLLM, each in its namespace. `schemes`: lines of the settings."""
        ranks = []
        (self.folder / "counters0.prom").unlink(missing_ok=True)
        for rank in range(2):
            counters = self.folder / "counters{rank}.prom"
            settings = f"switch: SWITCH\n{schemes}\nmetrics: {counters}\n"
            own = self.environment | {
                "VLLM_HOST_IP": found.address(rank),
                **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": found.address(0), "MASTER_PORT": "29500"},
                **more,
            }
            with (self.folder / f"rank{rank}.log").open("w") as log:
                command, path = self._command(2, output_tokens), self.folder / f"rank{rank}.yaml"
                ranks.append(start_rank(found, rank, command, path, settings, environment=own, log=log))
        return ranks

    def results(self, ranks: Sequence[subprocess.Popen[str]]) -> list[list[list[int]]]:
        """Wait for both ranks and return their tokens."""
        found = []
        for rank, process in enumerate(ranks):
            out, _ = process.communicate(timeout=400)
            assert process.returncode == 0, (self.folder / f"rank{rank}.log").read_text(encoding="utf-8")[-4000:]
            found.append(json.loads(out.splitlines()[-1]))
        return found

    def count(self, name: str, scheme: str) -> int:
        """Return a counter of rank 0."""
        path = self.folder / "counters0.prom"
        lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
        wanted = f'{name}{{rank="0",scheme="{scheme}"}}'
        return next((int(line.split()[-1]) for line in lines if line.startswith(wanted)), 0)


def _install_plug_in(folder: Path) -> None:
    """Write the metadata by which vLLM finds the entry points of this checkout."""
    groups = tomllib.loads((ROOT / "engine/pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    installed = folder / "kvroute-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvroute\nVersion: 0\n", encoding="ascii")
    lines = [
        line
        for group, settings in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in settings.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="ascii")


@pytest.fixture(scope="module")
def generation(all_reduce_components: None, tmp_path_factory: pytest.TempPathFactory) -> Generation:
    """vLLM's tokens with one rank, and what starts two."""
    return Generation(tmp_path_factory.mktemp("tensor-parallel"))


@pytest.mark.parametrize("loss", [0.0, 0.01] if FULL else [0.01])
@pytest.mark.parametrize("plane", ["python", "xdp"])
def test_tokens_are_those_of_one_rank(generation: Generation, plane: str, loss: float) -> None:
    """All-reduces of decodes go through the switch, those of long prompts through gloo's ring."""
    with star(2) as found, switch(found, *(xdp(found) if plane == "xdp" else ())) as (_, used):
        assert used == plane
        found.lose(loss)
        assert generation.results(generation.start(found, OUTPUT_TOKENS)) == [generation.expected(OUTPUT_TOKENS)] * 2
        assert (found.lost > 0) == (loss > 0)
    assert generation.count("kvroute_all_reduces_total", "ina") > 200
    assert generation.count("kvroute_all_reduces_total", "ring") > 0
    assert generation.count("kvroute_all_reduce_fallbacks_total", "ina") == 0


def both_wait(held: Path) -> bool:
    """Return whether both ranks wait in the middle of the generation."""
    return all(held.with_name(f"{held.name}.{rank}").exists() for rank in range(2))


def test_a_switch_that_is_killed_changes_no_token(generation: Generation, tmp_path: Path) -> None:
    held = tmp_path / "go"
    with star(2) as found, switch(found, *xdp(found)) as (process, _):
        ranks = generation.start(found, MANY_TOKENS, KVROUTE_TEST_HOLD=str(held))
        asyncio.run(until(lambda: both_wait(held)))
        process.kill()
        held.touch()
        assert generation.results(ranks) == [generation.tokens] * 2
    assert generation.count("kvroute_all_reduces_total", "ina") > 100
    assert generation.count("kvroute_all_reduces_total", "ring") > 100
    assert generation.count("kvroute_all_reduce_fallbacks_total", "ina") == 1


def scheduled(folder: Path) -> str:
    """Return the settings of a group whose schemes come from a table."""
    return f"agent: {folder}\ngroup: {GROUP}\nalso: [ina]"


def test_a_table_that_changes_changes_no_token(generation: Generation, tmp_path: Path) -> None:
    """From the ring to the switch and back, in the middle of a generation."""
    with star(2) as found, switch(found, *xdp(found)):
        ranks = generation.start(found, MANY_TOKENS, scheduled(tmp_path))
        asyncio.run(until(lambda: used(tmp_path, "ring") > 100))
        put(tmp_path, 1, ("ina", LARGEST), ("ring", None))
        asyncio.run(until(lambda: used(tmp_path, "ina") > 100))
        put(tmp_path, 2, ("ring", None))
        asyncio.run(until(lambda: in_use(tmp_path) == 2))
        put(tmp_path, 3, ("ina", None))
        assert generation.results(ranks) == [generation.tokens] * 2
    assert in_use(tmp_path) == 3
    assert generation.count("kvroute_all_reduces_total", "ina") == used(tmp_path, "ina") > 100
    assert generation.count("kvroute_all_reduce_fallbacks_total", "ina") == 0


def test_a_switch_of_the_table_that_is_killed_changes_no_token(generation: Generation, tmp_path: Path) -> None:
    """The table says `ina` before, during and after."""
    put(tmp_path, 1, ("ina", None))
    held = tmp_path / "go"
    with star(2) as found, switch(found, *xdp(found)) as (process, _):
        ranks = generation.start(found, MANY_TOKENS, scheduled(tmp_path), KVROUTE_TEST_HOLD=str(held))
        asyncio.run(until(lambda: both_wait(held)))
        process.kill()
        put(tmp_path, 2, ("ina", LARGEST), ("ring", None))
        held.touch()
        assert generation.results(ranks) == [generation.tokens] * 2
    assert in_use(tmp_path) == 2
    assert used(tmp_path, "ring") > 100
    assert generation.count("kvroute_all_reduce_fallbacks_total", "ina") == 1


def test_a_wrong_sum_changes_tokens(generation: Generation) -> None:
    """The control: the comparison would notice it."""
    with star(2) as found, switch(found):
        ranks = generation.start(found, OUTPUT_TOKENS, KVROUTE_TEST_CORRUPT="200")
        for tokens in generation.results(ranks):
            assert tokens != generation.expected(OUTPUT_TOKENS)
