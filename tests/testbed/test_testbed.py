"""Laws of a testbed's plan: packets take the cluster's paths, connections have separate queues, processes have a
mark."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.examples import EXAMPLES
from typer.testing import CliRunner

from kvroute.cli.trial.testbed import app
from kvroute.flows import slow_start_s
from kvroute.testbed import Build, NamedTestbed, processes
from kvroute.testbed.engines import UNBOUND, served, unpaced
from kvroute.testbed.queues import LEAVES_MAX, LEAVES_MIN, Limit, classifier, leaf_of, leaves_of, lines
from kvroute.testbed.wiring import Wiring, background_ends, wire
from kvroute.topology import LLAMA_70B_TP4, Cluster, InstanceCounts, build, fat_tree, load, parse
from kvroute.topology.schema import Network
from kvroute.types import SAME_NODE, TIER_COUNT, Endpoint, InputError

NETWORK = IPv4Network("198.18.7.0/24")
SMALL = str(EXAMPLES / "testbed-small.yaml")
GBPS = 1e9 / 8
TIMED = """\
timing: {default: {prefill: {kind: linear, per_token: 90 us}, decode: {base: 10 ms}}}
defaults: {model: llama-3-70b, kv_capacity: 80 GB}
"""


@st.composite
def trees(draw: st.DrawFn) -> Cluster:
    """Draw fat trees of up to eight nodes whose transfers are single flows."""
    pods, racks, nodes = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    instances = 2 * pods * racks * nodes
    assume(instances > 2)
    file = fat_tree(
        "tree",
        pods=pods,
        racks_per_pod=racks,
        nodes_per_rack=nodes,
        nic_bytes_per_s=100 * GBPS,
        nics_per_node=draw(st.sampled_from([1, 2, 8])),
        nic_scope=draw(st.sampled_from(["gpu", "instance", "server"])),
        rack_uplinks=(draw(st.integers(1, 3)), 50 * GBPS),
        pod_uplinks=(draw(st.integers(1, 3)), 25 * GBPS),
        instances=InstanceCounts(prefill=2, decode=instances - 2, placement="packed"),
        network=Network(flows_per_transfer=1),
        defaults=LLAMA_70B_TP4,
    )
    return build(file)


def routes(wiring: Wiring, source: str, target: str) -> Iterator[tuple[int, ...]]:
    """Yield the groups of equal links that packets to `target` use, hop by hop, following the last link of each
    group."""
    beyond = {cable.up.link: cable.down.place for cable in wiring.cables}
    beyond |= {cable.down.link: cable.up.place for cable in wiring.cables}
    place = source
    while place != target:
        links = wiring.routes[place, target]
        yield links
        assert {beyond[link] for link in links} == {beyond[links[-1]]}
        place = beyond[links[-1]]


def test_a_node_may_have_the_name_of_a_testbed_program() -> None:
    """Each program has its own log and ready file in one folder."""
    own = ["gateway", "delay", "others", "engines", "state", "cluster", "lines"]
    nodes = "".join(f"  - {{name: {name}, nics: {{compute: {{capacity: 100 Gbps, scope: server}}}}}}\n" for name in own)
    roles = ["prefill", *["decode"] * (len(own) - 1)]
    instances = "".join(
        f"  - {{name: i{number}, role: {role}, gpus: '{name}:0'}}\n"
        for number, (role, name) in enumerate(zip(roles, own, strict=True))
    )
    cluster = parse(
        f"name: clash\nnetwork: {{flows_per_transfer: 1}}\nnodes:\n{nodes}{TIMED}instances:\n{instances}", "clash.yaml"
    )
    programs = [host.program for host in wire(cluster, NETWORK).hosts]
    assert len(set(programs) | set(own)) == 2 * len(own)


@settings(max_examples=40, deadline=None)
@given(trees())
def test_packets_use_the_links_of_the_cluster(cluster: Cluster) -> None:
    """From every instance to every other one, the groups of equal links are exactly those of the cluster."""
    wiring = wire(cluster, NETWORK)
    for source, target in permutations(range(len(cluster.instances)), 2):
        near, far = (wiring.host_of(cluster.instances[index].name) for index in (source, target))
        if near.name == far.name:
            continue
        assert wiring.latency_s[near.name, far.name] == cluster.latency_s(source, target)
        if cluster.tier[source, target] == SAME_NODE:
            assert (near.name, far.name) in wiring.neighbours
            continue
        assert tuple(routes(wiring, near.name, far.name)) == cluster.hops(source, target, 0)


@settings(max_examples=40, deadline=None)
@given(trees())
def test_names_addresses_and_devices_are_unique(cluster: Cluster) -> None:
    """Names, addresses and devices are unique; every instance has one host, and a link's device is at the link's
    source."""
    wiring = wire(cluster, NETWORK)
    assert len(set(wiring.places)) == len(wiring.places)
    placed = [name for host in wiring.hosts for name in host.instances]
    assert sorted(placed) == [instance.name for instance in cluster.instances]
    addresses = [host.address for host in wiring.hosts] + [end.address for end in wiring.ends]
    assert len(set(addresses)) == len(addresses)
    assert all(host.address in NETWORK for host in wiring.hosts)
    assert len({(end.place, end.device) for end in wiring.ends}) == len(list(wiring.ends))
    for end in wiring.ends:
        link = cluster.links[end.link]
        assert end.bytes_per_s == link.bytes_per_s
        assert link.source in (end.place, end.place.partition(".")[0])
        assert len(end.device) <= 15


def test_two_sites_are_connected_by_the_wan_link() -> None:
    """The WAN link is a cable like any other, and its latency is that of every path over it."""
    cluster = load(EXAMPLES / "testbed-wan.yaml")
    wiring = wire(cluster, NETWORK)
    far = [
        (wiring.host_of(a.name).name, wiring.host_of(b.name).name)
        for a, b in permutations(cluster.instances, 2)
        if a.datacenter != b.datacenter
    ]
    wide = {link for links, backs in cluster.cables.wan for link in (*links, *backs)}
    assert far
    for source, target in far:
        assert sum(not wide.isdisjoint(links) for links in routes(wiring, source, target)) == 1
        assert wiring.latency_s[source, target] >= float(cluster.file.wan[0].latency_s)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flows_per_transfer: 1", "flows_per_transfer: tp", "one connection"),
        ("name: testbed-small", "name: testbed-small\n\ndatacenters: [{name: rack0}]", "the same name as a rack"),
    ],
    ids=["several-flows", "one-name-twice"],
)
def test_unsupported_topologies_are_rejected_with_a_hint(old: str, new: str, message: str) -> None:
    """The error says how to fix it."""
    text = (EXAMPLES / "testbed-small.yaml").read_text()
    assert old in text
    with pytest.raises(InputError, match=message) as caught:
        wire(parse(text.replace(old, new, 1), "test.yaml"), NETWORK)
    assert "; " in str(caught.value)


def test_too_many_hosts_are_rejected() -> None:
    """There are more hosts than addresses of one testbed."""
    cluster = build(
        fat_tree(
            "large",
            pods=1,
            racks_per_pod=2,
            nodes_per_rack=125,
            nic_bytes_per_s=100 * GBPS,
            nics_per_node=1,
            nic_scope="server",
            rack_uplinks=(1, 50 * GBPS),
            pod_uplinks=(1, 50 * GBPS),
            instances=InstanceCounts(prefill=2, decode=248, placement="spread", tp=8),
            network=Network(flows_per_transfer=1),
            defaults=LLAMA_70B_TP4,
        )
    )
    with pytest.raises(InputError, match="the testbed needs 250 hosts"):
        wire(cluster, NETWORK)


def test_background_traffic_loads_the_links_of_its_tiers() -> None:
    """Both directions of every cable of a tier with a share are loaded, and no others."""
    cluster = load(EXAMPLES / "testbed-literal.yaml")
    loaded = background_ends(wire(cluster, NETWORK), (0.0, 0.0, 0.2, 0.3, 0.0))
    assert {end.link: share for end, share in loaded} == {
        **dict.fromkeys(cluster.links_of_tier(2), 0.2),
        **dict.fromkeys(cluster.links_of_tier(3), 0.3),
    }


@given(st.floats(0.02e12, 0.1e12), st.floats(0.0, 0.9), st.sampled_from(["fair", "fifo"]), st.integers(1, 64))
def test_guaranteed_queue_rates_do_not_exceed_the_link(
    bits_per_s: float, others: float, discipline: str, equal: int
) -> None:
    """The guaranteed rates of all leaves are at most the link's rate; every leaf may use what others leave."""
    limit = Limit.of(bits_per_s / 8, 1e-3, others)
    commands = list(lines("l1", limit, "fair" if discipline == "fair" else "fifo", leaves=leaves_of(equal)))
    assert LEAVES_MIN <= leaves_of(equal) <= LEAVES_MAX
    (whole,) = [number(line, "rate") for line in commands if " classid 1:1 " in line]
    leaves = [line for line in commands if line.startswith("class") and " parent 1:1 " in line]
    assert sum(number(line, "rate") for line in leaves) <= whole * 1.001
    queues = [line for line in commands if line.startswith("qdisc") and "bfifo" in line]
    assert (len(leaves), len(queues)) == ((1, 1) if discipline == "fifo" else (leaves_of(equal) + 2, 1))
    lent = [line for line in leaves if " 1:2 " not in line.partition("classid")[2]]
    assert all(number(line, "ceil") == whole for line in lent)


