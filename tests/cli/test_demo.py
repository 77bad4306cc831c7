"""`kvroute demo`: a short real run on a tiny cluster, the files that it writes, and its cancellation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.cli.app import main
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.planner.comparison.requests import Workload
from kvroute.report.dashboard_page import dashboard_page
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.testbed.live import PARTS, Comparison, Half, playable
from kvroute.topology import load
from kvroute.topology.ecmp import EcmpPaths
from kvroute.types import TransferMeasured

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = (EXAMPLES / "small.yaml").read_text()
POLLS = 3000
KVROUTE = (sys.executable, "-m", "kvroute.cli.app")
REQUESTS = 12


@dataclass(frozen=True)
class Ended:
    """A demo that has completed."""

    folder: Path
    cluster: Path
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The numbers in the saved file."""
        rows: list[dict[str, Any]] = json.loads((self.folder / "demo.json").read_text())
        return rows


def running(mark: str) -> list[int]:
    """Return the IDs of the processes with this text in their command line."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if mark.encode() in line:
            pids.append(int(entry.name))
    return pids


def demo_of(folder: Path, *more: str) -> tuple[Path, list[str]]:
    """Return a cluster file with a unique path, by which the processes are found, and the command."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(LINES)
    command = [*KVROUTE, "demo", str(cluster), "--profile", "chatbot", "--out", str(folder / "out")]
    return cluster, [*command, *more]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A completed demo with one second per policy."""
    folder = tmp_path_factory.mktemp("demo")
    cluster, command = demo_of(folder, "--seconds", "1", "--rate", str(REQUESTS), "--output-max", "8")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return Ended(folder / "out", cluster, done.stdout, done.stderr)


@pytest.mark.slow
def test_live_and_predicted_results_are_printed(ended: Ended) -> None:
    """Each policy has a live and a predicted row with the saved numbers; every request is answered on both sides."""
    assert [row["policy"] for row in ended.rows] == ["round-robin", "foresight", "foresight-joint"]
    times, tiers = ended.out.split("KV transfers by tier, % of requests")
    for row in ended.rows:
        for side in ("live", "predicted"):
            half = row[side]
            assert half["answered"] == REQUESTS
            assert len(half["ttft_s"]) == REQUESTS
            assert min(half["ttft_s"]) > 0
            sent = sum(half["tier_share"])
            assert sent <= 1.0 if row["policy"] == "foresight-joint" else sent == pytest.approx(1)
            assert sum(half["parts_s"].values()) == pytest.approx(half["ttft_mean_s"], rel=0.2)
            cells = [f"{1e3 * half[name]:,.0f}" for name in ("ttft_p50_s", "ttft_p90_s", "ttft_mean_s")]
            assert any(side in line and line.split()[-6:-3] == cells for line in times.splitlines())
            shares = [f"{100 * share:.0f}" for share in (max(0.0, 1 - sent), *filter(None, half["tier_share"]))]
            assert any(side in line and line.split()[-len(shares) :] == shares for line in tiers.splitlines())
        assert row["live"]["ttft_s"] != row["predicted"]["ttft_s"]
    assert "The mean TTFT under foresight-joint is" in ended.out


@pytest.mark.slow
def test_the_output_fits_a_terminal_and_names_the_next_command(ended: Ended) -> None:
    """Lines have at most 80 columns except for paths; the output names the page and the command for a gateway; it has
    no log lines."""
    for line in (ended.out + ended.err).splitlines():
        assert len(line.rstrip()) <= 80 or str(ended.folder.parent) in line
    assert str(ended.folder / "dashboard.html") in ended.out
    assert f"kvroute serve --embedded {ended.cluster}" in ended.out
    assert "3/3 foresight-joint: live dashboard at http://127.0.0.1:" in ended.err
    assert "…" not in ended.out


@pytest.mark.slow
def test_the_saved_page_contains_all_policies(ended: Ended) -> None:
    """The page is one file with its scripts included, the map of the last run, and the figures of all runs."""
    page = (ended.folder / "dashboard.html").read_text()
    saved = page.partition('id="saved">')[2].partition("</script>")[0]
    snapshot = json.loads(saved)
    assert [split["policy"] for split in snapshot["tick"]["splits"]] == ["round-robin", "foresight", "foresight-joint"]
    assert [split["requests"] for split in snapshot["tick"]["splits"]] == [REQUESTS] * 3
    assert snapshot["tick"]["policy"] == "foresight-joint"
    assert [instance["name"] for instance in snapshot["layout"]["instances"]] == [
        *("decode0", "decode1", "prefill0", "prefill1")
    ]
    assert 'src="' not in page
    assert '<link rel="stylesheet"' not in page


@pytest.mark.slow
def test_nothing_is_left_running(ended: Ended) -> None:
    """Gateway and engines have ended with the command."""
    assert running(str(ended.cluster)) == []


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A demo that has started its traffic, and the path of its cluster file."""
    cluster, command = demo_of(tmp_path, "--seconds", "60", "--rate", "4", "--policy", "netkv")
    # Background processes ignore Ctrl-C, and their children inherit this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            yield process, str(cluster)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_interrupted_demo_leaves_nothing_running(
    running_demo: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    """Ctrl-C ends it without a stack trace; gateway and engines end even if the command is killed."""
    process, cluster = running_demo
    assert process.stderr
    status = next(line for line in process.stderr if "live dashboard" in line)
    assert status.startswith("1/1 netkv")
    assert len(running(cluster)) == 3  # the command, the gateway, the engines
    process.send_signal(number)
    message = process.stderr.read()
    assert process.wait(60) != 0
    assert "Traceback" not in message
    for _ in range(POLLS if number == signal.SIGKILL else 1):
        if not running(cluster):
            break
        time.sleep(0.02)
    assert running(cluster) == []


