"""Reload of the cluster file: what changes, what is carried over, what is rejected, and what is logged."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from tests.serve.rig import CLUSTER, MODEL, Rig, rig, with_section
from tests.serve.stub_engines import Gate, deployment, engines_of, listening, serving, tokens
from tests.waiting import becomes_true, until

from kvroute import __version__
from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.assembly import Deployment, Gateway
from kvroute.topology import parse
from kvroute.types import CapacityLearned, Endpoint, InputError, InstanceMeasured, KvStored, TransferMeasured

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30
RARE_HEALTH_CHECKS = "  health: {interval: 1 h}\n"


def _reader(gate: Rig, section: str = "", text: str = CLUSTER) -> Callable[[], Deployment]:
    endpoints = gate.fleet.ready().instances
    return lambda: Deployment.of(with_section(section, text), "new.yaml", endpoints=endpoints)


def _logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.message == event]


def _replays(log: Path) -> bool:
    header, records = read_log(log)
    return all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(parse(CLUSTER)), records)
    )


def test_a_reload_changes_the_policy_and_an_invalid_file_changes_nothing() -> None:
    """Requests in flight stay on their engines."""

    async def run() -> None:
        async with rig() as gate:
            gate.slow(10)
            running = asyncio.create_task(gate.ask(PROMPT, tokens=40, stream=True))
            while not gate.held_resources()["requests"]:
                await asyncio.sleep(0)
            assert await gate.gateway.reload(_reader(gate, "  policy: round-robin\n"))
            wrong = _reader(gate, "  policy: square-robin\n")
            with pytest.raises(InputError, match="round-robin"):
                wrong()
            assert not await gate.gateway.reload(wrong)
            assert (await gate.ask(PROMPT)).status == 200
            assert len((await running).events) == 40
            page = (await gate.get("/metrics")).body.decode()
            assert 'kvroute_reloads_total{outcome="taken"} 1\n' in page
            assert 'kvroute_reloads_total{outcome="refused"} 1\n' in page
            assert 'policy="round-robin"' in page
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_reloads_that_wait_are_merged_and_the_latest_counts() -> None:
    """Each call returns when the file is served that is the latest."""

    async def run() -> None:
        async with rig() as gate:
            reads = []

            def reader(number: int) -> Callable[[], Deployment]:
                def read() -> Deployment:
                    reads.append(number)
                    return _reader(gate, f"  limits: {{in_flight: {number + 1}}}\n")()

                return read

            assert all(await asyncio.gather(*(gate.gateway.reload(reader(number)) for number in range(20))))
            assert reads == [19]
            first = asyncio.create_task(gate.gateway.reload(reader(20)))
            await until(lambda: 20 in reads)
            assert all(await asyncio.gather(*(gate.gateway.reload(reader(number)) for number in range(21, 30))))
            assert await first
            assert reads == [19, 20, 29]
            assert gate.gateway.runtime.settings.limits.in_flight == 30
            assert 'kvroute_reloads_total{outcome="taken"} 3\n' in (await gate.get("/metrics")).body.decode()

    uvloop.run(run())


def test_a_reload_waits_while_two_earlier_clusters_have_requests() -> None:
    """Each of them holds an index of all cached prefixes."""

    async def run() -> None:
        prefill, decode = engines_of("vllm")
        gates = [Gate(), Gate()]
        async with listening(prefill + decode):
            made = deployment(prefill + decode)
            async with serving(made) as front:
                held = []
                for gate in gates:
                    for engine in prefill:
                        engine.serve = gate.before(tokens)
                    held.append(asyncio.create_task(front.ask()))
                    await gate.entered.wait()
                    assert await front.gateway.reload(lambda: made)
                for engine in prefill:
                    engine.serve = tokens
                third = asyncio.create_task(front.gateway.reload(lambda: made))
                for _ in range(3):
                    assert (await front.ask()).status == 200
                assert len(front.gateway.peers.cores()) == 3
                gates[0].open.set()
                assert (await held[0]).status == 200
                assert await third
                assert len(front.gateway.peers.cores()) <= 3
                gates[1].open.set()
                assert (await held[1]).status == 200
                last = asyncio.create_task(front.gateway.reload(lambda: made))
                assert await last

    uvloop.run(run())


@pytest.mark.parametrize("scraped", [True, False], ids=["engines-report", "engines-do-not-report"])
def test_requests_in_flight_still_count_after_a_reload(tmp_path: Path, scraped: bool) -> None:
    """The new core counts the old core's requests on each engine as load from others, until they end."""
    log = tmp_path / "events.log"
    path = "/metrics" if scraped else "/nowhere"
    section = f"{RARE_HEALTH_CHECKS}  scrape: {{interval: {'1 h' if scraped else '20 ms'}, path: {path}}}\n"
    section += f"  log: {{events: {log}}}\n"

    async def run() -> None:
        async with rig(section) as gate:
            if scraped:
                await until(lambda: len(gate.gateway.runtime.measured) == 4)
            gate.slow(100)
            tasks = [asyncio.create_task(gate.ask(f"{n} {PROMPT}", tokens=80, stream=True)) for n in range(12)]
            engines = gate.gateway.runtime.engines
            await until(lambda: sum(engines[name].in_flight for name in ("decode0", "decode1")) == 12)
            assert await gate.gateway.reload(_reader(gate, section))
            gate.slow(1)
            assert [len((await task).events) for task in tasks] == [80] * 12
            await until(lambda: not any(engine.in_flight for engine in engines.values()))

            # An engine that reports its load is scraped only once an hour here. The test sends no request meanwhile: a
            # load event also counts the new core's own requests.
            def given_back() -> bool:
                gate.gateway.runtime.events.flush()  # type: ignore[union-attr]
                return not any(event.running for event in _loads(log).values())

            if not scraped:
                await until(given_back)
            assert (await gate.ask(PROMPT)).status == 200
            assert scraped or await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    first: dict[str, InstanceMeasured] = {}
    for record in read_log(log)[1]:
        if isinstance(record.event, InstanceMeasured):
            first.setdefault(record.event.instance, record.event)
    assert sum(first[name].running for name in ("decode0", "decode1")) == 12
    assert _replays(log)
    assert _replays(tmp_path / "events.log.1")


