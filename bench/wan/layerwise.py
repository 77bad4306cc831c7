"""Time saved by layer-wise sending over a wide-area link: seconds from the end of a prefill to the last KV byte at the
receiver, if sent during the prefill and if sent afterwards; `python -m bench.wan.layerwise`. Needs root.

The prefill is a sleep per layer and chunk; sockets, link and connector are real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from bench.measurement import Failed, Row, fresh, show
from bench.wan.ends import LAYERS, Ends, ends
from bench.wan.network import Network, Unavailable, Wan

from kvroute_engine.connector.transfer.block_leases import Computing

CHUNKS = 4


def prefill(both: Ends, name: str, prefill_s: float, tell: bool) -> float:
    """Simulate the computation of the prompt in chunks, layer by layer; return the time of its end."""
    blocks, began, done = tuple(range(both.blocks)), time.monotonic(), 0
    for chunk in range(1, CHUNKS + 1):
        ready = both.blocks * chunk // CHUNKS
        for layer in range(LAYERS):
            done += 1
            time.sleep(max(began + prefill_s * done / (CHUNKS * LAYERS) - time.monotonic(), 0.0))
            if tell:
                both.server.computed(Computing(name, name, blocks[:ready], ready), [layer])
    ended = time.monotonic()
    both.server.hold(name, blocks)
    return ended


def trial(wan: Wan, nbytes: int, connections: int, prefill_s: float) -> dict[str, float]:
    """Run both modes once, each with fresh connections; return the seconds after the end of the prefill."""
    figures = {}
    with Network(wan) as network:
        with ends(network, nbytes, connections) as both:
            began = both.start("p", wait_s=60.0)
            ended = prefill(both, "p", prefill_s, tell=True)
            figures["layerwise_s"] = began + both.wait().seconds - ended
        with ends(network, nbytes, connections) as both:
            ended = prefill(both, "p", prefill_s, tell=False)
            began = both.start("p")
            figures["afterwards_s"] = began + both.wait().seconds - ended
    return figures


def main() -> int:
    """Run paired trials: every process runs both modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=48.0, help="KV of the prompt, 1e6 bytes")
    parser.add_argument("--mbps", type=float, default=200.0, help="rate of the link, 1e6 bits per second")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip without queues")
    parser.add_argument("--loss", type=float, default=0.001, help="share of packets")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--prefill-s", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    wan = Wan(given.mbps * 1e6, given.rtt_ms / 1e3, given.loss)
    if given.trial:
        print(json.dumps(trial(wan, round(given.mb * 1e6), given.connections, given.prefill_s)))
        return 0
    names = ("mb", "mbps", "rtt_ms", "loss", "connections", "prefill_s")
    options = [argument for name in names for argument in (f"--{name.replace('_', '-')}", getattr(given, name))]
    measure = f"WAN: from the end of a prefill of {given.prefill_s:g} s to the last KV byte, layer-wise"
    try:
        with Network(wan):
            pass
        trials = [fresh("bench.wan.layerwise", *options, "--trial") for _ in range(given.rounds)]
    except (Unavailable, Failed) as error:
        show([Row(measure=measure, unit="s", better="lower", ours=None, note=str(error))], given.json)
        return 0 if isinstance(error, Unavailable) else 1
    ours, peer = (statistics.median(measured[name] for measured in trials) for name in ("layerwise_s", "afterwards_s"))
    floor_s = given.mb * 1e6 / wan.payload_bytes_per_s
    note = f"{given.mb:g} MB over {given.connections} connections need {floor_s:.2f} s on the link alone"
    row = Row(measure=measure, unit="s", better="lower", ours=ours, peer=peer, peer_name="afterwards", note=note)
    show([row], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
