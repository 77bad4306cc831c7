"""`kvroute serve --workers`: processes that share a port, limits and an admin port, and that are restarted."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.waiting import PATIENCE_S

CLUSTER = """
name: workers
fabric:
  {kind: fat-tree, pods: 1, racks_per_pod: 1, nodes_per_rack: 2, gpus_per_node: 4, nvlink: 450 GB/s,
   nics: {compute: {count: 4, capacity: 100 Gbps}}, rack_uplinks: {count: 4, capacity: 100 Gbps}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 5 ms, per_request: 0.1 ms}}
defaults: {model: meta-llama/Llama-3.3-70B-Instruct, tp: 2, kv_capacity: 40 GB}
instances: {prefill: 1, decode: 2}
gateway:
  limits: {in_flight: 4, queue: 0}
"""
BODY = {"model": "meta-llama/Llama-3.3-70B-Instruct", "prompt": "one two three", "max_tokens": 4}
LONG = BODY | {"max_tokens": 400, "ignore_eos": True}


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, f"not true within {PATIENCE_S:.0f} s"
        time.sleep(0.05)


@dataclass
class Running:
    """A gateway with workers."""

    process: subprocess.Popen[bytes]
    url: str
    admin: str
    messages: Path
    token: str = ""
    """Token for the admin port; empty: none."""

    def ask(self, path: str, body: object = None, *, admin: bool = False, accept: str = "") -> tuple[int, bytes]:
        """Return status and body of a request on a connection of its own; 0 if the connection is reset."""
        connection = HTTPConnection(urlsplit(self.admin if admin else self.url).netloc, timeout=PATIENCE_S)
        try:
            headers = {"content-type": "application/json", "accept": accept}
            headers |= {"authorization": f"Bearer {self.token}"} if admin and self.token else {}
            encoded = json.dumps(body).encode() if body is not None else None
            connection.request("GET" if body is None else "POST", path, encoded, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            connection.close()

    def completed(self) -> float:
        """Number of completions that all workers have counted."""
        lines = self.ask("/metrics", admin=True)[1].decode().splitlines()
        name = 'kvroute_requests_total{code="200",endpoint="completions"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def in_sync(self) -> bool:
        """Whether the workers share their bookings."""
        page = self.ask("/metrics", admin=True)[1].decode()
        others = "kvroute_replication_gateways 1.0" in page
        return others and 'kvroute_replication_state{state="joining"} 0.0' in page

    def workers(self) -> list[int]:
        """Process numbers of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if b"--worker=" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def running(folder: Path, text: str = CLUSTER, *options: str, token: str = "") -> Iterator[Running]:
    """Run a gateway with two workers on emulated engines. Args: `token` for its admin port."""
    file, ready, messages = folder / "cluster.yaml", folder / "ready.json", folder / "messages"
    file.write_text(text)
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--workers", "2"]
    command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready), "--until-eof", *options]
    with messages.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, messages.read_text()
        places = json.loads(ready.read_text())
        gateway = Running(process, places["url"], places["admin"], messages, token)
        until(lambda: gateway.ask("/ready", admin=True)[0] == 200)
        until(gateway.in_sync)
        yield gateway
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_requests_go_to_all_workers_and_are_counted_once(tmp_path: Path) -> None:
    """On the admin port they are one gateway; each worker has an event log of its own."""
    with running(tmp_path, CLUSTER, "--log", str(tmp_path / "events.jsonl")) as gateway:
        assert [gateway.ask("/v1/completions", BODY)[0] for _ in range(40)] == [200] * 40
        assert gateway.completed() == 40
        assert gateway.ask("/metrics", admin=True, accept="application/openmetrics-text")[1].endswith(b"# EOF\n")
        until(lambda: json.loads(gateway.ask("/state", admin=True)[1])["tick"]["requests"] == 40)
        assert b"foresight" in gateway.ask("/version", admin=True)[1]
        assert gateway.ask("/metrics")[0] == 404
    served = [(tmp_path / f"events-{number}.jsonl").read_text().count('"arrived"') for number in (1, 2)]
    assert sum(served) == 40
    assert min(served) > 0


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_counts_stay(tmp_path: Path) -> None:
    """The others serve meanwhile, and nothing that it held stays held."""
    with running(tmp_path) as gateway:
        assert [gateway.ask("/v1/completions", BODY)[0] for _ in range(10)] == [200] * 10
        assert gateway.completed() == 10
        before = gateway.workers()
        with ThreadPoolExecutor(4) as clients:
            slow = [clients.submit(gateway.ask, "/v1/completions", LONG) for _ in range(4)]
            until(lambda: json.loads(gateway.ask("/state", admin=True)[1])["tick"]["load"]["in_flight"] == 4)
            os.kill(before[0], signal.SIGKILL)
            codes = [task.result()[0] for task in slow]
        assert set(codes) <= {0, 200}
        until(lambda: gateway.ask("/ready", admin=True)[0] == 200 and len(gateway.workers()) == 2)
        assert before[0] not in gateway.workers()
        until(gateway.in_sync)
        assert "worker_ended" in gateway.messages.read_text()
        assert [gateway.ask("/v1/completions", BODY)[0] for _ in range(10)] == [200] * 10
        assert gateway.completed() >= 20


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    """A stopped process ignores every signal but SIGKILL, and the kernel still gives it new connections."""
    with running(tmp_path) as gateway:
        stopped, other = gateway.workers()
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: stopped not in gateway.workers())
        until(lambda: len(gateway.workers()) == 2 and gateway.ask("/ready", admin=True)[0] == 200)
        assert other in gateway.workers()
        assert all(gateway.ask("/v1/completions", BODY)[0] == 200 for _ in range(8))
        assert "worker_hangs" in gateway.messages.read_text()


