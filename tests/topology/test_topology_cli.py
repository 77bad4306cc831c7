"""`kvroute topology` and its drawing: stdout, stderr, and the content of tree and drawing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tests.examples import CLUSTERS, EXAMPLES
from typer.testing import CliRunner

from kvroute.cli.output import own_command
from kvroute.cli.topology.command import app
from kvroute.report.topology_figure import draw_topology, topology_figure
from kvroute.serve.config.preflight import deployment_of
from kvroute.topology import InstanceCounts, build, fat_tree, load, parse
from kvroute.topology.drafts.draft import draft
from kvroute.topology.tree import Domain, domain_tree, pair_counts
from kvroute.types import InputError, LinearPrefill

NAMES = [path.stem for path in CLUSTERS]
NETKV = str(EXAMPLES / "fat-tree-64gpu.yaml")
SIMULATED = str(EXAMPLES / "small.yaml")
SMALL = (EXAMPLES / "small.yaml").read_text(encoding="utf-8").rstrip("\n")
END = SMALL.count("\n") + 1
MISSING_FILES = """\
  upstream_key_env: NO_SUCH_VARIABLE
  prompt: {tokenizer: nowhere}
  listen: {tls: {certificate: a, key: b}}
"""
GATEWAY_FAULTS = [
    (
        SMALL + "\ngateway: {polcy: netkv}\n",
        [f"{END + 1}: gateway.polcy: the key 'polcy' is unknown; did you mean 'policy'?"],
    ),
    (
        "nam: x\nname: y\nnodes: 3\ninstances: []\ngateway: {models: {a: b}, keys: {concurrency: {bob: 1}}}\n",
        [
            "1: nam: the key 'nam' is unknown; did you mean 'name'?",
            "3: nodes: 3 is not a list of entries; write a list of entries here",
            "4: instances: there is no prefill instance; add one with `role: prefill`",
            "4: instances: there is no decode instance; add one with `role: decode`",
            "5: gateway.keys.concurrency.bob: there is no key 'bob'; there are no keys: add `file` or `known`",
        ],
    ),
    (
        SMALL + "\ngateway: {models: {a: llama}}\n",
        [f"{END + 1}: gateway.models.a: no instance serves 'llama'; did you mean 'llama-3-70b'?"],
    ),
]
runner = CliRunner()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file with two errors, on lines 1 and 3."""
    path = tmp_path / "broken.yaml"
    path.write_text("nam: x\nname: y\nnodes: 3\ninstances: {prefill: 1, decode: 1}\n", encoding="utf-8")
    return path


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.axes[0].texts}


def domains(tree: Domain) -> Iterator[Domain]:
    yield tree
    for child in tree.children:
        yield from domains(child)


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_every_example(name: str) -> None:
    result = runner.invoke(app, ["check", str(EXAMPLES / f"{name}.yaml")])
    assert result.exit_code == 0
    assert all("gateway.keys: the file cannot be read" in line for line in result.stderr.splitlines())
    assert result.stdout.startswith(f"OK: {name}: ")


