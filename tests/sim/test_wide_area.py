"""Two sites with an Ethernet link between them: the effect of a cut on a transfer, and the events that the router
receives."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.sim.network.capacity import LinkCapacities
from kvroute.sim.network.transfers import Fabric
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background, CapacityChange, SimSpec, WanTransport
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import parse
from kvroute.types import (
    CROSS_DATACENTER,
    CongestionMeasured,
    DecodeFailed,
    Event,
    InputError,
    LinksMeasured,
    TransferMeasured,
)

TEXT = """
name: sites
datacenters: [{name: away}, {name: home}]
nodes:
  - {name: node0, datacenter: away, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, datacenter: home, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
wan: [{from: away, to: home, capacity: 8 Gbps, latency: 5 ms}]
network: {latency: {datacenter: 0 s}}
timing: {default: {prefill: {kind: linear, per_token: 100 us}, decode: {base: 10 ms}}}
defaults: {model: llama-3-8b, tp: 4, kv_capacity: 50 GB}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-3", ENDPOINT}
  - {name: d0, role: decode, gpus: "node1:0-3", ENDPOINT}
  - {name: d1, role: decode, gpus: "node1:4-7", ENDPOINT}
"""
SGLANG = 'endpoint: {url: "http://10.0.0.1:1", protocol: sglang, bootstrap: "10.0.0.1:2"}'
AT_ARRIVAL = parse(TEXT.replace("ENDPOINT", SGLANG))
LATER = parse(TEXT.replace(", ENDPOINT", ""))
SPEC = ControlSpec(decode="round-robin", prefill_cache=False)
TOKEN_BYTES = 131_072
TOKENS = 20_000
"""2 s of prefill, and 2.62144 s for 2.62 GB at 1 GB/s."""
ONE = Trace(
    name="one",
    requests=(TracedRequest(at_s=0.0, input_tokens=TOKENS, output_tokens=2, blocks=(), block_tokens=16),),
)
SENT_S = TOKENS * TOKEN_BYTES / 1e9


def cut(*at_s: float) -> tuple[CapacityChange, ...]:
    """Cut the link at the first time, restore it at the second, and so on."""
    return tuple(CapacityChange(at_s=at, link="wan", share=float(number % 2)) for number, at in enumerate(at_s))


def simulated(path: Path, assumed: SimSpec, *, at_arrival: bool = True, trace: Trace = ONE) -> tuple[Run, list[Event]]:
    """Return the run and the events that the router received."""
    with EventLog(path, LogHeader(cluster="", spec=SPEC)) as log:
        run = simulate(AT_ARRIVAL if at_arrival else LATER, trace, SPEC, assumed, log=log)
    return run, [record.event for record in read_log(path)[1]]


@pytest.mark.parametrize("at_arrival", [True, False], ids=["early", "late"])
def test_serial_transfers_start_when_the_prefill_ends(tmp_path: Path, at_arrival: bool) -> None:
    """The target is chosen with the prefill or after it: 2 s, 2.62 s and 5 ms; llama has no other state."""
    run, _ = simulated(tmp_path / "run.log", SimSpec(), at_arrival=at_arrival)
    assert run.outcomes.landed_s[0] == pytest.approx(2.0 + SENT_S + 0.005)
    assert run.outcomes.kv_bytes[0] == TOKENS * TOKEN_BYTES


def test_a_layerwise_transfer_hides_all_but_the_last_layer(tmp_path: Path) -> None:
    """Prefill produces 1.31 GB/s and the link carries 1: it is busy from the first of 32 layers on, and ends 2.62 s
    later."""
    assumed = SimSpec(transfer="layerwise")
    assert simulated(tmp_path / "a", assumed)[0].outcomes.landed_s[0] == pytest.approx(2 / 32 + SENT_S + 0.005)
    assert simulated(tmp_path / "b", assumed, at_arrival=False)[0].outcomes.landed_s[0] == pytest.approx(2.005 + SENT_S)


def test_measured_transfers_count_from_their_first_byte(tmp_path: Path) -> None:
    """A connector would report the bytes over the time in flight, including the time of the prefill."""
    late = TracedRequest(at_s=9.0, input_tokens=1, output_tokens=1, blocks=(), block_tokens=16)
    assumed = SimSpec(transfer="layerwise", measures_transfers=True, telemetry="none")
    _, events = simulated(tmp_path / "run.log", assumed, trace=Trace(name="two", requests=(*ONE.requests, late)))
    measured = [event for event in events if isinstance(event, TransferMeasured)]
    assert measured[0].kv_bytes == TOKENS * TOKEN_BYTES
    assert measured[0].seconds == pytest.approx(SENT_S + 0.005)


def test_a_transfer_waits_until_its_link_recovers(tmp_path: Path) -> None:
    """With a cut of 3 s in the middle it ends 3 s later; at half capacity from the start it takes twice as long."""
    run, _ = simulated(tmp_path / "a", SimSpec(changes=cut(3.0, 6.0)))
    assert run.outcomes.landed_s[0] == pytest.approx(5.005 + SENT_S)
    half = (CapacityChange(at_s=0.0, link="away to home", share=0.5),)
    run, _ = simulated(tmp_path / "b", SimSpec(changes=half))
    assert run.outcomes.landed_s[0] == pytest.approx(2.005 + 2 * SENT_S)
    assert run.summary.failed_transfers.transfers == 0


def test_a_stalled_transfer_fails_and_its_request_restarts(tmp_path: Path) -> None:
    """The transfer sends for 1 s, is cut at 3 s and abandoned at 5 s; the prompt is prefilled again until 7 s and sent
    again: 1 GB was lost."""
    run, events = simulated(tmp_path / "run.log", SimSpec(changes=cut(3.0, 6.5), stall_s=2.0))
    rows, failed = run.outcomes, run.summary.failed_transfers
    assert [event for event in events if isinstance(event, DecodeFailed)] == [DecodeFailed(5.0, 0, kv_lost=True)]
    assert (rows.prefill_started_s[0], rows.prefill_finished_s[0]) == (5.0, 7.0)
    assert rows.landed_s[0] == pytest.approx(7.005 + SENT_S)
    assert failed.transfers == 1
    assert failed.kv_bytes == pytest.approx(1e9)
    assert run.network_bytes == pytest.approx(3 * (1e9 + TOKENS * TOKEN_BYTES))
    assert failed.network_bytes == pytest.approx(3e9)


def test_a_link_that_recovers_in_time_fails_no_transfer(tmp_path: Path) -> None:
    """Two cuts of 1.5 s each, half a second apart, do not count as one of 2 s."""
    run, _ = simulated(tmp_path / "run.log", SimSpec(changes=cut(2.5, 4.0, 4.5, 6.0), stall_s=2.0))
    assert run.summary.failed_transfers.transfers == 0
    assert run.outcomes.landed_s[0] == pytest.approx(5.005 + SENT_S)


def test_a_stalled_layerwise_transfer_is_abandoned_after_its_prefill(tmp_path: Path) -> None:
    """The transfer is cut at 0.5 s and would fail at 1.5 s; the prompt is computed nevertheless until 2 s, and again
    until 4 s."""
    assumed = SimSpec(transfer="layerwise", changes=cut(0.5, 3.0), stall_s=1.0)
    run, events = simulated(tmp_path / "run.log", assumed)
    assert [event.at for event in events if isinstance(event, DecodeFailed)] == [2.0]
    assert run.outcomes.landed_s[0] == pytest.approx(3.0 + SENT_S + 0.005)


@pytest.mark.parametrize("telemetry", ["tier", "link"])
def test_a_cut_looks_like_other_traffic_in_the_telemetry(tmp_path: Path, telemetry: str) -> None:
    """From the refresh after the cut to the one after its end, nearly all of the link is reported as used."""
    assumed = SimSpec(
        changes=cut(2.5, 4.5),
        telemetry="tier" if telemetry == "tier" else "link",
        background=Background(per_tier=(0, 0, 0, 0, 0.25)),
    )
    _, events = simulated(tmp_path / "run.log", assumed)
    wan = LATER.links_of_tier(CROSS_DATACENTER)[0]
    seen = {
        event.at: event.per_tier[CROSS_DATACENTER] if isinstance(event, CongestionMeasured) else event.utilisation[wan]
        for event in events
        if isinstance(event, CongestionMeasured | LinksMeasured)
    }
    assert [seen[at] for at in (0.0, 2.0, 3.0, 4.0, 5.0)] == pytest.approx([0.25, 0.25, 0.99, 0.99, 0.25])


def test_a_cut_without_an_end_is_rejected() -> None:
    """The run would never end; a run with an end time is allowed."""
    for_good = cut(3.0)
    with pytest.raises(InputError, match="'away to home #0 up' is cut permanently"):
        simulate(AT_ARRIVAL, ONE, SPEC, SimSpec(changes=for_good))
    run = simulate(AT_ARRIVAL, ONE, SPEC, SimSpec(changes=for_good, until_s=60.0, stall_s=5.0))
    assert (run.summary.requests.in_flight, run.end_s <= 60.0) == (1, True)


def test_a_prompt_without_output_releases_its_bookings() -> None:
    """The bookings are unneeded: memory and instances are free again, and the next prompt uses them."""
    nothing = TracedRequest(at_s=0.0, input_tokens=TOKENS, output_tokens=0, blocks=(), block_tokens=16)
    trace = Trace(name="none", requests=(nothing,) * 30)
    small = parse(TEXT.replace("ENDPOINT", SGLANG).replace("50 GB", "3 GB"))
    run = simulate(small, trace, SPEC, SimSpec(transfer="layerwise", prefill_queueing=False))
    assert run.network_bytes == 0.0
    assert run.summary.requests.finished + run.summary.requests.rejected == 30
    after = TracedRequest(at_s=100.0, input_tokens=TOKENS, output_tokens=1, blocks=(), block_tokens=16)
    late = simulate(small, Trace(name="late", requests=(*trace.requests, after)), SPEC, SimSpec())
    assert late.outcomes.landed_s[30] > 100.0


def test_copies_share_the_links_and_are_counted_separately() -> None:
    """A prefix of 1 GB between the sites runs beside a KV cache of 1 GB; each is counted separately."""
    links = Fabric(LATER, LinkCapacities(LATER, Background(), 0), 0, WanTransport(connections=4))
    source, target = LATER.index("p0"), LATER.index("d0")
    links.send(0, source, target, 1e9)
    links.send(1, target, source, 1e9, kind="copy")
    given_up = links.send(2, source, target, 1e9, kind="copy")
    ended = links.advance(1.0)
    assert [(transfer.request, transfer.is_copy) for transfer in ended] == [(1, True)]
    links.give_up(given_up)
    assert [transfer.request for transfer in links.advance(2.0)] == [0]
    assert links.copied.transfers == 2
    assert links.copied.kv_bytes == pytest.approx(1.5e9)
    assert links.copied.network_bytes == pytest.approx(4.5e9)
    assert links.failed.transfers == 0


WIDER = TEXT.replace("gpus: 8, nics: {compute: {count: 8", "gpus: 12, nics: {compute: {count: 12").replace(
    ", ENDPOINT", ""
)
FOUR = parse(WIDER + '  - {name: p1, role: prefill, gpus: "node1:8-11"}\n')
OFFLOAD = ControlSpec(offload=OffloadSpec(threshold_tokens=2_000.0, rule="abundant", layerwise=False))
SHARED, BLOCK = 1_536, 512
PREFIX_S = SHARED * TOKEN_BYTES / 1e9
BEGUN = TracedRequest(at_s=0.0, input_tokens=SHARED, output_tokens=1, blocks=(1, 2, 3), block_tokens=BLOCK)
LONG = TracedRequest(
    at_s=100.0, input_tokens=10_240, output_tokens=1, blocks=(1, 2, 3, *range(100, 117)), block_tokens=BLOCK
)
COPIED = Trace(name="copied", requests=(BEGUN, LONG))
"""A short prompt is prefilled at home. A long one that continues it is prefilled at the remote site, and its prefix is
copied there."""


def test_a_prefill_waits_for_its_prefix_copy() -> None:
    """The copy takes 0.2 s for 0.2 GB and 5 ms; then the 8,704 uncached tokens are computed. The copied bytes are
    counted separately."""
    run = simulate(FOUR, COPIED, OFFLOAD, SimSpec())
    rows, copied = run.outcomes, run.summary.copied_prefixes
    assert [FOUR.instances[int(source)].name for source in rows.source] == ["p1", "p0"]
    assert rows.prefill_started_s[1] == pytest.approx(100.005 + PREFIX_S)
    assert rows.prefill_finished_s[1] - rows.prefill_started_s[1] == pytest.approx((10_240 - SHARED) * 1e-4)
    assert rows.cached_tokens[1] == SHARED
    assert copied.transfers == 1
    assert copied.kv_bytes == pytest.approx(SHARED * TOKEN_BYTES)
    assert copied.network_bytes == pytest.approx(3 * SHARED * TOKEN_BYTES)


@pytest.mark.parametrize("queues", [False, True])
def test_a_source_that_queues_copies_like_prompts_sends_them_in_turn(queues: bool) -> None:
    """p1 computes a prompt of its own until 100.1 s; the copy waits for that only if it is requested like a prompt."""
    own = TracedRequest(at_s=99.9, input_tokens=2_000, output_tokens=1, blocks=(9,), block_tokens=BLOCK)
    assert OFFLOAD.offload is not None
    offload = msgspec.structs.replace(OFFLOAD.offload, copy_queues=queues)
    trace = Trace(name="queued", requests=(BEGUN, own, LONG))
    run = simulate(FOUR, trace, msgspec.structs.replace(OFFLOAD, offload=offload), SimSpec())
    rows = run.outcomes
    assert [FOUR.instances[int(source)].name for source in rows.source] == ["p1", "p1", "p0"]
    assert rows.prefill_finished_s[1] == pytest.approx(100.1)
    assert rows.prefill_started_s[2] == pytest.approx((100.1 if queues else 100.0) + 0.005 + PREFIX_S)
    assert rows.cached_tokens[2] == SHARED


def test_a_stalled_copy_is_skipped() -> None:
    """Only the direction of the copy is cut: after 2 s the whole prompt is computed, and its KV is sent home."""
    cut_off = (
        CapacityChange(at_s=50.0, link="home to away", share=0.0),
        CapacityChange(at_s=200.0, link="home to away", share=1.0),
    )
    run = simulate(FOUR, COPIED, OFFLOAD, SimSpec(changes=cut_off, stall_s=2.0, telemetry="none"))
    rows, copied = run.outcomes, run.summary.copied_prefixes
    assert rows.prefill_started_s[1] == 102.0
    assert rows.prefill_finished_s[1] == pytest.approx(102.0 + 10_240 * 1e-4)
    assert rows.cached_tokens[1] == 0
    assert (copied.transfers, copied.kv_bytes, run.summary.failed_transfers.transfers) == (1, 0.0, 0)
    assert rows.landed_s[1] < 110.0


def test_memory_of_a_failed_transfer_is_free_for_others() -> None:
    """There is room for one request: the next one needs what the first one released when its path was cut."""
    small = parse(WIDER.replace("50 GB", "3 GB").replace('  - {name: d1, role: decode, gpus: "node1:4-7"}\n', ""))
    again = TracedRequest(at_s=60.0, input_tokens=TOKENS, output_tokens=2, blocks=(), block_tokens=16)
    assumed = SimSpec(changes=cut(3.0, 20.0), stall_s=2.0)
    run = simulate(small, Trace(name="two", requests=(*ONE.requests, again)), SPEC, assumed)
    assert run.summary.failed_transfers.transfers > 1
    assert run.summary.requests.finished == 2
    assert run.outcomes.landed_s[1] == pytest.approx(62.005 + SENT_S)
