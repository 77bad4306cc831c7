"""Examinations of emulated engines: either everything is right, or exactly the one injected fault is found."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
from aiohttp import web
from tests.doctor.rig import HEAD, MODEL, OPTIONS, TOKENS, DoctorRig, cluster_text, running_rig
from tests.serve.stub_engines import Engine, Gate, ReceivedRequest, listening, run, tokens
from tests.waiting import until

from kvroute.doctor import ExaminationReport, ExaminationSpec, examine
from kvroute.emulator import EmulatedClusterSpec
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import Endpoint, KvProtocol

PAIR = ("prefill0", "decode0")


@pytest.mark.parametrize("protocol", ["vllm", "mooncake", "sglang", "nixl-push"])
def test_healthy_engines_have_no_findings(protocol: KvProtocol) -> None:
    async def main() -> None:
        async with running_rig(protocol) as rig:
            report = await rig.examine()
        assert [finding.sentence for finding in report.findings] == []
        assert report.well
        assert [engine.health for engine in report.engines] == ["ok"] * 4
        assert all(engine.model_ok and engine.metrics and not engine.metrics.missing for engine in report.engines)
        assert sorted(pair.name for pair in report.pairs) == [
            f"prefill{source} -> decode{target}" for source in (0, 1) for target in (0, 1)
        ]
        for pair in report.pairs:
            assert (pair.moved, pair.evidence, pair.prompt_tokens) == ("yes", "counters", TOKENS)
            assert pair.kv_bytes == pair.expected_bytes > 0
            assert pair.transfer_s is not None
            assert pair.transfer_s > 0.9 * pair.promised_s, "a transfer cannot be faster than its links"
        for engine in report.engines:
            assert engine.clock is not None
            assert abs(engine.clock.offset_s) <= engine.clock.error_s, "both clocks are this machine's"
            assert engine.events is not None
            assert engine.events.subscribed
            assert engine.events.replay
        prefills = [engine for engine in report.engines if engine.role == "prefill"]
        assert all(engine.events and engine.events.own_batches for engine in prefills)
        alone = {"vllm": ["decode0", "decode1", "prefill0", "prefill1"], "mooncake": ["decode0", "decode1"]}
        assert [engine.name for engine in report.engines if engine.aggregated == ""] == alone.get(protocol, [])
        assert all(not engine.aggregated for engine in report.engines)

    run(main())


async def no_fault(rig: DoctorRig) -> None:
    """Change nothing."""


async def is_down(rig: DoctorRig) -> None:
    """Set a port other than the engine's, where nothing listens."""
    rig.change("decode0", url=f"http://127.0.0.1:{closed_port()}")


async def is_unhealthy(rig: DoctorRig) -> None:
    await rig.order("decode0", share=1, status=503, leg="health")


async def events_closed(rig: DoctorRig) -> None:
    rig.change("prefill0", kv_events=f"tcp://127.0.0.1:{closed_port()}")


async def replay_closed(rig: DoctorRig) -> None:
    rig.change("prefill0", kv_replay=f"tcp://127.0.0.1:{closed_port()}")


async def recomputes(rig: DoctorRig) -> None:
    await rig.order("decode0", share=1, leg="recompute")


async def transfer_breaks(rig: DoctorRig) -> None:
    await rig.order("prefill0", share=1, leg="transfer")


async def reject_requests(rig: DoctorRig) -> None:
    await rig.order("prefill0", share=1, status=503, leg="prefill")


def closed_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class Case:
    """One fault, and the one finding that names it."""

    inject: Callable[[DoctorRig], Awaitable[None]]
    where: str
    what: str
    hint: str
    moved: str
    file: dict[str, Any] = field(default_factory=dict)
    """Values of the cluster file that differ from the engines'."""
    head: str = HEAD
    """The network that the engines have."""