def test_check_names_every_error_and_exits_with_2(broken: Path) -> None:
    result = runner.invoke(app, ["check", str(broken)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{broken}:1: nam: the key 'nam' is unknown; did you mean 'name'?" in result.stderr
    assert f"{broken}:3: nodes: 3 is not a list" in result.stderr
    assert "2 errors" in result.stderr


def test_check_as_json_is_one_document_either_way(broken: Path) -> None:
    bad = runner.invoke(app, ["check", str(broken), "--json"])
    assert bad.exit_code == 2
    assert [(fault["line"], fault["field"]) for fault in json.loads(bad.stdout)["faults"]] == [(1, "nam"), (3, "nodes")]
    good = json.loads(runner.invoke(app, ["check", NETKV, "--json"]).stdout)
    assert good["ok"] is True
    assert good["counts"] | {"instances": 16, "GPUs": 64, "prefill": 4, "decode": 12} == good["counts"]


def test_check_includes_the_gateway_section(tmp_path: Path) -> None:
    """The check reports errors of the gateway section with the others. What this machine lacks is printed and is no
    error, because another machine may serve the file."""
    path = tmp_path / "gateway.yaml"
    files = ["there is no tokenizer at", "there is no file", "there is no file"]
    for keys, lacking in (
        ("file: keys.yaml", ["keys.yaml: the file cannot be read"]),
        (f'known: {{bob: "sha256:{64 * "0"}"}}', ["the environment variable NO_SUCH_VARIABLE is not set"]),
    ):
        path.write_text(f"{SMALL}\ngateway:\n  keys: {{{keys}}}\n{MISSING_FILES}", encoding="utf-8")
        result = runner.invoke(app, ["check", str(path)])
        assert result.exit_code == 0
        lines = result.stderr.splitlines()
        assert all(line.startswith("on this machine `kvroute serve` would refuse the file: ") for line in lines)
        for sentence in (*files, *lacking):
            assert sentence in result.stderr
        refused = json.loads(runner.invoke(app, ["check", str(path), "--json"]).stdout)["refused_here"]
        assert len(refused) == len(lines)
    for text, faults in GATEWAY_FAULTS:
        path.write_text(text, encoding="utf-8")
        result = runner.invoke(app, ["check", str(path)])
        assert result.exit_code == 2
        assert result.stderr.splitlines()[:-1] == [f"{path}:{fault}" for fault in faults]


def test_check_of_a_missing_file_exits_with_2(tmp_path: Path) -> None:
    result = runner.invoke(app, ["check", str(tmp_path / "no.yaml"), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["ok"] is False
    assert "cannot be read" in result.stderr


def test_show_prints_tree_tiers_and_matrix() -> None:
    out = runner.invoke(app, ["show", NETKV]).stdout
    assert "pod1  up 64 × 25 Gbps" in out
    assert re.search(r"node3 +decode02 \[0-3\] 180 GB +decode03 \[4-7\]", out)
    assert re.search(r"^prefill3 +2 2 2 2 3 3 3 3 3 3 3 3$", out, re.M)
    assert re.search(r"2 +same pod +50 Gbps +6\.25 GB/s +8 us +16", out)


def test_a_matrix_wider_than_the_terminal_is_only_in_json(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text((EXAMPLES / "fat-tree-64gpu.yaml").read_text().replace("name: fat-tree-64gpu", "name: wide"))
    narrow, wide = (runner.invoke(app, ["show", str(path)], env={"COLUMNS": str(width)}).stdout for width in (30, 80))
    assert "is in --json" in " ".join(narrow.split())
    assert "is in --json" not in wide


def test_show_as_json_agrees_with_the_cluster() -> None:
    cluster = load(NETKV)
    document = json.loads(runner.invoke(app, ["show", NETKV, "--json"]).stdout)
    assert [tier["pairs"] for tier in document["tiers"]] == [0, 0, 16, 32, 0]
    matrix = document["tier_matrix"]
    for name, row in zip(matrix["prefill"], matrix["tier"], strict=True):
        assert row == [cluster.tier[cluster.index(name), cluster.index(other)] for other in matrix["decode"]]
    assert len(document["links"]) == len(cluster.links)


def test_show_summarises_large_clusters(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    counts = InstanceCounts(prefill=100, decode=300)
    large = fat_tree(pods=2, racks_per_pod=10, nodes_per_rack=10, instances=counts)
    path.write_text(large.to_yaml(), encoding="utf-8")
    out = runner.invoke(app, ["show", str(path)]).stdout
    assert "... and 2 more racks with 40 instances" in out
    assert "... and 2 more nodes with 4 instances" in out
    assert "(100 x 300) is in --json" in out
    assert len(out.splitlines()) < 250


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_show_draws_a_picture(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"cluster.{ending}"
    result = runner.invoke(app, ["show", NETKV, f"--{ending}", str(path), "--json"])
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert path.read_bytes().startswith(magic)


def test_show_rejects_an_unknown_file_type_and_an_unwritable_path(tmp_path: Path) -> None:
    assert isinstance(runner.invoke(app, ["show", NETKV, "--png", str(tmp_path / "a.jpg")]).exception, InputError)
    for wrong, message in (("a.jpg", "does not end in .png"), ("none/a.png", "--png: ")):
        both = runner.invoke(app, ["show", NETKV, "--svg", str(tmp_path / "a.svg"), "--png", str(tmp_path / wrong)])
        assert message in str(both.exception)
        assert (both.stderr, list(tmp_path.iterdir())) == ("", []), "nothing is drawn if not all can be"
    with pytest.raises(InputError, match="not a picture format"):
        draw_topology(load(NETKV), tmp_path / "a.gif")
    with pytest.raises(InputError, match="cannot be written"):
        draw_topology(load(NETKV), tmp_path / "none" / "a.png")


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_names_every_domain_and_instance(name: str) -> None:
    cluster = load(EXAMPLES / f"{name}.yaml")
    seen = texts(topology_figure(cluster))
    assert {domain.name for domain in domains(domain_tree(cluster)) if domain.name} <= seen
    assert {instance.name for instance in cluster.instances} <= seen
    for role in ("prefill", "decode"):
        assert f"{sum(x.role == role for x in cluster.instances)} {role}" in seen


def test_the_picture_shows_uplinks() -> None:
    seen = texts(topology_figure(load(NETKV)))
    assert {"32 × 50 Gbps", "64 × 25 Gbps"} <= seen
    assert "100 Gbps\n5 ms" in texts(topology_figure(load(EXAMPLES / "two-datacenters.yaml")))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_the_tree_contains_every_node_and_instance_once(pods: int, racks: int, nodes: int) -> None:
    file = fat_tree(pods=pods, racks_per_pod=racks, nodes_per_rack=nodes, instances=InstanceCounts(prefill=1, decode=1))
    cluster = build(file)
    tree = domain_tree(cluster)
    assert [node.name for node in tree.nodes()] == [node.name for node in cluster.places.nodes]
    assert sorted(tree.all_instances(), key=lambda instance: instance.name) == list(cluster.instances)
    assert sum(pair_counts(cluster)) == 1


HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(HOSTS, HOSTS, st.integers(1, 2))
def test_a_draft_contains_every_address_once(prefill: list[int], decode: list[int], tp: int) -> None:
    """Engines of one host share its node, and no GPU is used twice (`topology check` on the file confirms this)."""
    ports = iter(range(8000, 9000))
    urls = {
        role: [f"http://10.0.0.{host}:{next(ports)}" for host in hosts]
        for role, hosts in (("prefill", prefill), ("decode", decode))
    }
    text = draft("drafted", urls["prefill"], urls["decode"], model="llama-3-8b", tp=tp, gpus_per_node=32)
    cluster = parse(text, where="draft")
    named = {(i.role, i.endpoint.url if i.endpoint else "") for i in cluster.instances}
    assert named == {(role, url) for role, urls_of_role in urls.items() for url in urls_of_role}
    host_of: dict[str, set[str]] = {i.node: set() for i in cluster.instances}
    for instance in cluster.instances:
        assert instance.endpoint is not None
        host_of[instance.node].add(instance.endpoint.url.split(":")[1])
    assert all(len(hosts) == 1 for hosts in host_of.values())
    assert len(host_of) == len(set(prefill) | set(decode))


def test_new_writes_a_valid_file_and_overwrites_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    arguments = ["new", "--prefill", "http://10.0.0.1:8000", "--decode", "http://10.0.0.2:8000", "--out", str(path)]
    assert runner.invoke(app, arguments).exit_code == 0
    assert runner.invoke(app, ["check", str(path)]).exit_code == 0
    before = path.read_bytes()
    again = runner.invoke(app, arguments)
    assert (str(again.exception), path.read_bytes()) == (
        f"{path}: the file already exists; give another file to --out",
        before,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no engine is given"),
        (["--prefill", "10.0.0.1:8000"], "'10.0.0.1:8000' is not an engine address; write http://host:port"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "an address is given twice"),
        (
            ["--prefill", "http://a:1", "--decode", "http://b:1", "--tp", "9"],
            "1 engine of 9 GPUs on host 'a' needs more than its 8 GPUs",
        ),
        (
            ["--both", "http://a:1", "--both", "http://a:2", "--gpus", "1"],
            "2 engines of 1 GPU on host 'a' need more than its 1 GPU;",
        ),
        (["--both", "http://a:1", "--nic", "0"], "--nic: '0' is not a bandwidth"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--protocol", "smoke"], "there is no protocol 'smoke'"),
        (["--prefill", "http://a:1"], "no decode engine is given; give --decode URL or --both URL"),
        (["--decode", "http://a:1"], "no prefill engine is given; give --prefill URL or --both URL"),
        (["--both", "http://a:99999"], "http://a:99999: port 99999 is not between 1 and 65535"),
        (["--both", "http://a:1", "--model", "gpt-9"], "--model: there is no model 'gpt-9'"),
        (["--both", "http://a:1", "--name", "no name"], "--name: 'no name' does not fit"),
        (
            ["--both", "http://a:1", "--out", "/proc/foo"],
            "/proc/foo: cannot be written (No such file or directory); give",
        ),
    ],
)
def test_new_reports_errors(arguments: list[str], sentence: str) -> None:
    result = runner.invoke(app, ["new", *arguments])
    assert isinstance(result.exception, InputError)
    assert sentence in str(result.exception)
    assert "my-cluster:" not in str(result.exception), "a line of a file that is not there"


ADDRESSES = [f"http://10.0.0.{number}:8000" for number in range(1, 5)]


@pytest.mark.parametrize("how", ["commas", "repeated", "by name", "file"])
def test_expand_turns_a_simulated_cluster_into_one_that_can_be_served(how: str, tmp_path: Path) -> None:
    """The addresses may be given in any form; otherwise the cluster is unchanged, and the gateway accepts it."""
    names = [instance.name for instance in load(SIMULATED).instances]
    order = ["prefill0", "prefill1", "decode0", "decode1"]
    assert sorted(names) == sorted(order)
    listed = tmp_path / "engines.txt"
    listed.write_text("\n".join(["# the engines", *ADDRESSES]) + "\n")
    options = {
        "commas": ["--endpoints", ",".join(ADDRESSES)],
        "repeated": [part for url in ADDRESSES for part in ("--endpoints", url)],
        "by name": ["--endpoints", ",".join(f"{n}={u}" for n, u in reversed(list(zip(order, ADDRESSES, strict=True))))],
        "file": ["--endpoints", str(listed)],
    }[how]
    out = tmp_path / "served.yaml"
    ended = runner.invoke(app, ["expand", SIMULATED, *options, "--out", str(out)])
    assert (ended.exit_code, ended.stdout) == (0, f"wrote {out}; next: {own_command()} serve {out}\n")
    made = load(out)
    urls = {instance.name: instance.endpoint.url for instance in made.instances if instance.endpoint}
    assert urls == dict(zip(order, ADDRESSES, strict=True))
    assert made.links == load(SIMULATED).links
    assert runner.invoke(app, ["check", str(out)]).exit_code == 0
    deployment_of(out.read_text(), str(out), embedded=False, environ={})


@pytest.mark.parametrize("path", CLUSTERS, ids=NAMES)
def test_expand_lists_all_instances_and_changes_nothing_else(path: Path) -> None:
    """Instances, links and tiers are equal when read from the file that lists every node and instance."""
    text = runner.invoke(app, ["expand", str(path)]).stdout
    before, after = load(path), parse(text)
    assert (before.instances, before.links) == (after.instances, after.links)
    assert (before.tier == after.tier).all()
    assert "fabric:" not in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["http://a:1"], "4 instances but 1 address; give one for each, in this order: prefill0, prefill1, decode0,"),
        (
            ["prefill9=http://a:1"],
            "there is no instance 'prefill9'; its instances are prefill0, prefill1, decode0, decode1",
        ),
        (["prefill0=http://a:1,decode0=http://a:1"], "an instance or an address is given twice"),
        (["prefill0=http://a:1,http://b:1"], "some addresses have a name and others do not"),
        (["prefill0=a:1"], "'a:1' does not fit"),
        (["prefill0=http://a:99999"], "port 99999 is not between 1 and 65535"),
    ],
)
def test_expand_reports_invalid_addresses(options: list[str], sentence: str) -> None:
    ended = runner.invoke(app, ["expand", SIMULATED, "--endpoints", *options])
    assert isinstance(ended.exception, InputError)
    assert sentence in str(ended.exception)
    assert str(ended.exception).startswith("--endpoints: ")


def test_guesses_of_a_draft_scale_with_the_gpus_of_an_engine() -> None:
    """Twice the GPUs have twice the KV memory and half the time per prompt token and for the weights of a decode
    step."""
    made = {}
    for tp in (4, 8):
        made[tp] = parse(runner.invoke(app, ["new", "--both", "http://a:1", "--tp", str(tp)]).stdout)
    small, large = (made[tp].instances[0] for tp in (4, 8))
    assert large.kv_capacity_bytes == 2 * small.kv_capacity_bytes
    prefill, decode = (made[tp].file.timing["default"].spec() for tp in (4, 8))
    assert isinstance(prefill.prefill, LinearPrefill)
    assert isinstance(decode.prefill, LinearPrefill)
    assert decode.prefill.per_token_s == pytest.approx(prefill.prefill.per_token_s / 2)
    assert decode.decode.base_s == pytest.approx(prefill.decode.base_s / 2)
