"""The `replication:` section of the gateway's settings: each fault has its line, one sentence and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.serve.config.preflight import settings_of
from kvroute.serve.config.replication import ReplicationSection, password_of
from kvroute.types import InputErrors

URL = "redis: 'redis://127.0.0.1:6379'"
FAULTS = {
    "no server": ("{lease: 5 s}", "`redis`"),
    "other scheme": ("{redis: 'http://a:1'}", "gateway.replication.redis"),
    "password in the URL": ("{redis: 'redis://me:hidden@a:1'}", "the URL contains a password; leave it out"),
    "password as a query": ("{redis: 'redis://a:1?password=hidden'}", "the URL contains a password; leave it out"),
    "two passwords": (f"{{{URL}, password_env: A, password_file: f}}", "both `password_env` and `password_file`"),
    "flush": (f"{{{URL}, lease: 1 s, flush: 0.5 s}}", "is longer than a quarter of `lease`"),
    "lease": (f"{{{URL}, lease: 10 ms}}", "between 1 s and 1 h"),
    "no variable": (f"{{{URL}, password_env: KVROUTE_ABSENT}}", "variable KVROUTE_ABSENT is not set; export KVROUTE"),
    "no file": (f"{{{URL}, password_file: absent.txt}}", "absent.txt; paths are relative to the cluster file"),
    "entries": (f"{{{URL}, entries: 1}}", "gateway.replication.entries"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_line_and_a_fix(fault: str) -> None:
    """The message names the line and says what to write."""
    section, sentence = FAULTS[fault]
    with pytest.raises(InputErrors) as found:
        settings_of(f"name: a\ngateway:\n  policy: netkv\n  replication: {section}\n", "f")
    assert any(str(problem).startswith("f:4:") and sentence in str(problem) for problem in found.value.problems), (
        found.value.problems
    )


def test_gateways_need_the_same_salts() -> None:
    """Random salts would hide the prefixes of one gateway from the others."""
    text = f"gateway:\n  keys: {{known: {{a: '{'k' * 20}'}}}}\n  cache_salt: per-key\n  replication: {{{URL}}}\n"
    with pytest.raises(InputErrors) as found:
        settings_of(text, "f")
    assert any("none would find another's prefixes" in str(problem) for problem in found.value.problems)


def test_the_password_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's path is relative to the cluster file, and its line end is no part of the password."""
    (tmp_path / "password.txt").write_text("from-the-file\n")
    text = f"gateway: {{replication: {{{URL}, password_file: password.txt}}}}\n"
    section = settings_of(text, str(tmp_path / "cluster.yaml")).replication
    assert section is not None
    assert password_of(section) == "from-the-file"
    monkeypatch.setenv("KVROUTE_TEST_PASSWORD", "from-the-environment")
    assert password_of(ReplicationSection(redis="redis://a:1", password_env="KVROUTE_TEST_PASSWORD")) == (
        "from-the-environment"
    )
    assert password_of(ReplicationSection(redis="redis://a:1")) is None