def _loads(log: Path) -> dict[str, InstanceMeasured]:
    """Return the latest load event of each instance."""
    events = [record.event for record in read_log(log)[1]]
    return {event.instance: event for event in events if isinstance(event, InstanceMeasured)}


def test_the_prefix_index_is_carried_over(tmp_path: Path) -> None:
    """Every chain of every instance is carried over, and the log that begins with the reload replays; with another
    block size no chain is carried over."""
    log = tmp_path / "events.log"
    section = f"  log: {{events: {log}}}\n"

    async def run() -> None:
        async with rig(section) as gate:
            for n in range(12):
                assert (await gate.ask(f"{n % 5} {PROMPT * (1 + n % 3)}")).status == 200
            before = gate.gateway.runtime.control.prefix
            held = [sorted(before.chains(index)) for index in range(4)]
            assert sum(map(len, held)) > 4
            assert await gate.gateway.reload(_reader(gate, section + "  policy: round-robin\n"))
            after = gate.gateway.runtime.control.prefix
            assert after is not before
            for index, chains in enumerate(held):  # engines' last KV events may arrive after the reload and add blocks
                current_chains = list(after.chains(index))
                assert all(any(current[: len(chain)] == chain for current in current_chains) for chain in chains)
            assert (await gate.ask(f"0 {PROMPT}")).status == 200
            assert await gate.becomes_idle(), gate.held_resources()
            assert await gate.gateway.reload(_reader(gate, "  prompt: {block_tokens: 32}\n"))
            assert not any(gate.gateway.runtime.control.prefix.used_blocks(index) for index in range(4))

    uvloop.run(run())
    assert _replays(log)
    assert any(isinstance(record.event, KvStored) for record in read_log(log)[1])