def number(line: str, key: str) -> float:
    """Return the number after a key, in bits."""
    fields = line.split()
    return float(fields[fields.index(key) + 1].removesuffix("bit"))


def test_a_link_carries_the_modelled_payload() -> None:
    """100 Gbps at 1/1000 is 12.5 MB/s of payload in segments of 1,448 bytes, each of 1,514 bytes on the wire."""
    limit = Limit.of(100 * GBPS, 1e-3)
    assert limit.bits_per_s / 8 / 1514 * 1448 == pytest.approx(12.5e6)
    for scale in (1e-6, 1.0):
        with pytest.raises(InputError, match="1 to 1000 Mbit/s"):
            Limit.of(100 * GBPS, scale)


def executed(frame: bytes, leaves: int) -> int:
    """Return the result of the classic BPF program for a frame, by the definition of its instructions (Linux'
    filter.rst)."""
    count, *steps = classifier(leaves).split(",")
    program = [tuple(map(int, step.split())) for step in steps]
    assert len(program) == int(count)
    a = x = at = 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        match code:
            case 0x30:
                a = frame[k]
            case 0x20:
                a = int.from_bytes(frame[k : k + 4], "big")
            case 0x07:
                x = a
            case 0xAC:
                a ^= x
            case 0x24:
                a = a * k & 0xFFFF_FFFF
            case 0x74:
                a >>= k
            case 0x04:
                a = a + k & 0xFFFF_FFFF
            case 0x15:
                at += if_true if a == k else if_false
            case 0x06:
                return k
            case 0x16:
                return a
            case _:
                raise AssertionError(f"an instruction {code:#x} that this test does not know")


