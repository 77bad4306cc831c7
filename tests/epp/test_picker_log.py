"""The logs of a picker: restricted and moved requests replay like all others, and `explain` says what moved. The
client of a request is the one that Envoy sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.epp.envoy_rig import address, alone, completion_body, picker
from tests.serve.stub_engines import engines_of, run
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control.log import read_log
from kvroute.epp.server import PickerSpec
from kvroute.types import Arrived, Decode, Served


def test_a_log_of_subsets_sidecars_and_moved_decodes_replays(tmp_path: Path) -> None:
    """Every decision is the same in the replay."""
    log = tmp_path / "events.jsonl"
    names = {}

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        section = f"  log: {{events: {log}}}\n"
        async with picker(prefill + decode, section, PickerSpec(sidecar=True)) as rig:
            names.update({address(engine): engine.name for engine in decode})
            for subset in (None, "127.0.0.1", "192.0.2.1"):
                stream = rig.stream()
                answer = await stream.ask(completion_body(), subset=subset)
                if answer.status:
                    continue
                await stream.respond(200, answer.endpoints[-1])
                await stream.end()
            assert await rig.becomes_idle()

    run(main())
    _, recorded = read_log(log)
    records = list(recorded)
    arrived = [record.event for record in records if isinstance(record.event, Arrived)]
    assert [arrival.only is None for arrival in arrived] == [True, False, False]
    assert all(arrival.both_on_arrival for arrival in arrived)
    moved = [record for record in records if isinstance(record.event, Served)]
    assert len(moved) == 2
    for record in moved:
        (decision,) = record.decisions
        assert isinstance(decision, Decode)
        assert isinstance(record.event, Served)
        assert decision.target == record.event.instance in names.values()
    replayed = CliRunner().invoke(app, ["replay", str(log)])
    assert replayed.exit_code == 0, replayed.output
    explained = CliRunner().invoke(app, ["explain", str(log), "0"], env={"COLUMNS": "200"})
    assert explained.exit_code == 0, explained.output
    assert "instead" in explained.stdout


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/tokenize"])
def test_the_client_of_a_request_is_the_last_address(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Envoy appends it; those before are what the client claims."""

    async def main() -> None:
        async with picker(alone(1), "  log: {access: true}\n") as rig:
            claims = [("x-forwarded-for", "198.51.100.7"), ("x-forwarded-for", "192.0.2.1, 192.0.2.9")]
            stream = rig.stream()
            answer = await stream.ask(completion_body(), path=path, headers=claims)
            if answer.destination:
                await stream.respond(200, answer.endpoints[0], ends=True)
                await stream.end()
            assert await rig.becomes_idle()
            lines = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
            assert [line["client"] for line in lines] == ["192.0.2.9"]

    with caplog.at_level("INFO"):
        run(main())