def error_of(command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the sentence of a command that ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["kvroute", *command[len(KVROUTE) :]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    return err.strip()


def test_without_the_extra_the_demo_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence and exit code 2."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delitem(sys.modules, "kvroute.testbed.live")
    message = error_of(demo_of(tmp_path)[1], monkeypatch, capfd)
    assert message == "kvroute: uvloop is not installed; pip install 'kvroute[serve]'"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--policy", "netkw"), "'netkw'"),
        (("--profile", "ragg"), "unknown profile 'ragg'"),
        (("--prefill", "no-such"), "'no-such'"),
    ],
    ids=["policy", "profile", "prefill"],
)
def test_invalid_arguments_are_found_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    named: str,
) -> None:
    """One sentence that names them, and exit code 2."""
    assert named in error_of(demo_of(tmp_path, *arguments)[1], monkeypatch, capfd)
    assert not (tmp_path / "out").exists()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 90)), max_size=30),
    st.integers(1, 50),
)
def test_both_sides_get_the_same_requests_at_distinct_times(drawn: list[tuple[int, int, int]], output_max: int) -> None:
    """Requests with output tokens are kept in order, with increasing times within their steps; prompts keep their
    length."""
    ordered = sorted(drawn)
    requests = tuple(
        TracedRequest(3.0 * step, 1 + prompt, output, blocks=(), block_tokens=512) for step, prompt, output in ordered
    )
    made = playable(Trace("drawn", requests), output_max).requests
    kept = [request for request in requests if request.output_tokens]
    assert [request.input_tokens for request in made] == [request.input_tokens for request in kept]
    assert [request.output_tokens for request in made] == [min(r.output_tokens, output_max) for r in kept]
    assert all(earlier.at_s < later.at_s for earlier, later in pairwise(made))
    steps = sorted({request.at_s for request in kept})
    nexts = dict(pairwise(steps))
    for before, after in zip(kept, made, strict=True):
        assert before.at_s <= after.at_s < nexts.get(before.at_s, float("inf"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=12), st.integers(0, 99))
def test_each_request_draws_its_own_path(requests: list[int], seed: int) -> None:
    """The path does not depend on the time or order of the calls; every hop is one that the cluster offers."""
    cluster = load(EXAMPLES / "fat-tree-64gpu.yaml")
    source, target = cluster.index("prefill0"), cluster.index("decode11")
    once, again = EcmpPaths(cluster, seed), EcmpPaths(cluster, seed)
    drawn = {request: once.of(request, source, target) for request in requests}
    for request in reversed(requests):
        assert again.of(request, source, target) == drawn[request]
    for paths in drawn.values():
        assert len(paths) == cluster.flows_per_transfer(source, target)
        for shard, path in enumerate(paths):
            assert all(link in group for link, group in zip(path, cluster.hops(source, target, shard), strict=True))


@pytest.mark.parametrize("measures_transfers", [False, True])
def test_the_simulated_router_gets_transfer_measurements_if_configured(
    tmp_path: Path, measures_transfers: bool
) -> None:
    """The reported bytes and transfers equal the completed ones, as with engines' counters; without the setting none is
    reported."""
    cluster, log = load(EXAMPLES / "small.yaml"), tmp_path / "run.log"
    trace = playable(Workload(generated_requests=20, rate_per_s=4.0, profile="chatbot").of_seed(1), 8)
    assumed = SimSpec(telemetry="none", measures_transfers=measures_transfers, oracle_refresh_s=0.01)
    spec = ControlSpec(decode="foresight")
    with EventLog(log, LogHeader(cluster=LINES, spec=spec)) as records:
        run = simulate(cluster, trace, spec, assumed, seed=1, log=records)
    measured = [record.event for record in read_log(log)[1] if isinstance(record.event, TransferMeasured)]
    assert sum(event.transfers for event in measured) == (len(trace.requests) if measures_transfers else 0)
    assert sum(event.kv_bytes for event in measured) == pytest.approx(
        run.outcomes.kv_bytes.sum() if measures_transfers else 0
    )
    assert all(event.seconds > 0 for event in measured)


def test_comparison_of_two_runs_by_hand() -> None:
    """The medians differ by 10 %, the requests by 10 % and 30 %; a request without an answer counts in neither."""

    def half(*ttft_s: float | None) -> Half:
        known = sorted(second for second in ttft_s if second is not None)
        return Half(
            answered=len(known), ttft_p50_s=known[0], ttft_p90_s=known[-1], ttft_mean_s=known[0], ttft_s=ttft_s,
            parts_s=dict.fromkeys(PARTS, 0.0), tier_share=(1.0, 0.0, 0.0, 0.0, 0.0),
        )  # fmt: skip

    compared = Comparison("netkv", live=half(1.1, 1.4, None), predicted=half(1.0, 2.0, 3.0))
    assert compared.off == pytest.approx(0.1)
    assert compared.apart == pytest.approx(0.2)


def test_results_of_other_runs_replace_those_of_the_state() -> None:
    """The order is that of the runs; without figures of other runs the state's own are kept."""

    def state(policy: str, requests: int) -> bytes:
        split = {"policy": policy, "requests": requests}
        return json.dumps({"layout": {}, "tick": {"policy": policy, "splits": [split]}}).encode()

    def splits(page: str) -> list[tuple[str, int]]:
        saved = json.loads(page.partition('id="saved">')[2].partition("</script>")[0])
        return [(split["policy"], split["requests"]) for split in saved["tick"]["splits"]]

    assert splits(dashboard_page(state("b", 1))) == [("b", 1)]
    assert splits(dashboard_page(state("b", 1), [state("a", 9), state("b", 8)])) == [("a", 9), ("b", 8)]