def frame_of(protocol: int, source: int, target: int, ports: int) -> bytes:
    """Return an Ethernet frame with IPv4 without options and ports."""
    ip = bytes([0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0]) + source.to_bytes(4, "big") + target.to_bytes(4, "big")
    return bytes(12) + b"\x08\x00" + ip + ports.to_bytes(4, "big")


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128, 256])
)
def test_the_bpf_program_classifies_packets(source: int, target: int, ports: int, leaves: int) -> None:
    """A TCP segment goes to its connection's leaf, class 1:10 and up; a datagram goes to the class of other traffic,
    1:2."""
    leaf = leaf_of(source, target, ports, leaves)
    assert 0 <= leaf < leaves
    assert executed(frame_of(6, source, target, ports), leaves) == 0x1_0010 + leaf
    assert executed(frame_of(17, source, target, ports), leaves) == 0x1_0002


def test_connections_are_spread_over_leaves() -> None:
    """Of 32 connections of two hosts with ports as chosen by the kernel, no more share a leaf than by chance."""
    near, far, draw = int(IPv4Address("198.18.0.3")), int(IPv4Address("198.18.0.4")), random.Random(1)
    alone = 0
    for _ in range(100):
        ports = draw.sample(range(32768, 61000, 2), 32)
        taken = Counter(leaf_of(near, far, 20_000 << 16 | port) for port in ports)
        alone += sum(count == 1 for count in taken.values())
    assert alone / 3200 > (1 - 1 / LEAVES_MAX) ** 31 - 0.05


