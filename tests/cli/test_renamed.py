"""Names of the previous version: files, logs and commands that have them mean the same as with present names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.cli_rig import EXAMPLES, Kvroute

from kvroute.control import ControlSpec, LogRecord
from kvroute.control.log.entries import (
    LogHeader,
    decisions_equal,
    decode_header,
    decode_record,
    encode,
)
from kvroute.serve.config.preflight import settings_of
from kvroute.topology import parse
from kvroute.types import Arrived, InputErrors, Request
from kvroute_engine import renamed
from kvroute_engine.files.document import with_present_names

TEXT = (EXAMPLES / "small.yaml").read_text(encoding="utf-8")
FORMS = [
    ("gateway: {parameters: {alone: 1}}", "gateway.parameters.alone"),
    ("gateway: {policy: {tpot: 1 s, 'alone': 1}}", "gateway.policy.alone"),
    ("gateway:\n  parameters: # alone: one\n    # alone\n    alone:   1e0  # alone: 1", "gateway.parameters.alone"),
]


@pytest.mark.parametrize(("section", "field"), FORMS)
def test_an_old_key_of_a_cluster_file_counts_and_gives_one_warning(section: str, field: str) -> None:
    text = f"{TEXT}\n{section}\n"
    cluster = parse(text, "cluster.yaml")
    assert settings_of(text, "cluster.yaml").control_spec().parameters["aggregated"] == 1.0
    [warning] = [remark for remark in cluster.remarks if "is now called" in remark]
    line = 1 + next(
        n for n, text_line in enumerate(text.split("\n")) if text_line.lstrip(" {").startswith(("alone", "gateway: {"))
    )
    assert warning.startswith(f"cluster.yaml:{line}: {field}: is now called `aggregated`")


@pytest.mark.parametrize(("section", "field"), FORMS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_rewritten_file_means_the_same_and_differs_in_the_key_only(section: str, field: str, end: str) -> None:
    """Comments that have the word stay, also before the key and beyond the first plane of Unicode."""
    text = f"# alone \U0001f600 ü\n{TEXT}\n{section}\n".replace("\n", end)
    written, [warning] = with_present_names(text, "cluster.yaml")
    assert warning.field == field
    assert settings_of(written, "f") == settings_of(text, "f")
    assert not [remark for remark in parse(written).remarks if "is now called" in remark]
    old, new = text.split(end), written.split(end)
    assert [(a, b) for a, b in zip(old, new, strict=True) if a != b] == [
        (old[warning.line - 1], new[warning.line - 1]),
    ]
    assert len(written) == len(text) + len("aggregated") - len("alone")
    assert with_present_names(written, "f") == (written, [])


def test_a_key_under_both_names_is_an_error() -> None:
    text = f"{TEXT}\ngateway: {{parameters: {{alone: 1, aggregated: 1}}}}\n"
    with pytest.raises(InputErrors, match="has no parameter 'alone'"):
        settings_of(text, "f")
    assert with_present_names(text, "f") == (text, [])


def test_check_renames_the_keys_of_a_file_if_asked(kvroute: Kvroute, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{TEXT}\ngateway: {{parameters: {{alone: 1}}}} # 1\n", encoding="utf-8")
    assert "is now called `aggregated`; `kvroute topology check --write`" in kvroute("topology", "check", str(file)).err
    assert "parameters: {alone: 1}" in file.read_text(encoding="utf-8")
    ended = kvroute("topology", "check", str(file), "--write")
    assert "gateway.parameters.alone: is now called `aggregated`; renamed in the file" in ended.err
    assert file.read_text(encoding="utf-8") == f"{TEXT}\ngateway: {{parameters: {{aggregated: 1}}}} # 1\n"
    assert not kvroute("topology", "check", str(file), "--write").err


def with_old_names(document: Any, table: Any) -> bytes:
    """Return the JSON of the previous version."""
    back = {(*path[:-1], name): path[-1] for path, name in table.items()}
    renamed.rename_keys(document, back)
    return json.dumps(document).encode()


def test_a_log_of_the_previous_version_replays_to_the_same_decisions() -> None:
    spec = ControlSpec(parameters={"aggregated": 2.0}, overcommit=True)
    recording, records = spec.build(parse(TEXT)), []
    for number in range(60):
        event = Arrived(
            0.1 * number, Request(id=number, input_tokens=2_000 + 900 * (number % 7)), both_on_arrival=number % 3 == 0
        )
        records.append(LogRecord(event, recording.handle(event)))
    lines = [with_old_names(json.loads(encode(record)), renamed.LOG_RECORD) for record in records]
    text = b"\n".join(lines)
    assert all(b'"%b"' % path[-1].encode() in text for path in renamed.LOG_RECORD)
    assert not any(b'"%b"' % name.encode() in text for name in renamed.LOG_RECORD.values())
    header = decode_header(with_old_names(json.loads(encode(LogHeader(cluster=TEXT, spec=spec))), renamed.LOG_HEADER))
    assert header.spec == spec
    again = header.spec.build(parse(header.cluster))
    for line, record in zip(lines, records, strict=True):
        read = decode_record(line)
        assert read.event == record.event
        assert decisions_equal(read.decisions, again.handle(read.event))


@given(st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)))
def test_keys_keep_their_order_and_values(document: Any) -> None:
    before = msgspec.json.decode(msgspec.json.encode(document))
    renamed.rename_keys(document, {("a", "b"): "new"})
    if isinstance(before, dict) and isinstance(inner := before.get("a"), dict):
        assert list(document["a"].items()) == [("new" if key == "b" else key, value) for key, value in inner.items()]
        document["a"] = inner
    assert document == before


def test_an_experiment_runs_under_its_former_name(kvroute: Kvroute) -> None:
    ended = kvroute("experiment", "alone", "--profile", "none")
    assert ended.code == 2
    assert ended.err.startswith("experiment 'alone' is now called 'aggregated'\n")
    assert "there is no experiment" not in ended.err
