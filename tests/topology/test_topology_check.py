"""Wrong cluster files: every corruption is reported on its line, every kind of error has a message, no text causes a
crash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import CLUSTERS

from kvroute.topology import Cluster, FileError, load, parse
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.form import field_text

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in CLUSTERS}

QUANTITY = re.compile(r"\b\d+(?:\.\d+)? (?:[GMK]bps|GB/s|GB|us|ms|s)\b")
KEY = re.compile(r"(?<=[{\s])(?!default:|fast:|slow:)[a-z_]+(?=:(?:\s|$))", re.M)
REFERENCE = re.compile(
    r"(?<=rack: )\w[\w-]*|(?<=datacenter: )[a-z]\w*-\w+|(?<=from: )[\w-]+|(?<=to: )[\w-]+|node\d+(?=:\d)"
)
CHOICE = re.compile(r"(?<=kind: )[\w-]+|(?<=role: )\w+|(?<=scope: )\w+|(?<=ecmp: )\w+|(?<=placement: )\w+")
OTHERS = re.compile(r"#.*|^(?:gateway|qos):.*\n(?:[ \n].*\n?)*", re.M)
"""Parts that this reader ignores: comments, and the sections that the gateway and the planner check."""
GPUS = re.compile(r"(?<=:)0-\d(?=\")")
CORRUPTIONS: list[tuple[re.Pattern[str], list[str]]] = [
    (QUANTITY, ["100 Gb", "-1 Gbps", "100", ".nan", ".inf", "fast", "1e400 s", "[]", "9e99 GB", ""]),
    (KEY, ["kye", "nam", "Uplinks"]),
    (REFERENCE, ["nowhere", "rack77"]),
    (CHOICE, ["no-such-thing", "3", "null", "[a]", "{}"]),
    (GPUS, ["0-900", "x", "3-1", "0-2", ""]),
]


def problems_of(text: str) -> list[FileError]:
    with pytest.raises(InputErrors) as caught:
        parse(text, "f")
    assert all(isinstance(problem, FileError) for problem in caught.value.problems)
    return [problem for problem in caught.value.problems if isinstance(problem, FileError)]


@st.composite
def corrupted(draw: st.DrawFn) -> tuple[str, int, str]:
    """Draw a valid file with one token replaced; return also its line and the new token."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS)))]
    pattern, replacements = draw(st.sampled_from(CORRUPTIONS))
    code = OTHERS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    places = [match.span() for match in pattern.finditer(code)]
    if not places:
        pattern, replacements = CORRUPTIONS[0]
        places = [match.span() for match in pattern.finditer(code)]
    start, end = draw(st.sampled_from(places))
    new = draw(st.sampled_from(replacements))
    return text[:start] + new + text[end:], text.count("\n", 0, start) + 1, new


@given(corrupted())
@settings(max_examples=150, deadline=None)
def test_every_corruption_is_named_on_its_line(drawn: tuple[str, int, str]) -> None:
    text, line, new = drawn
    problems = problems_of(text)
    assert line in [problem.line for problem in problems], (new, [str(problem) for problem in problems])
    assert all(problem.what and str(problem).startswith("f:") for problem in problems)
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


VALUES = [(QUANTITY, ["100 Gb", "-1 Gbps", "fast", "[]"]), (CHOICE, ["no-such-thing", "{}"]), (GPUS, ["0-900", "x"])]
UNKNOWN = ["nowhere", "rack77"]
LEAF = re.compile(rf"{KEY.pattern}(?=: +[^\s\[{{#])", re.M)
"""A key whose value contains no further keys."""


