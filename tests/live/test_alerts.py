"""Live: the Prometheus configuration and alert rules of the repository, checked by promtool and used with a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.examples import EXAMPLES
from tests.live.services import free_port, prometheus, required, started
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "deploy/prometheus"
CASES = ROOT / "tests/live/alerts.yml"
PROGRAM = Path(sys.executable).with_name("kvroute")
pytestmark = pytest.mark.live


def _promtool(*arguments: str) -> None:
    done = subprocess.run([required("promtool", "prometheus"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_configuration_and_rules() -> None:
    _promtool("check", "config", str(SHIPPED / "prometheus.yml"))
    _promtool("check", "rules", str(SHIPPED / "kvroute-alerts.yml"))


def test_every_alert_fires_in_its_case_and_none_on_a_healthy_gateway() -> None:
    """The test cases cover every alert in the repository."""
    _promtool("test", "rules", str(CASES))
    rules = yaml.safe_load((SHIPPED / "kvroute-alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r'alertname="(\w+)"', CASES.read_text())) == alerts


def _get_json(url: str) -> Any:
    """Return the `data` of a response of Prometheus, None while the server starts."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


def test_prometheus_scrapes_a_gateway_with_a_token_and_reports_it_not_ready(tmp_path: Path) -> None:
    """No engine of the file runs. Every rule is evaluated without an error, and its texts are expanded."""
    program, admin_port = required("prometheus", "prometheus"), free_port()
    cluster = yaml.safe_load((EXAMPLES / "small.yaml").read_text())
    for number, instance in enumerate(cluster["instances"]):
        instance["endpoint"] = {"url": f"http://127.0.0.1:{number + 1}"}
    cluster["gateway"] = {"admin": {"port": admin_port, "read_token": "a-token-for-prometheus"}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (tmp_path / "token").write_text("a-token-for-prometheus")
    (tmp_path / "kvroute-alerts.yml").write_bytes((SHIPPED / "kvroute-alerts.yml").read_bytes())
    config = (SHIPPED / "prometheus.yml").read_text()
    for was, now in (
        ("scrape_interval: 15s", "scrape_interval: 1s"),
        ("127.0.0.1:9090", f"127.0.0.1:{admin_port}"),
        ("# authorization:", "authorization:"),
        ("#   credentials_file: /etc/prometheus/kvroute-read-token", f"  credentials_file: {tmp_path}/token"),
    ):
        assert was in config
        config = config.replace(was, now)
    (tmp_path / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{config}")

    def pending(url: str) -> dict[str, Any]:
        page = _get_json(f"{url}/api/v1/alerts") or {"alerts": []}
        return {alert["labels"]["alertname"]: alert for alert in page["alerts"]}

    with (
        started([str(PROGRAM), "serve", str(tmp_path / "cluster.yaml"), "--port", "0"], "dashboard and metrics"),
        prometheus(program, tmp_path / "prometheus.yml", tmp_path) as url,
    ):
        expected = {"KvrouteNotReady", "KvrouteInstanceDown"}
        asyncio.run(until(lambda: expected <= set(pending(url)), poll_s=0.1))
        alerts = pending(url)
        assert "KvrouteDown" not in alerts
        texts = [text for alert in alerts.values() for text in alert["annotations"].values()]
        assert not [text for text in texts if "error" in text or "no value" in text]
        summary = alerts["KvrouteInstanceDown"]["annotations"]["summary"]
        assert re.fullmatch(r"The (prefill|decode) instance \1[01] fails its health checks\.", summary)
        groups = _get_json(f"{url}/api/v1/rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
        assert "ok" in {rule["health"] for group in groups for rule in group["rules"]}