@pytest.mark.slow
def test_a_gateway_ends_although_a_worker_hangs(tmp_path: Path) -> None:
    """Its second signal, as a second Ctrl-C, ends all workers at once."""
    with running(tmp_path) as gateway:
        stopped = gateway.workers()[0]
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(2):
            gateway.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        gateway.process.wait(PATIENCE_S)
        assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.slow
def test_workers_keep_a_limit_together(tmp_path: Path) -> None:
    """Of twelve requests at once four are served and eight are rejected, whichever worker has them."""
    with running(tmp_path) as gateway, ThreadPoolExecutor(12) as clients:
        long = [clients.submit(gateway.ask, "/v1/completions", LONG) for _ in range(4)]
        until(lambda: json.loads(gateway.ask("/state", admin=True)[1])["tick"]["load"]["in_flight"] == 4)
        more = [clients.submit(gateway.ask, "/v1/completions", BODY) for _ in range(8)]
        assert [task.result()[0] for task in more] == [503] * 8
        assert [task.result()[0] for task in long] == [200] * 4


@pytest.mark.slow
def test_all_workers_reload_and_drain(tmp_path: Path) -> None:
    """A file with an error changes none of them; at Ctrl-C requests in flight are finished."""
    with running(tmp_path) as gateway, ThreadPoolExecutor(1) as clients:

        def reloads(outcome: str) -> bool:
            page = gateway.ask("/metrics", admin=True)[1].decode()
            return f'kvroute_reloads_total{{outcome="{outcome}"}} 2.0' in page

        (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("in_flight: 4", "in_flight: many"))
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: "reload_refused" in gateway.messages.read_text())
        assert not reloads("refused")
        (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("queue: 0", "queue: 3"))
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: reloads("taken"))
        assert b'"queue": 3' in gateway.ask("/config", admin=True)[1]
        slow = clients.submit(gateway.ask, "/v1/completions", LONG | {"max_tokens": 200})
        until(lambda: json.loads(gateway.ask("/state", admin=True)[1])["tick"]["load"]["in_flight"] == 1)
        os.killpg(gateway.process.pid, signal.SIGINT)  # as Ctrl-C does
        assert slow.result()[0] == 200
        assert gateway.process.wait(PATIENCE_S) == 0