@given(st.floats(1e3, 1e9), st.floats(1e-6, 0.5), st.floats(1e4, 1e9))
def test_slow_start_waits_less_than_one_round_trip_per_round(nbytes: float, rtt_s: float, bytes_per_s: float) -> None:
    """The wait is between zero and one round trip for every window sent, and longer on a longer path."""
    waits_s, first = slow_start_s(nbytes, rtt_s, bytes_per_s), 10 * 1448
    rounds, sent, window = 0, 0.0, float(first)
    while sent + window < nbytes and window < bytes_per_s * rtt_s:
        rounds, sent, window = rounds + 1, sent + window, 2 * window
    assert 0 <= waits_s <= rounds * rtt_s
    if nbytes <= first or bytes_per_s * rtt_s <= first:
        assert waits_s == 0
    assert slow_start_s(nbytes, rtt_s * 1.5, bytes_per_s) >= waits_s * (1 - 1e-12)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.floats(1e-4, 0.1), st.floats(1e5, 1e8))
def test_slow_start_equals_a_simulation_by_segment(count: int, rtt_s: float, bytes_per_s: float) -> None:
    """Simulated per segment: each acknowledgement releases two more. The results are equal within a segment's time per
    round."""
    each_s = 1448 / bytes_per_s
    acknowledged: list[float] = []
    free_s, allowed = 0.0, 10
    for segment in range(count):
        leaves_s = free_s
        if segment >= allowed:
            leaves_s = max(free_s, acknowledged[(segment - 10) // 2])
        free_s = leaves_s + each_s
        acknowledged.append(free_s + rtt_s)
    waited_s = free_s - count * each_s
    model_s = slow_start_s(count * 1448, rtt_s, bytes_per_s)
    assert model_s == pytest.approx(waited_s, abs=12 * 2 * each_s + 1e-9, rel=1e-6)


def test_only_the_kernel_limits_the_engines_rate() -> None:
    """The instances are the same, and nothing else limits the bytes; the served file has the true links and the
    addresses."""
    cluster = load(EXAMPLES / "testbed-paper.yaml")
    free = parse(unpaced(cluster).to_yaml(), "engines.yaml")
    assert [i.name for i in free.instances] == [i.name for i in cluster.instances]
    assert free.timing == cluster.timing
    for source, target in permutations(range(len(free.instances)), 2):
        assert free.latency_s(source, target) == 0
        (path,) = [free.hops(source, target, 0)] * free.flows_per_transfer(source, target)
        assert all(free.links[link].bytes_per_s == UNBOUND for group in path for link in group)
    endpoints = {
        i.name: Endpoint(url=f"http://198.18.0.{3 + n}:80", bootstrap=f"198.18.0.{3 + n}:81")
        for n, i in enumerate(cluster.instances)
    }
    back = parse(served(cluster, endpoints).to_yaml(), "cluster.yaml")
    assert {i.name: i.endpoint for i in back.instances} == endpoints
    assert back.links == cluster.links
    assert back.file.gateway["measure"] == "engine"


@pytest.mark.parametrize("name", ["", "with-dash", "Large", "ninechars", "../etc"])
def test_an_invalid_testbed_name_is_rejected(name: str) -> None:
    """The name must fit into a device name."""
    with pytest.raises(InputError, match="not a valid testbed name"):
        NamedTestbed(name)


@given(st.text(min_size=1, max_size=50))
def test_every_cluster_has_a_valid_default_testbed_name(cluster: str) -> None:
    """The name is always the same and fits into a device name."""
    run = NamedTestbed.of(cluster)
    assert run == NamedTestbed.of(cluster)
    assert len(run.device) <= 15
    assert run.namespace("x").startswith(f"{run.device}-")


@pytest.mark.parametrize(
    "build", [{"scale": 0}, {"scale": 2}, {"background": (0.0, 1.0, 0, 0, 0)}, {"background": (0,)}]
)
def test_settings_out_of_range_are_rejected(build: dict[str, object]) -> None:
    """The build is rejected before anything is created."""
    assert Build().background == (0.0,) * TIER_COUNT
    with pytest.raises(InputError):
        Build(**build)  # type: ignore[arg-type]


STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('up', flush=True)\n"
    "time.sleep(600)\n"
)


def test_marked_processes_are_found_and_ended(tmp_path: Path) -> None:
    """A process ignores SIGTERM and has a child in another session; a process with another mark is not ended."""
    log, mark, other = tmp_path / "log", f"t{random.randrange(10**6)}", f"u{random.randrange(10**6)}"
    stubborn = processes.begin([sys.executable, "-c", STUBBORN], mark, log)
    bystander = processes.begin([sys.executable, "-c", "import time; time.sleep(600)"], other, tmp_path / "other")
    try:
        while log.read_bytes() != b"up\n":
            assert stubborn.poll() is None
        pids = processes.marked(mark)
        assert stubborn.pid in pids
        assert len(pids) == 2
        assert processes.cpu_s(mark) >= 0
        assert processes.end(mark, patience_s=0.2) == 2
        assert stubborn.wait(timeout=30) == -9
        assert processes.marked(mark) == []
        assert bystander.poll() is None
        assert processes.marked(other) == [bystander.pid]
    finally:
        for process in (stubborn, bystander):
            process.kill()
            process.wait()
        processes.end(mark, patience_s=0.2)


def kvroute(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the command and capture its output."""
    command = [sys.executable, "-m", "kvroute.cli.app", "testbed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **more)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "arguments",
    [["up", SMALL], ["run", SMALL], ["down", "--all"]],
    ids=["up", "run", "down"],
)
def test_missing_tools_and_rights_are_reported(arguments: list[str]) -> None:
    """Without iproute2 or without root there is one sentence and exit code 2."""
    done = kvroute(*arguments, env={"PATH": "/nowhere"})
    assert done.returncode == 2, done.stderr
    assert "iproute2" in done.stderr or "need root" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", SMALL, "--policy", "netkw"], "unknown decode policy 'netkw'; did you mean 'netkv'?"),
        (["up", SMALL, "--prefill", "nope"], "unknown prefill policy 'nope'"),
        (["down"], "testbed down: no testbed is selected"),
        (["down", "--all", "--name", "x"], "--all: it removes every testbed, not only x; omit one"),
        (["down", "--all", SMALL], f"--all: it removes every testbed, not only {SMALL}"),
    ],
    ids=["policy", "prefill", "down-what", "down-all-and-name", "down-all-and-file"],
)
def test_options_are_checked_before_the_machine(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the machine cannot run a testbed, a wrong option is still reported first; nothing is removed by a guess."""
    monkeypatch.setenv("PATH", "/nowhere")
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(message)
