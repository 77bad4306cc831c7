"""KV over a lossy wide-area link: throughput of N TCP connections, compared with one connection and with the link's
capacity; `python -m bench.wan.connections`. Needs root, for network namespaces and tc."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.measurement import Failed, Row, fresh, show
from bench.wan.ends import ends
from bench.wan.network import Network, Unavailable, Wan

CONNECTIONS = (1, 2, 4, 8, 16)
CONTROLS = ("cubic", "bbr")


def trial(wan: Wan, nbytes: int, control: str, first: int) -> dict[str, Any]:
    """Measure payload bytes per second once for each number of fresh connections, starting at index `first`."""
    figures: dict[str, Any] = {"rates": {}, "again": {}, "rtt_s": {}}
    with Network(wan) as network:
        for place in range(len(CONNECTIONS)):
            number = CONNECTIONS[(first + place) % len(CONNECTIONS)]
            with ends(network, nbytes, number, control) as both:
                both.server.hold("p", range(both.blocks))
                both.start("p")
                result = both.wait()
                ((sent, _),) = both.server.links().values()
            figures["rates"][str(number)] = result.nbytes / result.seconds
            figures["again"][str(number)] = sent.again_segments / sent.segments
        crossed, lost, full = network.lost()
        figures |= {"lost": lost / (crossed + lost + full), "full": full / (crossed + lost + full)}
    return figures


def rows(wan: Wan, control: str, trials: list[dict[str, Any]]) -> list[Row]:
    """Return medians over the trials."""

    def median(name: str, number: int) -> float:
        return float(statistics.median(trial[name][str(number)] for trial in trials))

    bound, made = wan.payload_bytes_per_s, []
    lost = statistics.median(trial["lost"] for trial in trials)
    full = statistics.median(trial["full"] for trial in trials)
    for number in CONNECTIONS:
        rate, each = median("rates", number), [trial["rates"][str(number)] for trial in trials]
        made.append(
            Row(
                measure=f"WAN, {control}, {number} connection{'s' * (number > 1)}: KV payload",
                unit="MB/s",
                better="higher",
                ours=rate / 1e6,
                peer=median("rates", 1) / 1e6,
                peer_name="one connection",
                note=f"{control}, {number}: {rate / bound:.0%} of the link's payload rate, trials "
                f"{min(each) / 1e6:.1f} to {max(each) / 1e6:.1f} MB/s, {median('again', number):.2%} of segments sent "
                "again",
            )
        )
    print(f"{control}: {lost:.3%} of packets dropped at random, {full:.3%} at the full queue", file=sys.stderr)
    return made


def main() -> int:
    """Run paired trials: every process has its own network and measures all numbers of connections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=48.0, help="KV of one transfer, 1e6 bytes")
    parser.add_argument("--mbps", type=float, default=200.0, help="rate of the link, 1e6 bits per second")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip without queues")
    parser.add_argument("--loss", type=float, default=0.001, help="share of packets")
    parser.add_argument("--controls", nargs="+", default=list(CONTROLS), help="TCP congestion controls of the sender")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--raw", type=Path, help="write every trial's figures")
    parser.add_argument("--trial", nargs=2, metavar=("CONTROL", "FIRST"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    wan = Wan(given.mbps * 1e6, given.rtt_ms / 1e3, given.loss)
    if given.trial:
        print(json.dumps(trial(wan, round(given.mb * 1e6), given.trial[0], int(given.trial[1]))))
        return 0
    link = ["--mb", given.mb, "--mbps", given.mbps, "--rtt-ms", given.rtt_ms, "--loss", given.loss]
    trials: dict[str, list[dict[str, Any]]] = {control: [] for control in given.controls}
    try:
        with Network(wan):
            pass
        for number in range(given.rounds):
            for control in given.controls:
                trials[control].append(fresh("bench.wan.connections", *link, "--trial", control, number))
    except (Unavailable, Failed) as error:
        what = "WAN: KV payload by number of connections"
        show([Row(measure=what, unit="MB/s", better="higher", ours=None, note=str(error))], given.json)
        return 0 if isinstance(error, Unavailable) else 1
    if given.raw:
        given.raw.write_text(json.dumps(trials, indent=1), encoding="utf-8")
    show([row for control in given.controls for row in rows(wan, control, trials[control])], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