PUSHED = CLUSTER.replace("gateway:\n", "gateway:\n  oracle: {source: push}\n")
TOKENS = PUSHED + "  admin: {push_token: old-push-0123456789, read_token: old-read-0123456789}\n"


def with_tokens(gateway: Running, text: str, read: str, push: str) -> None:
    """Reload a file with other tokens, and check that the admin port shows and reaches all workers."""
    served = gateway.completed()
    (gateway.messages.parent / "cluster.yaml").write_text(text)
    gateway.process.send_signal(signal.SIGHUP)
    gateway.token = read
    until(lambda: gateway.completed() == served)
    until(lambda: b"taken" in gateway.ask("/metrics", admin=True)[1])
    assert [gateway.ask("/v1/completions", BODY)[0] for _ in range(20)] == [200] * 20
    until(lambda: gateway.completed() == served + 20)
    until(lambda: json.loads(gateway.ask("/state", admin=True)[1])["tick"]["requests"] == served + 20)
    assert gateway.in_sync()
    assert gateway.ask("/ready", admin=True)[0] == 200
    gateway.token = push
    assert gateway.ask("/telemetry", {"per_tier": {"rack": 0.3}}, admin=True)[0] == 200
    gateway.token = read
    until(lambda: b'kvroute_oracle_congestion_ratio{tier="rack"} 0.3' in gateway.ask("/metrics", admin=True)[1])


@pytest.mark.slow
def test_changed_admin_tokens_hide_no_worker(tmp_path: Path) -> None:
    """After a reload with other tokens, and after one without any."""
    with running(tmp_path, TOKENS, token="old-read-0123456789") as gateway:
        with_tokens(gateway, TOKENS.replace("old-", "new-"), "new-read-0123456789", "new-push-0123456789")
        gateway.token = "old-read-0123456789"
        assert gateway.ask("/metrics", admin=True)[0] == 401
        gateway.token = "new-read-0123456789"
        with_tokens(gateway, PUSHED, "", "")


def self_signed(folder: Path, name: str) -> str:
    """Write key and certificate of localhost to NAME.key and NAME.pem; return the certificate."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
    subprocess.run(["openssl", "req", "-x509", *curve, *files], check=True, capture_output=True)
    return (folder / f"{name}.pem").read_text()


@pytest.mark.slow
def test_renewed_certificates_are_used_by_all_workers_and_the_admin_port(tmp_path: Path) -> None:
    """New connections get them without a reload. A connection reaches any of the workers."""
    self_signed(tmp_path, "used")
    tls = f"{{certificate: {tmp_path}/used.pem, key: {tmp_path}/used.key}}"
    ports = f"gateway:\n  listen: {{tls: {tls}}}\n  admin: {{tls: {tls}}}\n"
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(CLUSTER.replace("gateway:\n", ports))
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--workers", "2"]
    command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready), "--until-eof"]
    with (tmp_path / "messages").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "messages").read_text()
        places = json.loads(ready.read_text())
        new = self_signed(tmp_path, "renewed")
        for kind in ("key", "pem"):
            (tmp_path / f"renewed.{kind}").replace(tmp_path / f"used.{kind}")
        for place in ("url", "admin"):
            address = (urlsplit(places[place]).hostname or "", urlsplit(places[place]).port or 0)
            until(lambda: all(ssl.get_server_certificate(address) == new for _ in range(12)))  # noqa: B023
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_workers_end_with_their_parent_process(tmp_path: Path) -> None:
    """Also if it is killed."""
    with running(tmp_path) as gateway:
        workers = gateway.workers()
        gateway.process.kill()
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("gateway:\n  listen: {metrics: true}", "would show the metrics of one worker"),
        ("gateway:\n  listen: {host: localhost}", "any free port of the host name localhost"),
    ],
)
def test_what_workers_cannot_share_is_one_sentence(tmp_path: Path, change: str, what: str) -> None:
    """With exit status 2, and no process left."""
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER.replace("gateway:", change))
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--workers", "2"]
    ended = subprocess.run(
        [*command, "--port", "0", "--admin-port", "0"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 2
    assert what in ended.stderr
    assert "Traceback" not in ended.stderr
