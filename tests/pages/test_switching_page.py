"""docs/switching.md: its cluster files are valid, and the keys, options and policies of kvroute that it names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from kvroute.cli.app import app
from kvroute.policies import DECODE_POLICIES, PREFILL_POLICIES
from kvroute.serve.config.preflight import deployment_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology.json_schema import cluster_json_schema

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "switching.md").read_text(encoding="utf-8")
FILES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SCHEMA = cluster_json_schema({"gateway": GatewaySettings})
CHOICES: dict[str, set[str]] = {"gateway.policy": set(DECODE_POLICIES), "gateway.prefill": set(PREFILL_POLICIES)}


def _rows() -> Iterator[tuple[str, str]]:
    """Yield the first two cells of each row whose table translates options or policies to kvroute's."""
    translates = False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| "):
            translates = translates and line.startswith("|")
        elif cells[1:3] == ["kvroute", "What changes"]:
            translates = True
        elif translates:
            assert len(cells) == 3, line
            yield cells[0], cells[1]


def _mapping(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties of a mapping, of each entry of a list, or of the first such alternative."""
    if "$ref" in schema:
        return _mapping(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    for choice in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        if found := _mapping(choice):
            return found
    return dict(schema.get("properties", {}))


def _exists(key: str) -> bool:
    properties: Mapping[str, Any] = SCHEMA["properties"]
    for name in key.split("."):
        if name not in properties:
            return False
        properties = _mapping(properties[name])
    return True


def _options(command: str) -> set[str]:
    """Return the options and arguments of a command; of kvroute itself for an empty text."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    found = group.get_command(typer.Context(group), command) if command else group
    assert found is not None, command
    return {option for param in found.params for option in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("text", FILES, ids=lambda text: re.match(r"name: (\S+)", text)[1])  # type: ignore[index]
def test_each_cluster_file_of_the_page_can_be_served(text: str) -> None:
    """The loader of `kvroute serve` accepts it, and the text above names it."""
    cluster, _ = deployment_of(text, f"{ROOT}/cluster.yaml", environ={})
    assert re.search(rf"After.*`kvroute (serve|epp) {cluster.name}\.yaml", PAGE)


def test_each_product_has_a_file() -> None:
    assert len(FILES) == len(re.findall(r"^## From ", PAGE, re.MULTILINE)) == 4


def test_each_key_option_and_policy_in_the_column_kvroute_exists() -> None:
    """A cell is `none`, or it consists of keys (with a value or without) and of commands with an option."""
    rows = list(_rows())
    assert len(rows) > 150
    for option, cell in rows:
        if cell == "none":
            continue
        assert re.fullmatch(r"`[^`]+`((, | with )`[^`]+`)*", cell), (option, cell)
        for text in re.findall(r"`([^`]+)`", cell):
            if text.startswith("kvroute "):
                *command, argument = text.split()[1:]
                assert argument in _options(" ".join(command)), (option, text)
            else:
                key, _, value = text.partition(": ")
                assert _exists(key), (option, key)
                if key in CHOICES and value:
                    assert value in CHOICES[key], (option, text)


def test_each_row_names_an_option_once_for_each_product() -> None:
    """No option of a product has two rows."""
    for section in re.split(r"^##+ |^\| (?:Option|Policy|Plug-in|Environment)", PAGE, flags=re.MULTILINE):
        named = [name for row in re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE) for name in row.split("`")[1::2]]
        assert sorted(set(named)) == sorted(named)


def test_the_page_is_for_the_versions_that_the_benchmarks_pin() -> None:
    """A new pin requires a look at the new options."""
    pins = "".join(
        (ROOT / "bench" / "peers" / f"requirements-{peer}.txt").read_text() for peer in ("routers", "dynamo")
    )
    for name, package in {
        "vllm-router": "vllm-router",
        "SGLang gateway": "sglang-router",
        "NVIDIA Dynamo": "ai-dynamo-runtime",
    }.items():
        [version] = re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE)
        assert re.search(rf"^\| {name}[^|]*\| {re.escape(version)} \|", PAGE, re.MULTILINE), (name, version)