def test_learned_values_of_foresight_are_carried_over(tmp_path: Path) -> None:
    """The new core and its log contain them, both for foresight as policy and as shadow policy. Nothing is carried over
    for a tier whose capacity differs in the new file."""
    log = tmp_path / "events.log"
    section = f"  log: {{events: {log}}}\n"
    changed = CLUSTER.replace(
        "pod1, uplinks: {count: 4, capacity: 100 Gbps}", "pod1, uplinks: {count: 1, capacity: 10 Gbps}"
    )
    changed = changed.replace(
        "pod0, uplinks: {count: 4, capacity: 100 Gbps}", "pod0, uplinks: {count: 1, capacity: 10 Gbps}"
    )

    async def run() -> None:
        async with rig(section) as gate:
            runtime = gate.gateway.runtime
            learned = (0.0, 0.0, 0.5, -1.0, 0.25), (0.0, 0.0, 2.0, 3.0, 1.0), (0, 0, 2, 3, 1), (None, None, 1, 0, 1)
            runtime.notify(CapacityLearned(runtime.now(), *learned, answers=(7.0, 9.0)))
            runtime.notify(TransferMeasured(runtime.now(), "prefill0", "decode1", 1e9, 5.0))
            assert (await gate.ask(PROMPT)).status == 200
            for policy in ("  policy: round-robin\n  shadow: foresight\n", "  policy: foresight\n"):
                before = gate.gateway.runtime.control
                assert await gate.gateway.reload(_reader(gate, section + policy))
                after, now = gate.gateway.runtime.control, gate.gateway.now()
                assert after is not before
                known, previous = after.learned(now), before.learned(now)
                assert known is not None
                assert previous is not None
                assert [tier.transfers for tier in known] == [tier.transfers for tier in previous]
                assert known[3].transfers >= 3
                assert [tier.factor for tier in known] == pytest.approx([tier.factor for tier in previous])
                assert known[3].factor < 0.9
                assert after.oracle.learned_ratio(now) == before.oracle.learned_ratio(now)
                assert any(after.oracle.learned_ratio(now))
                assert (await gate.ask(PROMPT)).status == 200
            assert await gate.gateway.reload(_reader(gate, section, changed))
            known = gate.gateway.runtime.control.learned(gate.gateway.now())
            assert known is not None
            assert known[2].weight > 0
            assert known[3].weight == 0

    uvloop.run(run())
    for file in (tmp_path / "events.log.1", tmp_path / "events.log.2", tmp_path / "events.log.3"):
        header, records = read_log(file)
        core = header.spec.build(parse(header.cluster))
        assert all(decisions_equal(record.decisions, again) for record, again in replay(core, records))
        assert any(isinstance(record.event, CapacityLearned) for record in read_log(file)[1])


def test_the_kv_event_stream_continues_without_a_gap() -> None:
    """Blocks from earlier events stay known, later events are added, and no gap is detected."""

    async def run() -> None:
        section = "  prefix: events\n"
        async with rig(section) as gate:

            def known() -> int:
                prefix = gate.gateway.runtime.control.prefix
                return sum(prefix.used_blocks(index) for index in range(4))

            async def gaps() -> list[str]:
                page = (await gate.get("/metrics")).body.decode()
                return [line for line in page.splitlines() if line.startswith("kvroute_kv_event_gaps_total{")]

            # Events published before the gateway subscribes become known only with the next event, and are a gap.
            for number in itertools.count(1):
                assert (await gate.ask(list(range(10_000 * number, 10_000 * number + 1_600)))).status == 200
                if await becomes_true(partial(lambda least: known() >= least, number * 2 * 99), patience_s=5):
                    break
            before, gaps_before = known(), await gaps()
            for policy in ("round-robin", "netkv"):
                assert await gate.gateway.reload(_reader(gate, f"{section}  policy: {policy}\n"))
                assert known() == before
            assert (await gate.ask(list(range(5_000, 6_600)))).status == 200
            await until(lambda: known() >= before + 2 * 99)
            assert await gaps() == gaps_before

    uvloop.run(run())


