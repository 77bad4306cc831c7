"""`kvroute epp` as a process, TLS, and engines that a picker discovers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.epp.envoy_rig import EnvoyStream, address, alone, completion_body, picking
from tests.serve.lifecycle.membership_rig import DISCOVERY, write
from tests.serve.rig import CLUSTER
from tests.serve.stub_engines import deployment, listening, run
from tests.waiting import becomes_true, until

from kvroute.serve.lifecycle.deployment import Deployment


def test_the_command_serves_emulated_engines_until_sigterm(tmp_path: Path) -> None:
    """The configuration of Envoy has the addresses of the engines and of the picker, which answers there."""
    file, ready, config = (tmp_path / name for name in ("cluster.yaml", "ready.json", "envoy.json"))
    file.write_text(CLUSTER)
    command = [sys.executable, "-m", "kvroute.cli.app", "epp", str(file), "--embedded", "--until-eof"]
    command += ["--ready-file", str(ready), "--envoy-config", str(config)]

    async def picked(target: str) -> str:
        async with grpc.aio.insecure_channel(target) as channel:
            return (await EnvoyStream(channel).ask(completion_body())).endpoints[0]

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert asyncio.run(becomes_true(lambda: ready.exists() or process.poll() is not None))
            assert process.poll() is None, process.communicate()[1]
            target = json.loads(ready.read_text())["picker"]
            endpoint = asyncio.run(picked(target))
            text = config.read_text()
            assert f'"port_value": {endpoint.rpartition(":")[2]}' in text
            assert f'"port_value": {target.rpartition(":")[2]}' in text
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_the_port_for_envoy_has_tls(tmp_path: Path) -> None:
    """With the certificate of `listen.tls`; the configuration of Envoy uses TLS to the picker, too."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    trusted = (tmp_path / "cert.pem").read_bytes()

    async def main() -> None:
        engines = alone(1)
        async with listening(engines):
            files = f"certificate: {tmp_path}/cert.pem, key: {tmp_path}/key.pem"
            made = deployment(engines, listen=f"{{port: 0, tls: {{{files}}}}}")
            async with picking(made) as rig:
                credentials = grpc.ssl_channel_credentials(trusted)
                async with grpc.aio.secure_channel(f"127.0.0.1:{rig.gateway.port}", credentials) as channel:
                    answer = await EnvoyStream(channel).ask(completion_body())
                    assert answer.endpoints == [address(engines[0])]

    run(main())


def test_an_engine_that_envoy_cannot_reach_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its endpoint has a host name. Without any engine, a request gets status 503 and one sentence, whatever its path
    and its model."""

    async def main() -> None:
        engines = alone(1)
        file = tmp_path / "engines.yaml"
        async with listening(engines):
            entry = {"name": "a", "role": "both", "node": "n", "url": f"http://localhost:{engines[0].port}"}
            write(file, [entry])
            text = DISCOVERY.replace("model: llama-3-70b, ", "")
            async with picking(Deployment.of(text, str(tmp_path / "cluster.yaml"))) as rig:
                await until(lambda: any(record.message == "engine_refused" for record in caplog.records))
                for path in ("/v1/completions", "/v1/embeddings"):
                    answer = await rig.stream().ask(completion_body(), path=path)
                    assert answer.status == 503
                    assert b"no engine has been discovered" in answer.body
                write(file, [entry | {"url": f"http://{address(engines[0])}", "model": "llama-3-70b"}])
                up = rig.gateway.runtime.engines
                await until(lambda: "a" in up and up["a"].availability.up)
                stream = rig.stream()
                assert (await stream.ask(completion_body())).endpoints == [address(engines[0])]
                stream.call.cancel()
                write(file, [])
                await until(lambda: not up)
                assert (await rig.stream().ask(completion_body())).status == 503
                assert await rig.becomes_idle()

    run(main())
    [why] = {record.__dict__["fields"]["reason"] for record in caplog.records if record.message == "engine_refused"}
    assert why.startswith("Envoy needs an IP address in the endpoint, which is http://localhost:")


def test_discovered_engines_are_picked_as_they_come_and_go(tmp_path: Path) -> None:
    """The discovery is the gateway's; a request that was picked keeps its engine until it ends."""

    async def main() -> None:
        engines = alone(2)
        file = tmp_path / "engines.yaml"
        async with listening(engines):
            entries = [
                {
                    "name": engine.name,
                    "uid": engine.name,
                    "role": "both",
                    "url": f"http://{address(engine)}",
                    "node": f"n{number}",
                    "rack": "r",
                }
                for number, engine in enumerate(engines)
            ]
            write(file, [])
            made = Deployment.of(DISCOVERY, str(tmp_path / "cluster.yaml"))
            async with picking(made) as rig:
                assert [await rig.health(service) for service in ("readiness", "liveness")] == [2, 1]
                assert (await rig.stream().ask(completion_body())).status == 503
                write(file, entries[:1])
                up = rig.gateway.runtime.engines
                await until(lambda: "engine0" in up and up["engine0"].availability.up)
                await until(lambda: not rig.gateway.ready())
                assert await rig.health("readiness") == 1
                stream = rig.stream()
                assert (await stream.ask(completion_body())).endpoints == [address(engines[0])]
                write(file, entries[1:])
                await until(lambda: "engine1" in up and up["engine1"].availability.up)
                await until(lambda: not up["engine0"].availability.up)
                other = rig.stream()
                assert (await other.ask(completion_body())).endpoints == [address(engines[1])]
                assert "engine0" in up
                await stream.respond(200, address(engines[0]))
                await stream.end()
                await until(lambda: "engine0" not in up)
                other.call.cancel()
                assert await rig.becomes_idle()

    run(main())
