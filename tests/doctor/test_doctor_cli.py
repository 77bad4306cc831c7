"""`kvroute doctor` as users run it: exit codes, a table at 80 columns, JSON, interruption."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.doctor.rig import TOKENS, DoctorRig, cluster_text, running_rig
from tests.serve.stub_engines import run
from tests.waiting import until


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


async def doctor(file: Path, *options: str) -> Ended:
    process = await started(file, "--prompt-tokens", str(TOKENS), "--timeout", "3 min", *options)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def started(file: Path, *options: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = os.environ | {"COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
    return await asyncio.create_subprocess_exec(
        *kvroute_command("doctor", str(file), *options), stdout=pipe, stderr=pipe, env=environment
    )


def file_of(rig: DoctorRig, folder: Path) -> Path:
    path = folder / "clinic.yaml"
    path.write_text(cluster_text(rig.endpoints), encoding="utf-8")
    return path


def test_a_healthy_cluster_exits_with_0_and_fits_80_columns(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_rig() as rig:
            ended = await doctor(file_of(rig, tmp_path))
        assert ended.code == 0, ended.out + ended.err
        lines = ended.out.splitlines()
        assert max(map(len, lines)) <= 80
        for name in rig.endpoints:
            assert sum(line.split()[:1] == [name] for line in lines if "->" not in line) == 1
        for source in (0, 1):
            for target in (0, 1):
                pair = f" prefill{source} -> decode{target} "
                assert sum(line.startswith(pair) and " yes " in line and "/ 2 Gbps" in line for line in lines) == 1
        assert lines[-1] == "All checks passed."

    run(main())


def test_findings_are_sentences_and_exit_with_1(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_rig(names=("prefill0", "decode0")) as rig:
            await rig.order("decode0", share=1, leg="recompute")
            ended = await doctor(file_of(rig, tmp_path))
        assert ended.code == 1
        assert "1 finding:" in ended.out
        assert " ".join(ended.out.split("1 finding:")[1].split()).startswith(
            "1. prefill0 -> decode0: the request succeeded without a KV transfer"
        )
        assert max(map(len, ended.out.splitlines())) <= 80

    run(main())


def test_json_output_is_one_document(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_rig() as rig:
            ended = await doctor(file_of(rig, tmp_path), "--json", "--pairs", "3")
        document = json.loads(ended.out)
        assert (ended.code, document["ok"], document["findings"]) == (0, True, [])
        assert (len(document["engines"]), len(document["pairs"]), document["pairs_possible"]) == (4, 3, 4)
        assert {pair["moved"] for pair in document["pairs"]} == {"yes"}

    run(main())


@pytest.mark.parametrize(
    ("options", "text", "sentence"),
    [
        ((), "name: nothing\n", "clinic.yaml"),
        (("--pairs", "few"), "", "--pairs: 'few' is not a valid number of pairs"),
        (("--timeout", "30"), "", "--timeout: '30' is not a duration: it has no unit"),
        (("--timeout", "0s"), "", "--timeout: the timeout leaves no time"),
        (("--key-env", "KVROUTE_NO_SUCH_KEY"), "", "KVROUTE_NO_SUCH_KEY is not set"),
    ],
)
def test_bad_input_exits_with_2(tmp_path: Path, options: tuple[str, ...], text: str, sentence: str) -> None:
    async def main() -> None:
        async with running_rig(names=("prefill0", "decode0")) as rig:
            path = file_of(rig, tmp_path)
        if text:
            path.write_text(text, encoding="utf-8")
        process = await started(path, *options)
        out, err = await process.communicate()
        assert (process.returncode, out) == (2, b"")
        assert sentence in err.decode()
        assert "Traceback" not in err.decode()

    run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_request_running(tmp_path: Path, number: signal.Signals) -> None:
    """The prompt would take minutes: its request exists until the command ends, and then it is gone."""

    async def main() -> None:
        async with running_rig(names=("prefill0", "decode0")) as rig:
            for server in rig.fleet.servers.values():
                server.engine.slow(1000.0)
            engine = rig.fleet.servers["decode0"].engine
            process = await started(file_of(rig, tmp_path), "--timeout", "10 min")
            await until(lambda: engine.running > 0)
            process.send_signal(number)
            _, err = await process.communicate()
            assert process.returncode == 130
            assert "interrupted" in err.decode()
            assert "Traceback" not in err.decode()
            await until(lambda: not engine.running and not engine.waiting)

    run(main())
