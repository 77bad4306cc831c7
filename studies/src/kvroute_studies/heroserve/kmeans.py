"""Child process of `paper_grouping`: clusters of equal size by k-means-constrained.

It runs in its own process, because OR-tools and other builds of the HiGHS solver cannot be loaded into one process.
Standard input: a .npz with `distances` [n, n] and `size`; standard output: a .npy with the cluster of each point, [n].
"""

from __future__ import annotations

import io
import sys

import numpy as np

_SEED = 15


def main() -> int:
    """Run once; return 3 if k-means-constrained is not installed."""
    try:
        from k_means_constrained import KMeansConstrained
    except ImportError:
        return 3
    given = np.load(io.BytesIO(sys.stdin.buffer.read()))
    distances, size = given["distances"], int(given["size"])
    clusters = len(distances) // size
    exact = size if len(distances) == clusters * size else None
    solver = KMeansConstrained(clusters, size_min=size, size_max=exact, n_init=3, max_iter=50, random_state=_SEED)
    out = io.BytesIO()
    np.save(out, solver.fit_predict(distances / max(distances.max(), 1e-12)).astype(np.int64))
    sys.stdout.buffer.write(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