@st.composite
def corrupted_twice(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Draw a valid file with a token replaced on each of two lines; return also the lines."""
    text = TEXTS[draw(st.sampled_from(sorted(TEXTS)))]
    code = OTHERS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    edits: list[tuple[int, int, str]] = []
    for _ in range(2):
        kinds = [*VALUES, (LEAF, ["kye", "nam"]), (REFERENCE, UNKNOWN)]
        places = [
            (*match.span(), replacements)
            for pattern, replacements in kinds
            for match in pattern.finditer(code)
            if all(text.count("\n", 0, match.start()) != text.count("\n", 0, edit[0]) for edit in edits)
        ]
        start, end, replacements = draw(st.sampled_from(places))
        edits.append((start, end, draw(st.sampled_from(replacements))))
    # A reference to an unknown name may mean the entry whose name is missing; it is reported only once that entry has a
    # name.
    assume(all(code[start:end] != "name" for start, end, _ in edits) or all(new not in UNKNOWN for _, _, new in edits))
    lines = sorted(text.count("\n", 0, start) + 1 for start, _, _ in edits)
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, lines


@given(corrupted_twice())
@settings(max_examples=150, deadline=None)
def test_two_errors_are_both_reported(drawn: tuple[str, list[int]]) -> None:
    """Neither hides the other, for errors of form and of meaning; errors are sorted by line."""
    text, lines = drawn
    reported = [problem.line for problem in problems_of(text)]
    assert reported == sorted(reported)
    assert set(lines) <= set(reported), [str(problem) for problem in problems_of(text)]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_consequences_of_an_error_of_form_are_not_reported(data: st.DataObject) -> None:
    """A wrong key or unit is one error on one line, whatever depends on the unreadable value."""
    text = TEXTS[data.draw(st.sampled_from(sorted(TEXTS)))]
    code = OTHERS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    kinds = [(QUANTITY, ["100 Gb", "fast", "[]"]), (KEY, ["kye", "zzz"])]
    places = [(*match.span(), replacements) for pattern, replacements in kinds for match in pattern.finditer(code)]
    start, end, replacements = data.draw(st.sampled_from(places))
    changed = text[:start] + data.draw(st.sampled_from(replacements)) + text[end:]
    problems = problems_of(changed)
    missing = [problem for problem in problems if "is missing" in problem.what]
    here = text.count("\n", 0, start) + 1
    assert {problem.line for problem in problems if problem not in missing} == {here}, [
        str(problem) for problem in problems
    ]
    assert len(missing) <= 1


@given(st.sampled_from(sorted(TEXTS)), st.data())
@settings(max_examples=60, deadline=None)
def test_a_missing_line_is_rejected_or_harmless(name: str, data: st.DataObject) -> None:
    lines = TEXTS[name].splitlines()
    lost = data.draw(st.integers(0, len(lines) - 1))
    try:
        cluster = parse("\n".join(lines[:lost] + lines[lost + 1 :]))
    except InputErrors:
        return
    assert isinstance(cluster, Cluster)


@given(st.text(max_size=60) | st.text("[]{}:,-&*!|>'\"#? \nab", max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_text_causes_a_crash(text: str) -> None:
    with pytest.raises(InputErrors):
        parse(text)


@pytest.mark.parametrize(
    "value", ['!!int ""', "!!int '_'", '!!float ""', "!!bool ''", ":".join(["1"] * 400) + ".5", "1" * 5000]
)
def test_a_number_that_yaml_cannot_parse_is_one_error(value: str) -> None:
    (problem,) = problems_of(TEXTS["small.yaml"].replace("gpus: 8,", f"gpus: {value},", 1))
    assert problem.field == "nodes[0].gpus"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{a: " * 3000, "- " * 20_000, "x" * (64 * 2**20 + 1), "\ud800", "a\0b"]
)
def test_malicious_text_is_rejected(text: str) -> None:
    assert len(problems_of(text)) == 1


def edited(old: str, new: str, name: str = "small.yaml") -> str:
    assert old in TEXTS[name]
    return TEXTS[name].replace(old, new, 1)


def reached(fields: str) -> str:
    return edited('0-3"}', f'0-3", endpoint: {{{fields}}}}}')


def reducing(scheme: str, settings: str = "") -> str:
    return edited('0-3"}', f'0-3", {settings}all_reduce: {{{scheme}, per_iteration: 160, token_bytes: 16 KB}}}}')


def card_with(field: str) -> str:
    return edited("100 Gbps", f"100 Gbps, {field}")


ENDPOINT = "instances[0].endpoint"
EFFICIENCY = "nodes[0].nics.compute.efficiency"
TWO_RACKS = edited("{name: rack0} ", "{name: rack0}\n  - {name: rack1}").replace(
    "node1, rack: rack0", "node1, rack: rack1"
)
FAT, FAR = "fat-tree-64gpu.yaml", "two-datacenters.yaml"
LINEAR, PIECES = "{kind: linear, per_token: 90 us, base: 20 ms}", "{kind: piecewise, tokens: [%s], times: [%s]}"
NO_DECODE = TEXTS["small.yaml"].replace("role: decode", "role: prefill")
FAULTS = {
    "nearest key": (edited("nvlink", "nvlnk"), "nodes[0].nvlnk", "did you mean 'nvlink'"),
    "missing key": (edited("name: small", "fabric: null"), "", "`name` is missing"),
    "wrong unit": (edited("100 Gbps", "100 Gb"), "nodes[0].nics.compute.capacity", "one of bps, Kbps, Mbps, Gbps"),
    "absurd capacity": (edited("100 Gbps", "101 Tbps"), "nodes[0].nics.compute.capacity", "1 Kbps and 100 Tbps"),
    "zero capacity": (edited("100 Gbps", "0 Gbps"), "nodes[0].nics.compute.capacity", "out of range"),
    "efficiency of 0": (card_with("efficiency: 0"), EFFICIENCY, "0 does not fit; write a number above 0, at most 1"),
    "efficiency above 1": (card_with("efficiency: 1.1"), EFFICIENCY, "write a number above 0, at most 1"),
    "efficiency in percent": (card_with("efficiency: 90%"), EFFICIENCY, "'90%' does not fit"),
    "negative latency": (edited("node: 1 us", "node: -1 us", FAT), "network.latency.node", "between 0 s and 10 s"),
    "zero count": (edited("count: 8", "count: 0"), "nodes[0].nics.compute.count", "a whole number from 1"),
    "number as name": (edited("name: node0", "name: 0"), "nodes[0].name", "need quotes"),
    "bad name": (edited("name: node0", "name: 'a:b'"), "nodes[0].name", "letters, digits"),
    "duplicate key": (edited("gpus: 8,", "gpus: 8, gpus: 4,"), "nodes[0].gpus", "is defined twice"),
    "duplicate name": (edited("name: node1", "name: node0"), "nodes[1].name", "used twice; nodes[0]"),
    "unknown rack": (edited("node1, rack: rack0", "node1, rack: rack1"), "nodes[1].rack", "did you mean 'rack0'"),
    "unknown pod": (edited("{name: rack0}", "{name: rack0, pod: p}"), "racks[0].pod", "the file lists no pods"),
    "two parents": (edited("rack: rack0,", "rack: rack0, datacenter: dc0,"), "nodes[0]", "only the nearest one"),
    "unknown node": (edited("node1:0-3", "node7:0-3"), "instances[2].gpus", "no node 'node7'"),
    "unknown timing": (edited("0-3\"}", "0-3\", timing: fast}"), "instances[0].timing", "no timing 'fast'"),
    "unknown model": (edited("llama-3-70b", "lama-3-70b"), "defaults.model", "llama-3-70b"),
    "no model": (edited("model: llama-3-70b, ", ""), "instances[0]", "no model is given"),
    "no memory": (edited(", kv_capacity: 180 GB", ""), "instances[0]", "no kv_capacity is given"),
    "GPU used twice": (edited("node0:4-7", "node0:3-6"), "instances[1].gpus", "node0:3 is used twice; prefill0"),
    "GPU repeated": (edited("node0:0-3", "node0:0-2,2"), "instances[0].gpus", "node0:2 is used twice"),
    "GPU out of range": (edited("node0:4-7", "node0:5-8"), "instances[1].gpus", "has 8 GPUs and no GPU 8; use 0 to 7"),
    "too few GPUs": (edited("node0:4-7", "node0:4-6"), "instances[1].gpus", "3 GPUs, but tp 4 x pp 1 = 4"),
    "bad GPUs": (edited("node0:4-7", "node0"), "instances[1].gpus", "is not a list of GPUs"),
    "prefill in a group": (
        edited("role: prefill,", "role: prefill, group: g0,"),
        "instances[0].group",
        "only decode instances have a group",
    ),
    "all-reduce of one GPU": (
        reducing("scheme: ring", "tp: 1, "),
        "instances[0].all_reduce",
        "tp is 1, so there is no all-reduce; remove `all_reduce`",
    ),
    "too many schemes": (
        reducing("scheme: [ring, ina]"),
        "instances[0].all_reduce.scheme",
        "2 schemes are given, but pp is 1; give one scheme for all pipeline stages",
    ),
    "unknown scheme": (
        reducing("scheme: rings"),
        "instances[0].all_reduce.scheme",
        "'rings' does not fit; write one of ring, multi-rail-ring",
    ),
    "no decode": (NO_DECODE, "instances", "no decode"),
    "no uplinks": (TWO_RACKS, "racks[0]", "rack0 has no uplinks, so decode0 cannot be reached from prefill0"),
    "no NICs": (edited(", nics: {compute: {count: 8, capacity: 100 Gbps}}", ""), "nodes[0]", "has no compute NICs"),
    "no wan": (re.sub(r"wan:.*?\n.*?\n", "", TEXTS[FAR]), "wan", "no links between datacenters"),
    "wan to itself": (edited("to: local-site", "to: prefill-site", FAR), "wan[0]", "to itself"),
    "unknown site": (edited("to: local-site", "to: locl-site", FAR), "wan[0].to", "did you mean 'local-site'"),
    "no site": (edited(", datacenter: prefill-site", "", FAR), "racks[0]", "there are several datacenters"),
    "too many": (edited("decode: 12", "decode: 13", FAT), "instances", "do not fit: the nodes have room for 16"),
    "rack too full": (edited("prefill: 4", "prefill: 5", FAT), "instances", "8 for decode outside the prefill racks"),
    "fabric and nodes": (TEXTS[FAT] + "nodes: [{name: x}]\n", "nodes", "cannot be given together"),
    "no nodes": ("name: a\ninstances: {prefill: 1, decode: 1}\n", "", "there are no nodes"),
    "kind": (edited("kind: fat-tree", "kind: fat_tree", FAT), "fabric.kind", "fat-tree, superpod"),
    "points": (edited(LINEAR, PIECES % ("1, 2", "1 s")), "timing.default.prefill", "2 token counts but 1 times"),
    "descending": (edited(LINEAR, PIECES % ("2, 1", "1 s, 2 s")), "timing.default.prefill.tokens", "do not ascend"),
    "endpoint with a path": (reached("url: 'http://a:1/v1'"), f"{ENDPOINT}.url", "text such as 'http://10.0.0.1:8000'"),
    "endpoint's port": (reached("url: 'http://a:99999'"), f"{ENDPOINT}.url", "port 99999 is not between 1 and 65535"),
    "no number as port": (reached("url: 'http://[::1]:x'"), f"{ENDPOINT}.url", "port x is not between 1 and 65535"),
    "endpoint of no host": (reached("url: 'a:1'"), f"{ENDPOINT}.url", "text such as 'http://10.0.0.1:8000'"),
    "endpoint key": (reached("uri: 'http://a:1'"), f"{ENDPOINT}.uri", "did you mean 'url'"),
    "no url": (reached("protocol: vllm"), ENDPOINT, "`url` is missing"),
    "protocol": (reached("protocol: nixl"), f"{ENDPOINT}.protocol", "one of vllm, mooncake, sglang"),
    "bootstrap": (reached("bootstrap: a"), f"{ENDPOINT}.bootstrap", "text such as '10.0.0.1:8998'"),
    "KV events": (reached("kv_events: 'tcp://*:5557'"), f"{ENDPOINT}.kv_events", "text such as 'tcp://10.0.0.1:5557'"),
    "KV replay": (reached("kv_replay: 5558"), f"{ENDPOINT}.kv_replay", "text such as 'tcp://10.0.0.1:5557'"),
    "buffer server": (reached("url: 'http://a:1', buffer: b"), f"{ENDPOINT}.buffer", "such as 'http://10.0.0.1:7200'"),
    "no storage NIC": (edited("name: small", "name: small\nstorage: {}"), "storage", "no node has a storage NIC; add"),
    "negative buffer": (edited("name: small", "name: small\nstorage: {buffer: -1 GB}"), "storage.buffer", "-1 GB"),
    "read path": (edited("name: small", "name: small\nstorage: {reads: both}"), "storage.reads", "one of prefill"),
    "gateway": (edited("name: small", "name: small\ngateway: [1]"), "gateway", "[1] is not a mapping"),
    "no value": (edited("nvlink: 450 GB/s", "nvlink: null"), "nodes[0].nvlink", "has no value"),
    "alias": (edited("name: small", "name: &a small\nfabric: *a"), "fabric", "alias"),
    "tag": (edited("name: small", "name: !!python/name:os.system x"), "name", "the tag"),
    "two documents": (TEXTS["small.yaml"] + "---\nname: b\n", "", "second document"),
    "bad YAML": (edited("racks:", "racks: ]"), "", "not YAML"),
    "empty": ("# nothing\n", "", "the file is empty"),
    "list": ("- a\n", "", "not a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_error_names_its_place_and_a_fix(fault: str) -> None:
    text, field, sentence = FAULTS[fault]
    reported = {(problem.field, str(problem)) for problem in problems_of(text)}
    assert any(place == field and sentence in message for place, message in reported), reported


def test_all_errors_are_reported_at_once() -> None:
    text = edited("100 Gbps", "1").replace("role: decode", "role: decoder").replace("nvlink", "nvl")
    assert len(problems_of(text)) == 5


@given(st.text(min_size=1, max_size=100))
def test_an_error_is_one_line_for_any_key(name: str) -> None:
    """A key with a line end or a terminal escape could forge lines of the error."""
    problem = FileError("it is wrong", source="f", line=1, field=field_text(("nodes", 3, name)))
    assert str(problem).isprintable()
    assert len(str(problem)) < 800
    if name.isprintable() and len(name) <= 60:
        assert problem.field == f"nodes[3].{name}"


def test_an_error_that_lists_names_is_one_line() -> None:
    text = TEXTS["small.yaml"].replace("\n  default:\n", '\n  "a\\nb":\n')
    (problem,) = problems_of(text)
    assert str(problem).endswith(r"there is no timing 'default'; known: a\nb")


def test_an_unreachable_pair_without_kv_transfers_is_no_error() -> None:
    """Prefill and decode share a rack; the other rack has no uplinks, is not connected and contains neither."""
    local = re.sub(r"  - \{name: (prefill1|decode[01]).*\n", "", TWO_RACKS)
    local += '  - {name: near, role: decode, gpus: "node0:4-7"}\n'
    assert [instance.name for instance in parse(local).instances] == ["near", "prefill0"]


def test_a_missing_file_gives_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")
