"""Engines that join and leave a running gateway through its watched file."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.serve.lifecycle.membership_rig import DISCOVERY, DiscoveryRig, discovering, emulated, write
from tests.serve.rig import MODEL, with_section
from tests.serve.stub_engines import Engine, Gate, completion, listening, run, tokens
from tests.waiting import HANGS_S, becomes_true, until

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.emulator import EmulatedCluster
from kvroute.serve.assembly import Deployment
from kvroute.topology import parse
from kvroute.types import ClusterChanged, InputErrors

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30


def entry(engine: Engine, uid: str = "1", **more: Any) -> dict[str, Any]:
    """Return the entry of a stub engine."""
    place = {"node": f"node-{engine.name}", "rack": "rack0"}
    bootstrap = {"bootstrap": f"127.0.0.1:{engine.port}"} if engine.role == "prefill" else {}
    url = f"http://127.0.0.1:{engine.port}"
    return {"name": engine.name, "uid": uid, "role": engine.role, "url": url, **place, **bootstrap} | more


def pair() -> tuple[Engine, Engine]:
    """Return a prefill and a decode engine."""
    return Engine("prefill0", "prefill"), Engine("decode0", "decode")


def replays(log: Path) -> bool:
    """Whether a log gives the same decisions again."""
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster))
    return all(decisions_equal(record.decisions, again) for record, again in replay(control, records))


@pytest.mark.slow
def test_engines_come_and_go_under_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twenty joins and leaves: every request is answered once and whole, no leg fails although each engine stops as
    soon as it has left, and the log replays."""
    log = tmp_path / "events.log"
    everyone = [f"prefill{n}" for n in range(4)] + [f"decode{n}" for n in range(4)]
    listed = {*everyone[:2], *everyone[4:6]}

    async def client(gate: DiscoveryRig, number: int, over: asyncio.Event) -> int:
        for turn in itertools.count():
            if over.is_set():
                return turn
            response = await gate.ask(f"{number} {turn} {PROMPT}", tokens=6, stream=bool(turn % 2))
            assert response.status == 200, response.body
            assert len(response.events) == 6 if turn % 2 else response.json["usage"]["completion_tokens"] == 6
        raise AssertionError

    async def change(gate: DiscoveryRig, fleet: EmulatedCluster, name: str) -> bool:
        """Let an engine join, or leave and then stop, unless it is the last one of its role."""
        role = name.rstrip("0123456789")
        if name not in listed:
            await fleet.servers[name].come_back()
            listed.add(name)
        elif sum(listed_name.startswith(role) for listed_name in listed) > 1:
            listed.remove(name)
        else:
            return False
        gate.list(sorted(listed))
        await until(lambda: gate.members == listed)
        if name in listed:
            await until(lambda: gate.up == listed)
        else:
            await gate.session.post(f"{gate.entries[name]['url']}/emulator/restart", json={"down_s": 3600})
        return True

    async def main() -> None:
        async with emulated(tmp_path, 4, 4, sorted(listed), f"  log: {{events: {log}}}\n") as (gate, fleet):
            over, draw, changes = asyncio.Event(), random.Random(5), 0
            clients = [asyncio.create_task(client(gate, number, over)) for number in range(6)]
            while changes < 20:
                changes += await change(gate, fleet, draw.choice(everyone))
                sent = _requests(gate)
                await until(lambda sent=sent: _requests(gate) > sent + 3)  # type: ignore[misc]
                assert not any(task.done() for task in clients), [task for task in clients if task.done()]
            over.set()
            assert all([await task > 0 for task in clients])
            await gate.becomes_up(*listed)
            assert await gate.becomes_idle(), gate.held_resources()
            page = await gate.metrics()
            assert f'kvroute_discovered_engines{{state="member"}} {len(listed)}\n' in page
            assert listed < set(everyone)
            assert not any(f'engine="{name}"' in page for name in set(everyone) - listed)
            assert all(f'kvroute_instance_up{{engine="{name}"' in page for name in listed)
            assert {instance.name for instance in gate.gateway.state.layout.instances} == listed

    run(main())
    assert not [record for record in caplog.records if record.message in ("leg_failed", "cluster_change_failed")]
    assert sum(isinstance(record.event, ClusterChanged) for record in read_log(log)[1]) > 10
    assert replays(log)


