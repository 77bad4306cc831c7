"""docs/vllm.md: its cluster file loads and matches its commands."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from kvroute.topology import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "vllm-tp8.yaml"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_example_whole() -> None:
    """The page and the example file have the same text."""
    assert _blocks("yaml") == [EXAMPLE.read_text(encoding="utf-8")]


def test_the_addresses_of_the_file_are_those_of_the_commands() -> None:
    """Each engine has a server in the text, and the ports of its role's command."""
    commands = {role: block for block in _blocks("sh") for role in _nixl_role(block)}
    for instance in load(EXAMPLE).instances:
        assert instance.endpoint is not None
        command = commands[instance.role]
        url, events, replay = map(
            urlsplit, (instance.endpoint.url, instance.endpoint.kv_events, instance.endpoint.kv_replay)
        )
        assert {url.hostname} == {events.hostname, replay.hostname}
        [servers] = re.findall(rf"On the {instance.role} servers (.*):", PAGE)
        assert url.hostname in servers.split(" and ")
        assert f"--port {url.port} " in command
        assert f'"endpoint": "tcp://*:{events.port}"' in command
        assert f'"replay_endpoint": "tcp://*:{replay.port}"' in command
        assert f"--tensor-parallel-size {instance.tp} " in command
        assert f"vllm serve {instance.model} " in command


def _nixl_role(block: str) -> list[str]:
    """Return the role of the engine that a block starts with NIXL; empty for other blocks."""
    roles = {"kv_producer": "prefill", "kv_consumer": "decode"}
    return [roles[role] for role in re.findall(r'"NixlConnector", "kv_role": "(\w+)"', block)]