def test_health_and_breaker_states_are_carried_over() -> None:
    """An instance that is down stays down until its next passed check; an open breaker stays open."""

    async def run() -> None:
        section = "  health: {interval: 20 ms, failures: 1}\n  breaker: {failures: 2, open: 1 h}\n"
        async with rig(section) as gate:
            await gate.stop_engine("decode0")
            assert await gate.becomes("decode0", False)
            availability = gate.gateway.runtime.engines["prefill0"].availability
            for _ in range(2):
                availability.failed(availability.started(gate.gateway.now()), gate.gateway.now())
            assert await gate.gateway.reload(_reader(gate, section + "  policy: round-robin\n"))
            engines = gate.gateway.runtime.engines
            assert {name for name, engine in engines.items() if not engine.availability.up} == {
                "prefill0",
                "decode0",
            }
            assert engines["prefill0"].availability.breaker.state(gate.gateway.now()) == "open"
            await gate.restart_engine("decode0")
            assert await gate.becomes("decode0", True)
            assert (await gate.ask(PROMPT)).status == 200

    uvloop.run(run())


def test_an_instance_that_recovers_around_a_reload_is_marked_up() -> None:
    """The new health checks start with the old state, so that their first passed check changes it."""

    async def run() -> None:
        section = "  health: {interval: 1 h, failures: 1}\n"
        async with rig(section) as gate:
            url = gate.fleet.ready().instances["decode0"].url + "/health"
            await gate.stop_engine("decode0")
            while await asyncio.to_thread(_get, url, True):
                await asyncio.sleep(0.01)
            assert await gate.gateway.reload(_reader(gate, section))
            assert await gate.becomes("decode0", False)
            await gate.restart_engine("decode0")
            assert not gate.gateway.runtime.engines["decode0"].availability.up
            assert await gate.gateway.reload(_reader(gate, section))
            assert await gate.becomes("decode0", True)

    uvloop.run(run())


def test_concurrent_reloads_run_one_after_the_other() -> None:
    """A collector that takes some time to stop is running."""
    active: list[str] = []
    most: list[int] = []

    def one_by_one(reader: Callable[[], Deployment], policy: str) -> Callable[[], Deployment]:
        def read() -> Deployment:
            active.append(policy)
            time.sleep(0.05)  # long enough to detect another one
            most.append(len(active))
            active.remove(policy)
            return reader()

        return read

    async def run() -> None:
        section = "  oracle: {source: prometheus, prometheus: {url: 'http://127.0.0.1:9', per_tier: {rack: up}}}\n"
        async with rig(section) as gate:
            policies = ("round-robin", "cla", "netkv")
            readers = [one_by_one(_reader(gate, f"{section}  policy: {policy}\n"), policy) for policy in policies]
            first = asyncio.create_task(gate.gateway.reload(readers[0]))
            await until(lambda: bool(active or most))
            assert await asyncio.gather(*[gate.gateway.reload(reader) for reader in readers[1:]]) == [True] * 2
            assert await first
            assert most == [1, 1]  # the second one waited, and the third one replaced it
            assert gate.gateway.runtime.settings.policy == "netkv"
            assert (await gate.ask(PROMPT)).status == 200
            page = (await gate.get("/metrics")).body.decode()
            assert 'kvroute_reloads_total{outcome="taken"} 2\n' in page

    uvloop.run(run())


