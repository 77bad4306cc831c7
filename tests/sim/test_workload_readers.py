"""Trace files: written traces read back equal, and errors give their line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.workload import Trace, TracedRequest, read, rescale, share_prefixes, write
from kvroute.types import InputError, InputErrors

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 3]}\n'
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=20)))
    requests = []
    for at_s in times:
        size = draw(st.sampled_from([1, 16, 512]))
        tokens = draw(st.integers(1, 2_000))
        count = draw(st.sampled_from([0, tokens // size, -(-tokens // size)]))
        first, group = draw(st.integers(0, 2**64 - 2_001)), draw(st.none() | st.integers(0, 9))
        requests.append(
            TracedRequest(at_s, tokens, draw(st.integers(0, 99)), tuple(range(first, first + count)), size, group)
        )
    return Trace("law", tuple(requests))


@given(traces(), st.sampled_from([".jsonl", ".jsonl.zst", ".jsonl.gz"]))
@settings(max_examples=40, deadline=None)
def test_a_written_trace_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, trace: Trace, ending: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"round-trip{ending}"
    write(trace, path)
    assert read(path).requests == trace.requests


def test_a_mooncake_trace_is_written_with_its_four_keys_only(tmp_path: Path) -> None:
    source, copy = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text(MOONCAKE)
    write(read(source), copy)
    assert [json.loads(line) for line in copy.read_text().splitlines()] == [
        json.loads(line) for line in MOONCAKE.splitlines()
    ]
    shared = share_prefixes(rescale(read(source), 0.3), 1.0, seed=1)
    write(shared, copy)
    assert read(copy).requests == shared.requests


def test_mooncake_traces_are_recognised_by_content(tmp_path: Path) -> None:
    expected = (
        TracedRequest(0.0, 1200, 9, (0, 1, 2), 512),
        TracedRequest(3.0, 1024, 0, (0, 3), 512),
    )
    content = b"\xef\xbb\xbf" + MOONCAKE.replace("\n", "\r\n\n").encode()
    half = len(content) // 2
    pack = zstandard.ZstdCompressor().compress
    packings = (content, gzip.compress(content), pack(content), pack(content[:half]) + pack(content[half:]))
    for packed in packings:
        path = tmp_path / "trace.csv"
        path.write_bytes(packed)
        trace = read(path)
        assert trace.requests == expected
        assert trace.name == "trace"
        (silent,) = trace.remarks
        assert silent.startswith("the output of 1 of 2 requests has 0 tokens; they end with their prompt")


@pytest.mark.parametrize(
    ("text", "gap_s", "lengths"),
    [(AZURE_2023, 4.314579, [(374, 44), (396, 109)]), (AZURE_2024, 0.99007, [(2162, 5), (2399, 6)])],
)
def test_azure_times_start_at_the_first_request(
    tmp_path: Path, text: str, gap_s: float, lengths: list[tuple[int, int]]
) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_text(text, newline="")
    first, second = read(path).requests
    assert first.at_s == 0.0
    assert second.at_s == pytest.approx(gap_s, abs=1e-6)
    assert [(request.input_tokens, request.output_tokens) for request in (first, second)] == lengths
    assert first.blocks == ()


def test_columns_may_be_in_any_order_with_others(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"GeneratedTokens",Region,"ContextTokens",TIMESTAMP\n5,west,"70",2024-05-10 00:00:00\n')
    assert read(path).requests == (TracedRequest(0.0, 70, 5, (), 16),)


def test_unsorted_times_are_sorted_stably_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [(3000, 1), (0, 2), (3000, 3), (0, 4)]
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": {n}, "output_length": 1}}\n' for at, n in rows))
    trace = read(path)
    assert [request.input_tokens for request in trace.requests] == [2, 4, 1, 3]
    assert trace.remarks == ("time went backwards 2 times; requests are sorted by arrival",)


def test_epoch_times_in_milliseconds_start_at_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = (1_700_000_000_000, 1_700_000_002_500)
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": 5, "output_length": 1}}\n' for at in rows))
    assert [request.at_s for request in read(path).requests] == [0.0, 2.5]


BROKEN = {
    '{"timestamp": NaN, "input_length": 5, "output_length": 1}': "malformed",
    '{"timestamp": 1e999, "input_length": 5, "output_length": 1}': "field timestamp",
    '{"timestamp": -1, "input_length": 5, "output_length": 1}': "field timestamp",
    '{"timestamp": 1, "input_length": 0, "output_length": 1}': "field input_length",
    '{"timestamp": 1, "input_length": 5.5, "output_length": 1}': "field input_length",
    '{"timestamp": 1, "input_length": 5, "output_length": -1}': "field output_length",
    '{"timestamp": 1, "input_length": 5}': "field output_length: it is missing;",
    '{"timestamp": 1, "input_length": 5, "output_lenght": 1}': "output_length: .* did you mean it by 'output_lenght'?",
    '{"timestamp": 1, "input_length": 1025, "output_length": 1, "hash_ids": [7]}': "field hash_ids: 1 ids for 1025",
    '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}': "field hash_ids",
    '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [18446744073709551616]}': "64 bits",
    '{"timestamp": 1, "input_le': "malformed|truncated|JSON",
    "\x00\x01": "malformed",
}


@pytest.mark.parametrize("line", BROKEN)
def test_an_invalid_line_is_named_and_can_be_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(MOONCAKE + line + "\n" + MOONCAKE)
    with pytest.raises(InputErrors, match=rf"a\.jsonl:3: .*({BROKEN[line]})"):
        read(path)
    skipped: list[InputError] = []
    trace = read(path, skip_bad=True, on_skip=skipped.append)
    assert len(trace.requests) == 4
    assert [fault.where for fault in skipped] == [f"{path}:3"]
    assert trace.remarks[0] == "1 invalid line skipped"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("yesterday,5,5", "TIMESTAMP"),
        ("2024-05-10,0,5", "ContextTokens"),
        ("2024-05-10,nan,5", "ContextTokens"),
        ("2024-05-10,-3,5", "ContextTokens"),
        ("2024-05-10,5,5.5", "GeneratedTokens"),
        ("2024-05-10,5", "2 fields"),
    ],
)
def test_an_invalid_azure_row_names_its_field(tmp_path: Path, row: str, field: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE_2024 + row + "\n")
    with pytest.raises(InputErrors, match=rf"a\.csv:4: .*{field}"):
        read(path)
    assert len(read(path, skip_bad=True).requests) == 2


def test_ten_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 1}\n' * 30)
    with pytest.raises(InputErrors) as caught:
        read(path)
    assert [fault.where for fault in caught.value.problems] == [f"{path}:{line}" for line in range(1, 11)]
    with pytest.raises(InputError, match="has no requests"):
        read(path, skip_bad=True)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"time,tokens\n1,2\n", "neither"),
        (b"[{}]", "array"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (gzip.compress(MOONCAKE.encode())[:-9], "cut off"),
        (zstandard.ZstdCompressor().compress(MOONCAKE.encode())[:-9], "cut off"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "damaged"),
    ],
    ids=["empty", "blank", "other csv", "array", "header only", "gzip cut off", "zstd cut off", "zstd damaged"],
)
def test_a_file_that_is_no_trace_is_rejected(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=what):
        read(path)


def test_unreadable_and_unwritable_files_are_named(tmp_path: Path) -> None:
    trace = Trace("one", (TracedRequest(0.0, 5, 1, (), 16),))
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        write(trace, tmp_path / "no" / "such.jsonl")
    with pytest.raises(InputError, match=r"use \.jsonl"):
        write(trace, tmp_path / "a.csv")


def test_the_block_size_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}\n')
    assert read(path, block_tokens=16).requests[0].block_tokens == 16
    with pytest.raises(InputError, match="hash_ids"):
        read(path)
    with pytest.raises(InputError, match="block_tokens"):
        read(path, block_tokens=0)