CASES = {
    "engine down": Case(is_down, "decode0", "is not healthy (cannot connect", "endpoint.url", "not tried"),
    "unhealthy": Case(is_unhealthy, "decode0", "HTTP status 503", "start the engine", "not tried"),
    "KV events port closed": Case(events_closed, "prefill0", "no response from tcp://", "--kv-events-config", "yes"),
    "replay port closed": Case(replay_closed, "prefill0", "the replay endpoint", "replay_endpoint", "yes"),
    "KV does not move": Case(
        recomputes, "prefill0 -> decode0", "without a KV transfer", "reaches the KV port of prefill0", "no"
    ),
    "transfer breaks": Case(
        transfer_breaks, "prefill0 -> decode0", "the request failed: decode engine decode0", "logs", "failed"
    ),
    "prefill refuses": Case(
        reject_requests, "prefill0 -> decode0", "prefill engine prefill0: HTTP status 503", "logs", "failed"
    ),
    "link ten times slower than the map": Case(
        no_fault,
        "prefill0 -> decode0",
        "but the cluster file states 20 Gbps (same rack)",
        "correct the file's capacities",
        "yes",
        file={"head": HEAD.replace("1 Gbps", "10 Gbps")},
    ),
    "tensor parallelism": Case(
        no_fault, "prefill0", "parallelism 2, but the cluster file has tp: 1", "`tp`", "yes", file={"tp": 1}
    ),
    "block size": Case(
        no_fault,
        "prefill0",
        "16 tokens, not a multiple of the gateway's 32",
        "gateway.prompt.block_tokens: 16",
        "yes",
        file={"gateway": "gateway: {prompt: {block_tokens: 32}}\n"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_gives_exactly_its_own_finding(name: str) -> None:
    case = CASES[name]

    async def main() -> None:
        async with running_rig(names=PAIR, head=case.head) as rig:
            await case.inject(rig)
            report = await rig.examine(**case.file)
        sentences = [
            finding.sentence for finding in report.findings if finding.where != "decode0" or case.where == "decode0"
        ]
        assert len(sentences) == 1, sentences
        assert sentences[0].startswith(f"{case.where}: ")
        assert case.what in sentences[0]
        assert case.hint in sentences[0]
        assert [pair.moved for pair in report.pairs] == [case.moved]

    run(main())


def test_an_engine_that_serves_another_model_is_found() -> None:
    async def main() -> None:
        async with running_rig(names=PAIR) as rig:
            report = await rig.examine(head=HEAD.replace(MODEL, "llama-3-8b"))
        sentences = [finding.sentence for finding in report.findings]
        assert len(sentences) == 2, sentences
        assert all("serves llama-3-70b, but clients request llama-3-8b" in sentence for sentence in sentences)
        assert [pair.moved for pair in report.pairs] == ["not tried"]

    run(main())


def test_an_alias_counts_as_the_name_of_the_model() -> None:
    """Clients use the alias, so the engine must serve it; emulated engines use those of their own file."""

    async def main() -> None:
        async with running_rig(names=PAIR) as rig:
            report = await rig.examine(gateway=f"gateway: {{models: {{chat: {MODEL}}}}}\n")
        assert all("clients request chat" in finding.what for finding in report.findings)
        assert len(report.findings) == 2

    run(main())


def test_an_engine_without_kv_events_for_its_prompt_is_found() -> None:
    async def main() -> None:
        context = zmq.Context()
        publisher = context.socket(zmq.PUB)
        try:
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            async with running_rig(names=PAIR) as rig:
                rig.change("prefill0", kv_events=f"tcp://127.0.0.1:{port}")
                report = await rig.examine()
        finally:
            publisher.close(linger=0)
            context.term()
        assert [(finding.where, finding.what) for finding in report.findings] == [
            ("prefill0", "it computed a prompt without publishing a KV event")
        ]

    run(main())


def test_transfers_counted_under_another_name_are_found() -> None:
    async def main() -> None:
        async with running_rig(names=("prefill1", "decode0")) as rig:
            rig.endpoints = {"prefill0": rig.endpoints["prefill1"], "decode0": rig.endpoints["decode0"]}
            report = await rig.examine()
        assert [finding.where for finding in report.findings] == ["prefill0 -> decode0"]
        assert "for source 'prefill1'" in report.findings[0].what
        assert "set `instance` to prefill0" in report.findings[0].hint

    run(main())


def test_kv_of_the_wrong_size_is_found() -> None:
    """The engines' model has 2.5 times as many bytes per token as the file's, under the same alias."""

    async def main() -> None:
        async with running_rig(names=PAIR) as rig:
            report = await rig.examine(
                head=HEAD.replace(MODEL, "llama-3-8b"), gateway=f"gateway: {{models: {{{MODEL}: llama-3-8b}}}}\n"
            )
        assert [finding.where for finding in report.findings] == ["prefill0 -> decode0"]
        assert "2.5 times the size of the file's model" in report.findings[0].what

    run(main())


def test_engines_without_kv_events_cause_no_finding() -> None:
    async def main() -> None:
        async with running_rig(names=PAIR, settings=EmulatedClusterSpec(kv_events=False)) as rig:
            report = await rig.examine()
        assert report.well
        assert all(engine.events is None for engine in report.engines)

    run(main())


def test_an_examination_ends_in_time_if_an_engine_hangs() -> None:
    async def main() -> None:
        async with running_rig() as rig:
            await rig.order("prefill0", share=1, status="hang", leg="prefill")
            options = ExaminationSpec(prompt_tokens=TOKENS, timeout_s=3.0, seed=1)
            report = await rig.examine(options)
            moved = {pair.name: pair.moved for pair in report.pairs}
            assert moved["prefill0 -> decode0"] == "failed"
            assert any("no complete response" in finding.what for finding in report.findings)
            assert await idle(rig)

    run(main())


async def idle(rig: DoctorRig) -> bool:
    """Return whether no engine has a request."""
    engines = [server.engine for server in rig.fleet.servers.values()]
    await until(lambda: not any(engine.running or engine.waiting for engine in engines))
    return True


def test_pairs_that_were_not_examined_in_time_are_a_finding() -> None:
    async def main() -> None:
        async with running_rig() as rig:
            report = await rig.examine(ExaminationSpec(prompt_tokens=TOKENS, timeout_s=1e-3))
        assert "use a longer --timeout" in report.findings[-1].sentence
        assert {pair.moved for pair in report.pairs} == {"not tried"}

    run(main())


# Stub engines, which have no emulator


@dataclass(frozen=True)
class StubBehaviour:
    """How a stub engine answers requests other than completions."""

    key: str = ""
    """The key that it requires; empty: none."""
    gate: Gate | None = None
    """Gate at which its completions wait."""
    leaks_key: bool = False
    """True if its completions fail with a message that contains the key."""
    only_legs: bool = False
    """True if it refuses completions without transfer parameters."""

    async def serve(self, engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        """See `stub_engines.Serve`."""
        if self.key and received.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": f"wrong key, try {self.key}"}}, status=401)
        if received.path == "/v1/models":
            return web.json_response({"data": [{"id": MODEL, "max_model_len": 512}]})
        if not received.path.startswith("/v1/completions"):
            return web.Response(status=404)
        if self.gate is not None:
            await self.gate.wait()
        if self.leaks_key:
            return web.json_response({"error": {"message": f"the key {self.key} may not do this"}}, status=500)
        if self.only_legs and "kv_transfer_params" not in received.json:
            return web.json_response({"error": {"message": "this server only decodes"}}, status=400)
        return await tokens(engine, request, received)


async def examined(engines: list[Engine], key: str = "", options: ExaminationSpec = OPTIONS) -> ExaminationReport:
    return await examine(deployment(engines), options, key)


def deployment(engines: list[Engine], gateway: str = "") -> Deployment:
    endpoints = {engine.name: Endpoint(url=f"http://127.0.0.1:{engine.port}") for engine in engines}
    return Deployment.of(cluster_text(endpoints, gateway=gateway), "clinic.yaml")


@pytest.mark.parametrize(
    ("gateway", "found"),
    [("", ["prefill0"]), ("gateway: {parameters: {aggregated: 1}}\n", []), ("gateway: {policy: foresight}\n", [])],
)
def test_an_engine_that_cannot_serve_a_request_alone_is_found_if_it_may_have_to(gateway: str, found: list[str]) -> None:
    async def main() -> None:
        engines = [
            Engine("prefill0", "prefill", serve=StubBehaviour(only_legs=True).serve),
            Engine("decode0", "decode", serve=StubBehaviour().serve),
        ]
        async with listening(engines):
            report = await examine(deployment(engines, gateway), OPTIONS)
        findings = [finding for finding in report.findings if "without a KV transfer" in finding.what]
        assert [finding.where for finding in findings] == found
        for finding in findings:
            assert "failed: HTTP status 400 (this server only decodes)" in finding.what
            assert "policy: foresight" in finding.hint

    run(main())


def test_metrics_missing_from_an_engines_page_are_found() -> None:
    """The pages of these engines have only `num_requests_running`."""

    async def main() -> None:
        engines = [
            Engine("prefill0", "prefill", serve=StubBehaviour().serve),
            Engine("decode0", "decode", serve=StubBehaviour().serve),
        ]
        async with listening(engines):
            report = await examined(engines)
        assert [finding.where for finding in report.findings] == ["decode0", "prefill0"]
        for finding in report.findings:
            assert "lacks vllm:num_requests_waiting, vllm:kv_cache_usage_perc" in finding.what
            assert "--disable-log-stats" in finding.hint
        assert [pair.evidence for pair in report.pairs] == ["time"]

    run(main())


@pytest.mark.parametrize("known", [True, False])
def test_an_api_key_reaches_the_engines_and_is_never_shown(known: bool) -> None:
    async def main() -> None:
        serve = StubBehaviour(key="a-secret-key").serve
        engines = [Engine("prefill0", "prefill", serve=serve), Engine("decode0", "decode", serve=serve)]
        async with listening(engines):
            report = await examined(engines, key="a-secret-key" if known else "wrong-key")
        assert [pair.moved == "not tried" for pair in report.pairs] == [not known]
        text = msgspec.json.encode(report).decode() + "".join(finding.sentence for finding in report.findings)
        assert "a-secret-key" not in text
        assert "wrong-key" not in text
        assert any("rejects the key" in finding.what for finding in report.findings) is not known

    run(main())


def test_an_api_key_in_an_engines_error_message_is_hidden() -> None:
    async def main() -> None:
        serve = StubBehaviour(key="a-secret-key", leaks_key=True).serve
        engines = [Engine("prefill0", "prefill", serve=serve), Engine("decode0", "decode", serve=serve)]
        async with listening(engines):
            report = await examined(engines, key="a-secret-key")
        failure = "prefill engine prefill0: HTTP status 500 (the key [key] may not do this)"
        assert [pair.failure for pair in report.pairs] == [failure]
        assert any(failure in finding.what for finding in report.findings)
        assert "a-secret-key" not in msgspec.json.encode(report).decode()

    run(main())


def test_a_cancelled_examination_leaves_no_request_running() -> None:
    async def main() -> None:
        gate = Gate()
        engines = [
            Engine("prefill0", "prefill", serve=StubBehaviour(gate=gate).serve),
            Engine("decode0", "decode", serve=StubBehaviour().serve),
        ]
        async with listening(engines):
            options = ExaminationSpec(prompt_tokens=TOKENS, timeout_s=3600.0, seed=1)  # no timeout ends the request
            task = asyncio.get_running_loop().create_task(examined(engines, options=options))
            await gate.entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gate.left.wait()
        assert gate.cancelled, "the engine did not see that its caller disconnected"

    run(main())