def test_after_any_error_while_reading_the_old_configuration_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the file, of a file that it names, or of the code: the reload is rejected, with one log line for
    each."""
    notes = tmp_path / "notes"
    notes.write_text("somebody's")

    async def run() -> None:
        async with rig() as gate:

            def broken() -> Deployment:
                raise KeyError("name")

            unknown_instance = CLUSTER.replace("name: decode1", "name: decode7")
            taken = f"  log: {{events: {notes}}}\n"
            before = gate.gateway.runtime
            for reader in (broken, _reader(gate, "", unknown_instance), _reader(gate, taken)):
                assert not await gate.gateway.reload(reader)
            assert gate.gateway.runtime is before
            assert (await gate.ask(PROMPT)).status == 200

    uvloop.run(run())
    reasons = [entry["reason"] for entry in _logged(caplog, "reload_refused")]
    assert reasons[0] == "KeyError: 'name'"
    assert "instance decode7 has no emulated engine" in reasons[1]
    assert "notes: exists and is not a kvroute log" in reasons[2]


def test_settings_are_applied_or_reported_as_needing_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """Retries, the admin token and host names apply at once; addresses and tracing need a new process."""
    token, other = "a" * 20, "b" * 20

    async def push(gate: Rig, shown: str, host: str) -> int:
        headers = {"Authorization": f"Bearer {shown}", "Host": host}
        async with gate.session.post(
            f"{gate.admin}/telemetry", data=b'{"per_tier": {"rack": 0.5}}', headers=headers
        ) as response:
            return response.status

    async def run() -> None:
        push_source = "  oracle: {source: push}\n"
        async with rig(push_source) as gate:
            assert await push(gate, token, "localhost") == 200
            congestion = gate.gateway.runtime.control.oracle.congestion(gate.gateway.now())
            assert congestion[1] > 0
            plain = CLUSTER.replace("admin: {port: 0}", f"admin: {{port: 0, push_token: {token}, hosts: [ops]}}")
            assert await gate.gateway.reload(_reader(gate, push_source, plain))
            assert list(gate.gateway.runtime.control.oracle.congestion(gate.gateway.now())) == list(congestion)
            assert [await push(gate, shown, "ops") for shown in (token, other)] == [200, 401]
            assert await gate.gateway.reload(_reader(gate, push_source, plain.replace(token, other)))
            assert [await push(gate, shown, "ops") for shown in (token, other)] == [401, 200]
            assert await gate.gateway.reload(_reader(gate))
            assert await push(gate, other, "ops") == 403
            assert await push(gate, other, "localhost") == 404
            assert not _logged(caplog, "reload_needs_restart")

            await gate.command("prefill0", fail_next=50, status=500, leg="prefill")
            await gate.command("prefill1", fail_next=50, status=500, leg="prefill")
            assert await gate.gateway.reload(_reader(gate, "  retries: {share: 0, floor_per_s: 0}\n"))
            for _ in range(20):
                await gate.ask(PROMPT)
            page = (await gate.get("/metrics")).body.decode()
            assert 'kvroute_retries_refused_total{leg="prefill"} ' in page

            moved = CLUSTER.replace("listen: {port: 0}", "listen: {port: 1}").replace(
                "admin: {port: 0}", "admin: {port: 2}"
            )
            for _ in range(2):
                caplog.clear()
                assert await gate.gateway.reload(_reader(gate, "  tracing: {share: 0.5}\n", moved))
                fields = [entry["field"] for entry in _logged(caplog, "reload_needs_restart")]
                assert fields == ["gateway.listen.port", "gateway.admin.port", "gateway.tracing.share"]

    uvloop.run(run())


def test_new_connections_get_the_new_certificate(tmp_path: Path) -> None:
    """New TLS connections get it; TLS itself stays on."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    for name in ("a", "b"):
        files = ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"]
        subprocess.run(["openssl", "req", "-x509", *curve, *files], check=True, capture_output=True)

    def text(name: str) -> str:
        tls = f"{{certificate: {tmp_path}/{name}.pem, key: {tmp_path}/{name}.key}}"
        return CLUSTER.replace("listen: {port: 0}", f"listen: {{port: 0, tls: {tls}}}")

    async def run() -> None:
        async with rig("", text("a")) as gate:
            address = ("127.0.0.1", gate.gateway.port)
            for name in ("a", "b"):
                assert await gate.gateway.reload(_reader(gate, "", text(name)))
                shown = await asyncio.to_thread(ssl.get_server_certificate, address)
                assert shown == (tmp_path / f"{name}.pem").read_text()

    uvloop.run(run())


def test_sessions_keep_their_instances_over_a_reload(tmp_path: Path) -> None:
    """The new core knows where each session was served last."""
    log = tmp_path / "events.log"
    affinity = "  session_affinity: {header: X-Session-Id, bonus: 10 s}\n"
    section = f"  policy: round-robin\n{affinity}  log: {{events: {log}}}\n"

    async def run() -> None:
        async with rig(section) as gate:
            for number in range(3):
                body = {"model": MODEL, "prompt": f"{number} {PROMPT}", "max_tokens": 2}
                assert (await gate.post(body, headers={"X-Session-Id": f"session {number}"})).status == 200
            (before,) = gate.gateway.runtime.control.sessions(0.0)
            assert len({(prefill, decode) for _, prefill, decode in before.sessions}) > 1
            assert await gate.gateway.reload(_reader(gate, section))
            control = gate.gateway.runtime.control
            await until(lambda: [session.sessions for session in control.sessions(0.0)] == [before.sessions])

    uvloop.run(run())
    assert _replays(log)