def _requests(gate: DiscoveryRig) -> int:
    """Number of requests that the gateway has received."""
    return gate.gateway.state.tick(gate.gateway.now()).requests


def test_requests_on_a_leaving_engine_finish_there(tmp_path: Path) -> None:
    """It gets no new requests, and leaves when its last one has ended."""
    prefill, old = pair()
    gate_of = Gate()
    old.serve, new = gate_of.before(tokens), Engine("decode1", "decode")

    async def main() -> None:
        async with listening([prefill, old, new]):
            entries = {engine.name: entry(engine) for engine in (prefill, old, new)}
            async with discovering(tmp_path, entries, ["decode0", "prefill0"]) as gate:
                running = asyncio.create_task(gate.post(completion()))
                await gate_of.entered.wait()
                gate.list(["decode1", "prefill0"])
                await gate.becomes_up("decode1", "prefill0")
                assert gate.members == {"decode0", "decode1", "prefill0"}
                page = await gate.metrics()
                assert 'kvroute_discovered_engines{state="draining"} 1\n' in page
                for _ in range(5):
                    assert (await gate.post(completion())).status == 200
                assert len(old.received) == 1
                gate_of.open.set()
                assert (await running).json["choices"][0]["text"].startswith("decode0")
                await until(lambda: gate.members == {"decode1", "prefill0"})
                assert await gate.becomes_idle(), gate.held_resources()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode", "passthrough"])
def test_after_the_drain_time_requests_are_retried_elsewhere(tmp_path: Path, leg: str) -> None:
    """The calls to the engine are aborted, and the rules for failed legs apply."""
    engines = {name: Engine(name, name[:-1]) for name in ("prefill0", "prefill1", "decode0", "decode1")}  # type: ignore[arg-type]
    stuck = engines["decode0" if leg == "decode" else "prefill0"]
    hangs = Gate()
    stuck.serve = hangs.before(tokens)
    listed = ["decode0", "prefill0"]

    async def main() -> None:
        async with listening(list(engines.values())):
            entries = {name: entry(engine) for name, engine in engines.items()}
            text = DISCOVERY.replace("drain: 60 s", "drain: 0.1 s")
            async with discovering(tmp_path, entries, listed, text=text) as gate:
                body = {"model": MODEL, "input": "text"} if leg == "passthrough" else completion()
                path = "/v1/embeddings" if leg == "passthrough" else "/v1/completions"
                running = asyncio.create_task(gate.post(body, path))
                await hangs.entered.wait()
                gate.list(entries)
                await gate.becomes_up(*entries)
                gate.list(entries.keys() - {stuck.name})
                assert (await running).status == 200
                await until(lambda: stuck.name not in gate.members)
                assert hangs.cancelled
                assert await gate.becomes_idle(), gate.held_resources()

    run(main())


