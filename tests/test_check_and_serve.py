"""`kvroute topology check` finds what `kvroute serve` refuses, without the libraries of a gateway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples import EXAMPLES
from tests.serve.config.settings_rig import LIVE, MACHINES
from tests.serve.config.test_preflight import SERVING_ERRORS
from typer.testing import CliRunner

from kvroute.cli.app import app as kvroute
from kvroute.cli.topology.command import app
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import InputErrors

SMALL = (EXAMPLES / "small.yaml").read_text(encoding="utf-8")
runner = CliRunner()

OF_THE_EXTRA = (
    "aiohttp",
    "dns",
    "httptools",
    "opentelemetry",
    "prometheus_client",
    "zmq",
    "redis",
    "tokenizers",
    "uvloop",
)
WITHOUT_THE_EXTRA = f"""
import sys
for name in {OF_THE_EXTRA}:
    sys.modules[name] = None
from kvroute.cli.app import main
main()
"""


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (("topology", "check", "mine.yaml"), "OK: small"),
        (("topology", "schema"), "cache_salt_secret_env"),
        (("simulate", "mine.yaml", "--policy", "netkv", "--requests", "5", "--seeds", "1"), "netkv"),
        (("plan", "replicas", "mine.yaml", "--rate", "1/s"), "1 request"),
    ],
    ids=["check", "schema", "simulate", "plan"],
)
def test_the_section_is_read_without_the_libraries_of_a_gateway(
    tmp_path: Path, command: tuple[str, ...], printed: str
) -> None:
    """`kvroute[serve]` is only needed to serve."""
    (tmp_path / "mine.yaml").write_text(
        SMALL + "\ngateway: {policy: netkv, limits: {in_flight: 9}}\n", encoding="utf-8"
    )
    run = [sys.executable, "-c", WITHOUT_THE_EXTRA, *command]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout


NICS = "node: {gpus: 8, nics: {compute: {count: 8, capacity: 400 Gbps}}}"
REFUSED_BY_SERVE = {
    **SERVING_ERRORS,
    "port of KV events": (
        LIVE.replace('"http://b:1"', '"http://b:1", kv_events: "tcp://b:99999"'), 7, "port 99999 is not between",
    ),
    "port of replays": (
        LIVE.replace('"http://b:1"', '"http://b:1", kv_events: "tcp://b:1", kv_replay: "tcp://b:0"'), 7, "port 0 is",
    ),
    "bootstrap": (LIVE.replace('"http://b:1"', '"http://b:1", bootstrap: "b:65536"'), 7, "port 65536 is not between"),
    "bracket": (LIVE.replace("http://b:1", "http://[::1"), 7, "'http://[::1' has one bracket only"),
    "no port": (LIVE.replace("http://b:1", "http://b:"), 7, "'http://b:' has no port after the colon"),
    "Prometheus": (
        LIVE + "gateway: {oracle: {source: prometheus, prometheus: {url: 'http://[x', per_tier: {rack: x}}}}\n",
        8, "'http://[x' has one bracket only",
    ),
    "Redis": (LIVE + "gateway: {replication: {redis: 'redis://h:99999/0?a=b'}}\n", 8, "port 99999 is not between"),
    "traces": (LIVE + "gateway: {tracing: {otlp: 'http://h:0/v1'}}\n", 8, "port 0 is not between"),
    "host": (LIVE + "gateway: {listen: {host: a..b}}\n", 8, "'a..b' is not a host name"),
    "discovery with roles": (
        MACHINES + f"discovery: {{file: e.yaml, {NICS}}}\n"
        "gateway: {autoscaling: {role_switch: {url: 'http://h:1/x'}}}\n",
        6, "role_switch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED_BY_SERVE)
def test_check_finds_what_serve_refuses(tmp_path: Path, fault: str) -> None:
    """The same sentence on the same line; only a file without any endpoint may be meant for emulated engines."""
    text, line, sentence = REFUSED_BY_SERVE[fault]
    path = tmp_path / "live.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputErrors) as refused:
        Deployment.read(path)
    expected = {str(problem) for problem in refused.value.problems if sentence in str(problem)}
    assert all(problem.startswith(f"{path}:{line}: ") for problem in expected)
    result = runner.invoke(app, ["check", str(path)])
    if fault == "shorthand":
        assert result.exit_code == 0
        assert "no instance has an endpoint, so `kvroute serve` needs --embedded" in result.stdout
        return
    assert result.exit_code == 2
    assert expected
    assert expected <= set(result.stderr.splitlines())


def test_an_address_without_a_fault_in_its_port_is_accepted(tmp_path: Path) -> None:
    """IPv6, no port, a query, a path and a socket file."""
    path = tmp_path / "live.yaml"
    text = LIVE.replace("http://b:1", "http://[::1]:5").replace("http://a:1", "https://a")
    text = text.replace('"https://a"', '"https://a", kv_events: "ipc:///tmp/x:y"')
    section = "{tracing: {otlp: 'http://h/v1'}, replication: {redis: 'redis://u@h:1/0?protocol=3'}}"
    path.write_text(f"{text}gateway: {section}\n", encoding="utf-8")
    result = runner.invoke(app, ["check", str(path)])
    assert (result.exit_code, result.stderr) == (0, "")


# Lists

URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000")


def test_addresses_may_be_separated_by_commas(tmp_path: Path) -> None:
    """`topology new` writes the same file as with the option repeated."""
    texts = []
    for prefill in (["--prefill", ", ".join(URLS[:2])], ["--prefill", URLS[0], "--prefill", URLS[1]]):
        result = runner.invoke(app, ["new", *prefill, "--decode", URLS[2]])
        assert result.exit_code == 0
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert texts[0].count("role: prefill") == 2


def test_policies_may_be_separated_by_commas(tmp_path: Path) -> None:
    command = ["simulate", str(EXAMPLES / "small.yaml"), "--requests", "5", "--seeds", "1", "--workers", "1"]
    result = CliRunner().invoke(kvroute, [*command, "--policy", "netkv,cla", "--policy", "cla"])
    assert result.exit_code == 0, result.output
    assert "Duplicate policies run only once." in result.stderr
    assert "netkv" in result.stdout
    assert "cla" in result.stdout


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://a:", "'http://a:' has no port after the colon"),
        ("http://[::1", "is not an engine address; write http://host:port"),
        ("http://a:99999", "port 99999 is not between 1 and 65535"),
        (" , ", "no prefill engine is given"),
    ],
)
def test_a_wrong_address_gets_one_sentence(url: str, sentence: str) -> None:
    result = runner.invoke(app, ["new", "--prefill", url, "--decode", URLS[2]])
    assert sentence in str(result.exception)
