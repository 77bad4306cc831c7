"""Secrets never leave the process, in a page or in a log; the types of the settings mark which ones are secrets."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from tests.serve.every_setting import SECRETS, every_setting, leaves
from tests.serve.rig import CLUSTER

from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.serve.observe.redaction import is_secret, names_secret, redacted, redacted_file
from kvroute.topology import parse
from kvroute_engine.origins import STRUCK

NO_SECRETS = {
    *(
        "listen.tls.key",
        "admin.tls.key",
        "prompt.tokenizer",
        "prompt.tokenizers.*",
        "upstream_key_env",
        "cache_salt_secret_env",
    ),
    *("replication.password_env", "replication.password_file"),
}
"""Settings whose names look like secrets but are paths of files or names of environment variables."""


def test_settings_with_the_name_of_a_secret_are_marked_as_secret() -> None:
    """Mark a new setting with `amounts.Secret`, or add it to `NO_SECRETS` if it is not a secret."""
    texts = [
        (".".join(path), known)
        for path, known in leaves(inspect.type_info(GatewaySettings))
        if "StrType" in repr(known)
    ]
    marked = {name for name, known in texts if is_secret(known)}
    assert {"admin.push_token", "keys.known.*"} <= marked
    secret_names = {name for name, _ in texts if names_secret(name.removesuffix(".*").rpartition(".")[2])}
    assert secret_names - marked <= NO_SECRETS


def test_untyped_values_are_removed_by_name() -> None:
    """Values with the name of a secret, hashes of keys, and passwords and queries in URLs are removed; all others
    stay."""
    shown = redacted(
        {
            "keys": [{"name": "anna", "hash": "sha256:00", "concurrency": 4}, "sha256:11"],
            "per_key": 256,
            "url": "http://user:pass@prometheus:9090/api?token=S3CRET#part",
            "policy": "netkv",
            "other": "sha256:22",
            "push_token": None,
        }
    )
    assert shown == {
        "keys": [{"name": "anna", "hash": "***", "concurrency": 4}, "***"],
        "per_key": 256,
        "url": "http://***@prometheus:9090/api?***#part",
        "policy": "netkv",
        "other": "***",
        "push_token": None,
    }


@given(
    st.recursive(
        st.text(max_size=8) | st.integers(), lambda held: st.lists(held) | st.dictionaries(st.text(max_size=5), held)
    )
)
def test_a_secret_is_removed_at_every_depth(settings: Any) -> None:
    """The text of a token is removed at every depth."""
    shown = json.dumps(redacted({"a": settings, "b": [{"c": {"push_token": "S3CRET!", "x": settings}}]}))
    assert "S3CRET!" not in shown


def test_a_redacted_file_describes_the_same_cluster() -> None:
    """Every setting is given; comments are removed because they may contain an old token."""
    section = yaml.safe_dump({SECTION: every_setting()})
    assert all(secret in section for secret in SECRETS)
    text = CLUSTER.partition(f"{SECTION}:")[0] + f"# once push_token: {SECRETS[0]}\n" + section
    redacted_text = redacted_file(text, "f")
    assert not any(secret in redacted_text for secret in SECRETS)
    assert redacted_text.count(STRUCK) == sum(section.count(secret) for secret in SECRETS)
    assert parse(redacted_text).file == parse(redacted_file(redacted_text, "f")).file
    before, after = parse(text), parse(redacted_text)
    assert before.instances == after.instances
    assert before.links == after.links
    assert before.timing == after.timing
    again = yaml.safe_load(redacted_text)[SECTION]
    assert (again["limits"], again["offload"]) == (every_setting()["limits"], every_setting()["offload"])