def test_an_engine_with_a_name_or_an_address_of_another_one_inherits_nothing(tmp_path: Path) -> None:
    """The same name and address with another uid: breaker, load and cached prefixes are new; the old engine's request
    is retried at once, however long the drain time is."""
    prefill, decode = pair()

    async def main() -> None:
        async with listening([prefill, decode]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            section = "  breaker: {failures: 3, open: 1 h}\n"
            text = DISCOVERY.replace("interval: 200 ms}", "interval: 200 ms, panic: 0}", 1)
            async with discovering(tmp_path, entries, ["decode0", "prefill0"], section, text) as gate:
                assert (await gate.post(completion())).status == 200
                failing, now = gate.gateway.runtime.engines["decode0"].availability, gate.gateway.now()
                for _ in range(3):
                    failing.failed(failing.started(now), now)
                assert gate.up == {"prefill0"}
                old = gate.gateway.runtime.engines["decode0"]
                control = gate.gateway.runtime.control
                assert any(True for _ in control.caches.chains(control.cluster.index("prefill0")))
                gate.list(["decode0", "prefill0"], decode0={"uid": "2"}, prefill0={"uid": "2"})
                await gate.becomes_up("decode0", "prefill0")
                assert gate.gateway.runtime.engines["decode0"] is not old
                for name in ("decode0", "prefill0"):
                    assert not any(True for _ in control.caches.chains(control.cluster.index(name)))
                assert (await gate.post(completion())).status == 200
                # Another name at the same address.
                write(gate.file, [entry(prefill, "3", name="prefill9"), entry(decode, "3", name="decode9")])
                await gate.becomes_up("decode9", "prefill9")
                assert gate.members == {"decode9", "prefill9"}
                assert (await gate.post(completion())).status == 200

    run(main())


def test_a_replaced_engine_does_not_wait_for_the_requests_of_the_old_one(tmp_path: Path) -> None:
    """Another uid with the name proves that the old engine has ended."""
    prefill, decode = pair()
    hangs, fresh = Gate(), Engine("decode0", "decode")
    decode.serve = hangs.before(tokens)

    async def main() -> None:
        async with listening([prefill, decode, fresh]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            text = DISCOVERY.replace("drain: 60 s", "drain: 1 h")
            async with discovering(tmp_path, entries, ["decode0", "prefill0"], text=text) as gate:
                running = asyncio.create_task(gate.post(completion()))
                await hangs.entered.wait()
                spare = entry(fresh, "2")
                write(gate.file, [entry(prefill), spare])
                await until(lambda: hangs.cancelled)
                # With no other decode engine up the request may fail; it is answered in any case.
                assert (await running).status in (200, 503)
                await gate.becomes_up("decode0", "prefill0")
                assert (await gate.post(completion())).status == 200
                assert fresh.received
                assert len(decode.received) == 1

    run(main())


def test_an_engine_that_is_not_ready_gets_no_requests(tmp_path: Path) -> None:
    """It stays a member, so that it serves as soon as it is ready."""
    prefill, decode = pair()
    other = Engine("decode1", "decode")

    async def main() -> None:
        async with listening([prefill, decode, other]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode, other)}
            async with discovering(tmp_path, entries, ["decode0", "decode1", "prefill0"]) as gate:
                gate.list(entries, decode0={"ready": False})
                await gate.becomes_up("decode1", "prefill0")
                assert gate.members == set(entries)
                assert {(await gate.post(completion())).status for _ in range(4)} == {200}
                assert not decode.received
                gate.list(entries)
                await gate.becomes_up(*entries)

    run(main())


def test_the_gateway_is_ready_when_each_role_is_up(tmp_path: Path) -> None:
    """Without a report, and without a decode engine, it is not."""
    prefill, decode = pair()

    async def main() -> None:
        async with listening([prefill, decode]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            async with discovering(tmp_path, entries, []) as gate:
                assert gate.gateway.ready()
                assert (await gate.get("/ready")).status == 503
                assert (await gate.post(completion())).status == 503
                gate.list(["prefill0"])
                await gate.becomes_up("prefill0")
                assert gate.gateway.ready() == "no decode instance is up"
                gate.list(["prefill0", "decode0"])
                await until(lambda: not gate.gateway.ready())
                assert (await gate.post(completion())).status == 200
                gate.list([])
                await until(lambda: not gate.members)
                assert (await gate.post(completion())).status == 503
                gate.list(["prefill0", "decode0"])
                await until(lambda: not gate.gateway.ready())
                assert (await gate.post(completion())).status == 200

    run(main())


def test_without_a_report_the_gateway_is_not_ready(tmp_path: Path) -> None:
    """A file that does not exist is no report."""

    async def main() -> None:
        (tmp_path / "engines.yaml").mkdir()
        from kvroute.serve.assembly import Gateway

        gateway = Gateway(Deployment.of(DISCOVERY, str(tmp_path / "cluster.yaml")), seed=1)
        try:
            await gateway.start()
            assert gateway.ready() == "no engines have been discovered yet"
        finally:
            await gateway.close()

    run(main())


def test_an_outage_of_the_source_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing and a broken file are logged once, and the engines stay."""
    prefill, decode = pair()

    def logged() -> list[str]:
        return [r.__dict__["fields"]["reason"] for r in caplog.records if r.message == "engines_file_invalid"]

    async def main() -> None:
        async with listening([prefill, decode]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            async with discovering(tmp_path, entries, list(entries)) as gate:
                gate.file.unlink()
                await until(lambda: len(logged()) == 1)
                assert "cannot be read" in logged()[0]
                gate.file.write_text("- {name: decode0, role: decoder, url: http://127.0.0.1:1}\n")
                await until(lambda: len(logged()) == 2)
                assert "engines.yaml:1: [0].role" in logged()[1]
                assert gate.up == set(entries)
                assert (await gate.post(completion())).status == 200
                gate.list(["prefill0"])
                await gate.becomes_up("prefill0")

    run(main())


def test_an_engine_that_cannot_join_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others serve; the reason is logged once, and a metric counts the engine."""
    prefill, decode = pair()

    async def main() -> None:
        async with listening([prefill, decode]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            async with discovering(tmp_path, entries, list(entries)) as gate:
                odd = [
                    entry(decode, name="big", url="http://127.0.0.1:1", tp=9),
                    entry(decode, name="same-url"),
                    entry(decode, name="unknown", url="http://127.0.0.1:2", model="nonsense-3b"),
                ]
                write(gate.file, [*entries.values(), *odd])
                await until(lambda: sum(record.message == "engine_refused" for record in caplog.records) == 3)
                assert 'kvroute_discovered_engines{state="refused"} 3\n' in await gate.metrics()
                assert gate.up == set(entries)
                # The name of an engine that could not join is free for one that can.
                write(gate.file, [entries["prefill0"], entry(decode, name="same-url")])
                await gate.becomes_up("prefill0", "same-url")
                assert 'kvroute_discovered_engines{state="refused"} 0\n' in await gate.metrics()

    run(main())
    refused = [record.__dict__["fields"] for record in caplog.records if record.message == "engine_refused"]
    reasons = {fields["instance"]: fields["reason"] for fields in refused}
    assert reasons["big"] == "it needs 9 GPUs, and node node-decode0 has 6 free of 8"
    assert "is already the endpoint of decode0" in reasons["same-url"]
    assert "nonsense-3b" in reasons["unknown"]


def test_a_reload_keeps_the_discovered_engines(tmp_path: Path) -> None:
    """With their health and cached prefixes; the new log begins with them and replays. An engine that leaves during
    the reload's aftermath gets no requests, also not from requests of the old cluster."""
    log = tmp_path / "events.log"
    section = f"  log: {{events: {log}}}\n"

    async def main() -> None:
        names = ["decode0", "decode1", "prefill0", "prefill1"]
        async with emulated(tmp_path, 2, 2, names, section) as (gate, _):
            assert (await gate.ask(PROMPT)).status == 200
            old = gate.gateway.runtime
            changed = section + "  policy: netkv\n"
            assert await gate.gateway.reload(
                lambda: Deployment.of(with_section(changed, DISCOVERY), str(tmp_path / "cluster.yaml"))
            )
            assert gate.gateway.runtime is not old
            assert gate.up == set(names)
            control = gate.gateway.runtime.control
            assert any(True for name in names for _ in control.caches.chains(control.cluster.index(name)))
            for count in range(6):
                gate.list(names[count % 2 :])
                assert await gate.gateway.reload(
                    lambda: Deployment.of(with_section(changed, DISCOVERY), str(tmp_path / "cluster.yaml"))
                )
                assert (await gate.ask(f"{count} {PROMPT}")).status == 200
            await gate.becomes_up(*names[1:])
            assert await gate.becomes_idle(), gate.held_resources()

    run(main())
    assert replays(log)
    first = next(iter(read_log(log)[1])).event
    assert isinstance(first, ClusterChanged)
    assert len(first.joined) >= 3


@pytest.mark.parametrize("changed", [{"uid": "2"}, {"ready": False}], ids=["replaced", "not-ready"])
@pytest.mark.parametrize("another", [False, True], ids=["one-reload", "another-waits"])
def test_a_report_during_a_reload_counts(tmp_path: Path, changed: dict[str, Any], another: bool) -> None:
    """The reload has begun without it: another engine inherits nothing from the one with its name, and neither that one
    nor one that is not ready gets requests. The same if another reload follows at once."""
    prefill, decode = pair()
    begun, reading = threading.Event(), threading.Event()

    async def main() -> None:
        async with listening([prefill, decode]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode)}
            text = DISCOVERY.replace("interval: 200 ms}", "interval: 200 ms, panic: 0}", 1)

            def read() -> Deployment:
                return Deployment.of(text, str(tmp_path / "cluster.yaml"))

            def read_slowly() -> Deployment:
                begun.set()
                assert reading.wait(HANGS_S)
                return read()

            async with discovering(tmp_path, entries, ["decode0", "prefill0"], text=text) as gate:
                assert (await gate.post(completion())).status == 200
                old = gate.gateway.runtime.engines["decode0"].availability
                for _ in range(5):
                    old.failed(old.started(gate.gateway.now()), gate.gateway.now())
                assert gate.up == {"prefill0"}
                reloads = [asyncio.create_task(gate.gateway.reload(read_slowly))]
                await until(begun.is_set)
                if another:
                    reloads.append(asyncio.create_task(gate.gateway.reload(read)))
                gate.list(entries, decode0=changed, prefill0=changed)
                await until(lambda: not gate.up)
                reading.set()
                assert all(await asyncio.gather(*reloads))
                if "ready" in changed:
                    assert not gate.up
                    assert (await gate.post(completion())).status == 503
                    gate.list(entries)
                    await until(lambda: "prefill0" in gate.up)
                    assert gate.gateway.runtime.engines["decode0"].availability.breaker is old.breaker
                else:
                    assert all(gate.gateway.runtime.uids[name] == "2" for name in gate.up)
                    await gate.becomes_up("decode0", "prefill0")
                    control = gate.gateway.runtime.control
                    assert gate.gateway.runtime.engines["decode0"].availability.breaker is not old.breaker
                    assert not any(True for _ in control.caches.chains(control.cluster.index("prefill0")))
                    assert (await gate.post(completion())).status == 200

    run(main())


def test_load_and_health_of_engines_that_stay_are_kept(tmp_path: Path) -> None:
    """A join replaces no engine client, and requests in flight still count."""
    prefill, decode = pair()
    hangs, other = Gate(), Engine("a0", "decode")
    decode.serve = hangs.before(tokens)

    async def main() -> None:
        async with listening([prefill, decode, other]):
            entries = {engine.name: entry(engine) for engine in (prefill, decode, other)}
            async with discovering(tmp_path, entries, ["decode0", "prefill0"]) as gate:
                running = asyncio.create_task(gate.post(completion()))
                await hangs.entered.wait()
                clients = dict(gate.gateway.runtime.engines)
                gate.list(["a0", "decode0", "prefill0"])
                await gate.becomes_up("a0", "decode0", "prefill0")
                assert all(gate.gateway.runtime.engines[name] is client for name, client in clients.items())
                assert gate.gateway.runtime.control.in_flight == 1
                assert clients["decode0"].in_flight == 1
                hangs.open.set()
                assert (await running).status == 200
                assert await becomes_true(lambda: not gate.gateway.runtime.control.in_flight)

    run(main())


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ("  offload: {}\n", "`offload` and `discovery` cannot be given together"),
        ("  models: {}\n", ""),
    ],
)
def test_what_a_file_with_discovery_may_not_have(tmp_path: Path, section: str, error: str) -> None:
    """One sentence with line and field."""
    if not error:
        assert not Deployment.of(DISCOVERY + section, "live.yaml").cluster.instances
        return
    with pytest.raises(InputErrors, match=error):
        Deployment.of(DISCOVERY + section, "live.yaml")


def test_settings_exclude_engines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`prefix: events` needs KV events, and `layerwise` the address of the connector."""
    prefill, decode = pair()

    async def main() -> None:
        async with listening([prefill, decode]):
            bare = entry(prefill) | {"bootstrap": ""}
            entries = {"prefill0": bare, "decode0": entry(decode, kv_events="tcp://127.0.0.1:9")}
            async with discovering(tmp_path, {}, [], "  prefix: events\n  layerwise: true\n") as gate:
                write(gate.file, [*entries.values(), bare | {"name": "p1", "kv_events": "tcp://127.0.0.1:9"}])
                await gate.becomes_up("decode0")
                await until(lambda: sum(record.message == "engine_refused" for record in caplog.records) == 2)

    run(main())
    refused = [record.__dict__["fields"] for record in caplog.records if record.message == "engine_refused"]
    reasons = {fields["instance"]: fields["reason"] for fields in refused}
    assert reasons["prefill0"] == "`prefix: events` needs its KV events"
    assert "connector's address" in reasons["p1"]
