"""A worker that sums tensors through a switch and checks each sum: `python -m bench.all_reduce.sums`.

Every worker can compute the tensors of all others, so it knows the exact result. If the group ends because another
worker has restarted, it begins anew. The last line on stdout is JSON: rounds, attempts, packets sent again, and a hash
of all results, which is equal on all workers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys

import numpy as np
import numpy.typing as npt

from kvroute_engine.switch import AggregationClient, AggregationError
from kvroute_engine.switch.fixed_point import exponents, merge, split, to_fixed, to_float


def tensor(number: int, worker: int, values: int, dtype: str) -> npt.NDArray[np.generic]:
    """Return a worker's tensor of one round."""
    drawn = np.random.default_rng([number, worker])
    if dtype == "int32":
        return drawn.integers(-(2**24), 2**24, values).astype(np.int32)
    return drawn.normal(0.0, 10.0 ** (number % 7 - 3), values).astype(dtype)


def expected(number: int, workers: int, values: int, dtype: str) -> npt.NDArray[np.generic]:
    """Return the exact sum of one round in the fixed point of the group."""
    tensors = [tensor(number, worker, values, dtype) for worker in range(workers)]
    if dtype == "int32":
        total: npt.NDArray[np.generic] = np.sum(tensors, axis=0, dtype=np.int32)
        return total
    chunks = [split(part) for part in tensors]
    common = np.max([exponents(chunk) for chunk in chunks], axis=0)
    sums = np.asarray(np.sum([to_fixed(chunk, common, workers) for chunk in chunks], axis=0, dtype=np.int32))
    return merge(to_float(sums, common, workers, dtype), (values,))


def main() -> None:
    """Sum `--rounds` tensors; exit with an error at the first wrong one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switch", required=True, help="HOST:PORT")
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--values", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--job", type=int, default=1)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    given = parser.parse_args()
    host, _, port = given.switch.rpartition(":")
    for attempt in range(1, 100):
        digest, again = hashlib.sha256(), 0
        try:
            with AggregationClient(
                (host, int(port)), given.job, given.worker, given.workers, given.slots, timeout_s=given.timeout_s
            ) as client:
                for number in range(given.rounds):
                    values = max(1, given.values * (number % 5) // 2)
                    total = client.all_reduce(tensor(number, given.worker, values, given.dtype))
                    if not np.array_equal(total, expected(number, given.workers, values, given.dtype)):
                        sys.exit(f"round {number} is wrong")
                    digest.update(total.tobytes())
                    if number == 0:
                        print("running", flush=True)
                again = client.packets_sent_again
        except AggregationError as error:
            print(error, file=sys.stderr)
            continue
        done = {"rounds": given.rounds, "attempts": attempt, "sent_again": again, "hash": digest.hexdigest()}
        print(json.dumps(done))
        return
    sys.exit("no attempt succeeded")


if __name__ == "__main__":
    main()
