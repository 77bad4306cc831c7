"""The gateway warns about a port that is open to all machines; a process that gets SIGTERM loses no request."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL, rig
from tests.serve.stub_engines import engines_of, run, stub_rig
from tests.waiting import PATIENCE_S

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.config.preflight import settings_of
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.serve.lifecycle.exposure import exposures

KEYS = f"keys: {{known: {{alice: '{hash_text('kvr_alice')}'}}}}"
OPEN_LISTEN, OPEN_ADMIN = "listen: {host: 0.0.0.0}", "admin: {host: '::'}"
TOKEN = "admin: {host: 0.0.0.0, read_token: 0123456789abcdef}"


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ((), []),
        ((OPEN_LISTEN,), ["gateway.listen"]),
        ((OPEN_LISTEN, KEYS), []),
        ((OPEN_ADMIN,), ["gateway.admin"]),
        ((OPEN_LISTEN, OPEN_ADMIN), ["gateway.listen", "gateway.admin"]),
        ((OPEN_LISTEN, TOKEN, KEYS), []),
        (("admin: {host: 0.0.0.0, push_token: 0123456789abcdef}",), ["gateway.admin"]),
        (("listen: {host: localhost}", "admin: {host: '::1'}"), []),
    ],
)
def test_which_ports_are_open_to_all_machines(lines: tuple[str, ...], fields: list[str]) -> None:
    """API keys protect the client port, a token for reading protects the admin port, and loopback protects either."""
    settings = settings_of("gateway:\n" + "".join(f"  {line}\n" for line in lines or ("models: {}",)), "test.yaml")
    reported = list(exposures(settings))
    assert [exposure.field for exposure in reported] == fields
    assert all("set gateway." in str(exposure) for exposure in reported)


def test_the_log_warns_about_open_ports(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, listen="{host: 0.0.0.0, port: 0}", admin="{host: 0.0.0.0, port: 0}"):
            pass

    run(main())
    warned = [record for record in caplog.records if record.message == "port_open_to_all"]
    assert [record.__dict__["fields"]["field"] for record in warned] == ["gateway.listen", "gateway.admin"]
    assert all(record.levelname == "WARNING" for record in warned)


def test_a_reload_that_opens_a_port_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """The host is the one that the port listens on, also if the new file gives another one."""
    text = CLUSTER.replace("listen: {port: 0}", "listen: {host: 0.0.0.0, port: 0}")

    async def main() -> None:
        async with rig(f"  {KEYS}\n", text) as gate:
            endpoints = gate.fleet.ready().instances
            assert not opened()
            assert await gate.gateway.reload(lambda: Deployment.of(text, "new.yaml", endpoints=endpoints))
            assert opened() == [("gateway.listen", "0.0.0.0")]
            assert await gate.gateway.reload(lambda: Deployment.of(CLUSTER, "new.yaml", endpoints=endpoints))
            assert len(opened()) == 1

    def opened() -> list[tuple[str, str]]:
        logged = [record.__dict__["fields"] for record in caplog.records if record.message == "port_open_to_all"]
        return [(fields["field"], fields["address"]) for fields in logged]

    run(main())


def send_until_refused(port: int, statuses: list[int], faults: list[str]) -> None:
    """Send one request after the other, each on a new connection, until the port is closed."""
    body = msgspec.json.encode({"model": MODEL, "prompt": "a" * 400, "max_tokens": 8})
    while True:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            client.connect()
        except ConnectionRefusedError:
            return
        try:
            client.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            response = client.getresponse()
            response.read()
            statuses.append(response.status)
        except OSError as error:
            faults.append(repr(error))
        finally:
            client.close()


@pytest.mark.slow
def test_sigterm_under_load_loses_no_request_and_stderr_contains_the_warning(tmp_path: Path) -> None:
    """Every connected client gets its response; the process ends by itself and without an error."""
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(CLUSTER)
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--ready-file", str(ready)]
    with subprocess.Popen(
        [*command, "--host", "0.0.0.0", "--until-eof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            port = int(msgspec.json.decode(ready.read_bytes())["url"].rpartition(":")[2])
            statuses: list[int] = []
            faults: list[str] = []
            clients = [threading.Thread(target=send_until_refused, args=(port, statuses, faults)) for _ in range(4)]
            for client in clients:
                client.start()
            while len(statuses) < 40:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            for client in clients:
                client.join()
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert not faults
    assert set(statuses) == {200}
    assert (
        b"warning: gateway.listen.host is 0.0.0.0: every machine that reaches this port may use the engines" in stderr
    )
    assert b"port_open_to_all" in stderr
    assert b"Traceback" not in stderr
