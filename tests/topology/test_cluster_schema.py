"""The JSON Schema of a cluster file accepts the files that kvroute reads, and rejects those that it rejects for their
form."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml
from tests.commands import kvroute_command
from tests.examples import CLUSTERS, PLANS

from kvroute.files.units_in_structs import without_units
from kvroute.kube.resources.fields import camel_case
from kvroute.kube.resources.timing import DecodeTime
from kvroute.serve.config.preflight import deployment_of
from kvroute.topology.json_schema import cluster_json_schema
from kvroute.topology.schema import DecodeEntry
from kvroute.types import DecodeSpec, InputError, InputErrors
from kvroute_engine.files.units import quantity_text

SMALL = Path(__file__).resolve().parents[2] / "examples" / "small.yaml"


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """The output of `kvroute topology schema`."""
    command = kvroute_command("topology", "schema")
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(out.stdout)
    return document


@pytest.fixture(scope="module")
def accepts(printed: dict[str, Any]) -> Callable[[object], bool]:
    """Return whether a document is valid by the schema."""
    return jsonschema_rs.validator_for(printed).is_valid


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_an_example_cluster_follows_the_schema(path: Path, accepts: Callable[[object], bool]) -> None:
    """Every cluster file in the repository is checked."""
    assert accepts(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_is_rejected_as_a_cluster_file(path: Path, accepts: Callable[[object], bool]) -> None:
    """The schema rejects other kinds of files."""
    assert not accepts(yaml.safe_load(path.read_text()))


def _set(document: Any, path: str, value: object) -> None:
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for parent in parents:
        document = document.setdefault(parent, {}) if isinstance(document, dict) else document[parent]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nodez", []),
        ("name", "two words"),
        ("name", "trailing-newline\n "),
        ("instances/0/role", "prefil"),
        ("instances/0/tp", 0),
        ("nodes/0/nics/compute/capacity", 100),
        ("nodes/0/nics/compute/capacity", "100 Gb"),
        ("nodes/0/nics/compute/count", 2.5),
        ("timing/default/prefill/kind", "cubic"),
        ("gateway/limits/queue_wait", "30"),
        ("gateway/listen/port", 70_000),
        ("gateway/health/panic", 1.5),
        ("gateway/offload/threshold", "many tokens"),
        ("gateway/no_such_key", 1),
    ],
)
def test_an_invalid_value_is_rejected_by_both(path: str, value: object, accepts: Callable[[object], bool]) -> None:
    """The schema and kvroute itself reject the same errors of form."""
    document = yaml.safe_load(SMALL.read_text())
    _set(document, path, value)
    assert not accepts(document)
    with pytest.raises(InputErrors):
        deployment_of(yaml.safe_dump(document), "small.yaml", embedded=True, environ=None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nodes/0/nics/compute/capacity", "12.5 GB/s"),
        ("gateway/limits/queue_wait", "500 ms"),
        ("gateway/prompt/memory", "1 GiB"),
        ("gateway/log/file_size", "1.5e6 B"),
    ],
)
def test_a_valid_value_is_accepted_by_both(path: str, value: object, accepts: Callable[[object], bool]) -> None:
    """There are units of every kind."""
    document = yaml.safe_load(SMALL.read_text())
    _set(document, path, value)
    assert accepts(document)
    deployment_of(yaml.safe_dump(document), "small.yaml", embedded=True, environ=None)


def test_patterns_and_descriptions_are_usable_by_editors(printed: dict[str, Any]) -> None:
    """JavaScript has no `\\Z`; a default has the form of the file, and attributes have descriptions."""
    assert r"\\Z" not in json.dumps(printed)
    node = printed["$defs"]["Node"]["properties"]["nvlink"]
    assert node["default"] == "450 GB/s"
    assert node["description"].startswith("Per GPU and direction. A bandwidth")


def test_without_the_gateway_extra_its_section_is_not_checked() -> None:
    """An installation for simulation only does not include the keys of the gateway."""
    validator = jsonschema_rs.validator_for(cluster_json_schema({}))
    document = yaml.safe_load(SMALL.read_text())
    assert validator.is_valid(document | {"gateway": {"no_such_key": 1}})
    assert not validator.is_valid(document | {"no_such_key": 1})


def test_the_decode_time_is_declared_once() -> None:
    """Entries of cluster files and custom resources have the fields of `DecodeSpec`, with a unit, and its numbers."""
    spec = DecodeSpec(base_s=12.5e-3, per_request_s=1e-4, per_context_token_s=2e-9)
    entry = DecodeEntry(**msgspec.structs.asdict(spec))
    assert msgspec.to_builtins(entry, enc_hook=quantity_text) == {
        "base": "12.5 ms",
        "per_request": "100 us",
        "per_context_token": "2 ns",
    }
    assert without_units(entry, DecodeSpec) == spec
    keys = {kind: kind.__struct_encode_fields__ for kind in (DecodeSpec, DecodeEntry, DecodeTime)}
    assert keys[DecodeEntry] == tuple(name.removesuffix("_s") for name in keys[DecodeSpec])
    assert keys[DecodeTime] == tuple(camel_case(name) for name in keys[DecodeEntry])
    with pytest.raises(InputError, match="out of range for a duration"):
        DecodeEntry(base_s=-1.0)
