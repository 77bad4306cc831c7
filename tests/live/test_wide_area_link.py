"""Live: KV over a lossy WAN link of network namespaces, with the kernel's TCP and tc: bytes arrive unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.wan.ends import Ends, ends
from bench.wan.layerwise import prefill
from bench.wan.network import Network, Unavailable, Wan

from kvroute.serve.wan.tcp_links import TcpCounters, TcpDelta, TcpSample
from kvroute_engine.connector.transfer.congestion import Gauges, SentCounters
from kvroute_engine.connector.worker import CHECK_S

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[2]
NBYTES = 4 << 20
WAN = Wan(rate_bits_per_s=100e6, rtt_s=0.02, loss=0.01)


@contextmanager
def network(wan: Wan = WAN) -> Iterator[Network]:
    """Create a network; skip or fail with the reason if this machine cannot."""
    try:
        made = Network(wan).__enter__()
    except Unavailable as reason:
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    with made:
        yield made


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("layerwise", [False, True], ids=["afterwards", "layerwise"])
def test_bytes_arrive_unchanged_despite_packet_loss(connections: int, layerwise: bool) -> None:
    """1 % of the packets are lost and sent again; the kernel's counters show it, and `wait` compares the bytes."""
    with network() as wan, ends(wan, NBYTES, connections, "cubic") as both:
        if layerwise:
            both.start("p", wait_s=60.0)
            prefill(both, "p", 0.0, tell=True)
        else:
            both.server.hold("p", range(both.blocks))
            both.start("p")
        assert both.wait().nbytes == both.nbytes
        ((sent, _),) = both.server.links().values()
        crossed, lost, full = wan.lost()
    assert sent.nbytes - sent.again_bytes >= both.nbytes
    assert 0 < lost < crossed / 20
    assert sent.again_segments >= (lost + full) / 2
    assert sent.segments <= crossed + lost + full


def test_the_reported_round_trip_is_that_of_the_link() -> None:
    """The values that the connector reports about a link match the configured link."""
    with network(Wan(rate_bits_per_s=50e6, rtt_s=0.02)) as wan, ends(wan, NBYTES, 4) as both:
        both.server.hold("p", range(both.blocks))
        both.start("p")
        seen = [gauges for gauges in sampled_gauges(both) if gauges.connections]
    assert seen
    for gauges in seen:
        assert gauges.min_rtt_s >= 0.02
        assert gauges.rtt_s >= gauges.min_rtt_s
        assert gauges.connections <= 4
        assert 0 < gauges.queue_bytes <= both.nbytes
        assert gauges.cwnd_bytes > 0


@pytest.mark.parametrize("control", ["cubic", "bbr"])
def test_a_full_link_is_distinguished_from_a_slow_engine(control: str) -> None:
    """The gateway's interpretation of the connector's values: a transfer limited by the link shows the link's rate, and
    one that waits for its prefill shows nothing about the link."""
    wan = Wan(rate_bits_per_s=80e6, rtt_s=0.02)
    with network(wan) as link, ends(link, 48 << 20, 4, control) as both:
        both.server.hold("p", range(both.blocks))
        both.start("p")
        held_back, seconds = samples(both)
        pace = both.nbytes / seconds
    paces = [seen.bytes_per_s for seen in held_back if seen.backlogged]
    assert len(paces) > len(held_back) / 2
    assert sorted(paces)[len(paces) // 2] == pytest.approx(pace, rel=0.2)
    assert all(seen.stalled_s == 0.0 for seen in held_back)
    assert any(seen.congested for seen in held_back)
    with network(wan) as link, ends(link, 4 << 20, 4, control) as both, ThreadPoolExecutor(1) as pool:
        both.start("p", wait_s=60.0)
        pool.submit(prefill, both, "p", 3.0, True)
        waits, _ = samples(both)
    assert len(waits) > 1
    assert not any(seen.backlogged for seen in waits)


def samples(both: Ends) -> tuple[list[TcpSample], float]:
    """Return the observations, at the connector's sampling interval, and the duration of the transfer in seconds."""
    watch, seen, sent = TcpDelta(), list[TcpSample](), SentCounters()
    while (ended := both.client.wait(CHECK_S)) is None:
        for more, gauges in both.server.links().values():
            sent += more
            totals = TcpCounters(
                sent_bytes=sent.nbytes,
                again_bytes=sent.again_bytes,
                busy_s=sent.busy_us / 1e6,
                connections=gauges.connections,
                rtt_s=gauges.rtt_s,
                min_rtt_s=gauges.min_rtt_s,
                queue_bytes=gauges.queue_bytes,
                unsent_bytes=gauges.unsent_bytes,
                looked_s=time.monotonic(),
            )
            seen += watch.seen({"d": totals}) or ()
    assert ended.failure == ""
    return seen, ended.seconds


def sampled_gauges(both: Ends) -> Iterator[Gauges]:
    """Yield the state of the connections repeatedly until the transfer has ended."""
    while not (ended := both.client.results()):
        for _, gauges in both.server.links().values():
            yield gauges
    assert [result.failure for result in ended] == [""]


def test_a_kill_leaves_no_namespaces_or_processes() -> None:
    """A process with a network is killed; its delay line ends with it, and so do its unnamed namespaces."""
    with network():
        pass
    code = "from bench.wan.network import Network, Wan\nwith Network(Wan(1e7, 0.02)): print('up', flush=True); input()"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}{os.pathsep}{ROOT / 'engine/src'}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"up\n"
        (line,) = map(int, Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text("ascii").split())
        there = namespace(line)
        holder.kill()
    assert there is not None
    assert there != namespace(os.getpid())
    while namespace(line) is not None:
        assert holder.returncode
    assert there not in {namespace(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit()}


def namespace(process: int) -> str | None:
    """Return the network namespace of a process; None if the process has ended."""
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:
        return None
