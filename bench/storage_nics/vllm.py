"""Agents of real vLLM that re-read cached KV through storage NICs of 20 Mbit/s: `python -m bench.storage_nics.vllm`.

One prefill and two decode servers on CPUs, a buffer server and a storage NIC on each of three nodes (network
namespaces, token buckets), Redis as the store. In each round every agent sends one turn, all at once: its context is
in the store only. The rows compare the turns per second of the read paths, and the bytes that each NIC has received, as
the kernel counts them. Every answer is compared with that of a server without a connector. Root only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from bench.measurement import Failed, Row, show
from bench.wan.network import Unavailable
from tests.live.vllm.conftest import BIN, free_ports, make_model, start, wait_ready
from tests.live.vllm.gateway_rig import alone
from tests.live.vllm.storage_nics import ANSWER_TOKENS, Outcome, measured, stored_behind_nics

READS = ("prefill", "shorter", "split")


def outcomes(agents: int, rounds: int) -> list[Outcome]:
    """Run every read path `rounds` times, in turn. Raises Failed if a token differs or the network cannot be built."""
    if not (BIN / "vllm").exists():
        raise Failed("vLLM is not installed: run `make vllm`")
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        single = start("alone", model, folder, free_ports(3), ["--no-enable-prefix-caching"])
        try:
            wait_ready([single])
            with stored_behind_nics(model, folder, single) as stored:
                for round_ in range(rounds):
                    for at, reads in enumerate(READS):
                        seed = 1000 * (round_ * len(READS) + at)
                        found.append(measured(stored, folder / f"{reads}{round_}", reads, agents, seed))
                        wanted = [alone(stored.cluster.pair, turn, ANSWER_TOKENS) for turn in found[-1].turns]
                        if found[-1].answers != wanted:
                            raise Failed(f"read path {reads}: tokens differ from those of a single server")
        except Unavailable as error:
            raise Failed(str(error)) from None
        finally:
            single.kill()
    return found


def rows(found: list[Outcome], agents: int) -> list[Row]:
    """Return the throughput of each read path, compared with the prefill node alone, and the balance of the NICs."""
    by_path = {reads: [trial for trial in found if trial.reads == reads] for reads in READS}
    rates = {reads: statistics.median(agents / trial.seconds for trial in own) for reads, own in by_path.items()}
    result = [
        Row(
            measure=f"turns/s of real vLLM, read path {reads}",
            unit="/s",
            better="higher",
            ours=rates[reads],
            peer=rates["prefill"],
            peer_name="prefill node alone",
            target=2.0 * rates["prefill"],
        )
        for reads in READS[1:]
    ]
    result += [
        Row(
            measure=f"bytes of the storage NICs, maximum to mean, read path {reads}",
            unit="",
            better="lower",
            ours=statistics.median(trial.balance for trial in by_path[reads]),
            target=1.2,
            note=", ".join(f"{nbytes / 1e6:.0f} MB" for nbytes in by_path[reads][-1].read_bytes),
        )
        for reads in READS[1:]
    ]
    return result


def main() -> None:
    """Run every read path in turn; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agents", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    show(rows(outcomes(given.agents, given.rounds), given.agents), given.json)


if __name__ == "__main__":
    main()