def test_request_numbers_in_the_log_continue(tmp_path: Path) -> None:
    """No two requests of one process have the same number."""

    async def run() -> None:
        async with rig() as gate:
            for _ in range(3):
                assert (await gate.ask("hi")).status == 200
            assert await gate.gateway.reload(_reader(gate))
            assert gate.gateway.runtime.next_number() == 3

    uvloop.run(run())


def test_a_gateway_is_ready_once_the_health_of_its_engines_is_known() -> None:
    """The gateway is not ready before the health of its engines is known, or without engines; after a reload it stays
    ready."""

    async def dead() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
            endpoints = {name: Endpoint(url=url) for name in ("prefill0", "prefill1", "decode0", "decode1")}
            gateway = Gateway(Deployment.of(CLUSTER + RARE_HEALTH_CHECKS, "test.yaml", endpoints=endpoints))
            try:
                await gateway.start()
                assert gateway.ready() == "the first health checks are not complete"
                await until(lambda: gateway.ready() != "the first health checks are not complete")
                assert gateway.ready() == "no prefill instance is up"
            finally:
                await gateway.close()

    async def alive() -> None:
        async with rig() as gate:
            await until(lambda: gate.gateway.ready() == "")
            assert await gate.gateway.reload(_reader(gate))
            assert gate.gateway.ready() == ""

    uvloop.run(dead())
    uvloop.run(alive())


def test_sighup_reloads_the_cluster_file(tmp_path: Path) -> None:
    """SIGHUP works from the start of the process and repeatedly; a wrong file changes nothing, and SIGTERM ends the
    process without error."""
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(CLUSTER)
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--ready-file", str(ready)]
    with subprocess.Popen(
        [*command, "--until-eof"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            url = _until_serving(process, ready)
            # A reload that an earlier SIGHUP caused may already read the next file: it may be refused more than once.
            for policy, outcome in (
                ("round-robin", r'kvroute_info\{version="VERSION",policy="round-robin"\} 1'),
                ("square-robin", r'kvroute_reloads_total\{outcome="refused"\} [1-9]'),
                ("cla", r'kvroute_info\{version="VERSION",policy="cla"\} 1'),
            ):
                _replace(file, with_section(f"  policy: {policy}\n"))
                process.send_signal(signal.SIGHUP)
                pattern = re.compile(outcome.replace("VERSION", re.escape(__version__)))
                while not pattern.search(_get(url + "/metrics")):
                    assert process.poll() is None
                    time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == 0
            assert b"reload_refused" in stderr
            assert b"square-robin" in stderr
        finally:
            process.kill()


def _replace(file: Path, text: str) -> None:
    """Replace the file atomically: a reload in progress would reject a half-written file."""
    half = file.with_suffix(".half")
    half.write_text(text)
    half.replace(file)


def _until_serving(process: subprocess.Popen[bytes], ready: Path) -> str:
    """Wait until the process serves and return its URL; send SIGHUP repeatedly as soon as the process handles it."""
    sent = 0
    while not (ready.exists() and (text := ready.read_bytes()).endswith(b"}")):
        assert process.poll() is None
        if _handles_sighup(process.pid):
            process.send_signal(signal.SIGHUP)
            sent += 1
        time.sleep(0.01)
    assert sent > 10
    return str(msgspec.json.decode(text)["url"])


def _handles_sighup(pid: int) -> bool:
    """Return whether the process has a handler for SIGHUP."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) & 1 << signal.SIGHUP - 1)


def _get(url: str, status: bool = False) -> str:
    """Return a page or its status; empty if there is no response."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.status) if status else str(response.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""
