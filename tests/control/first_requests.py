"""Usage: python -m tests.control.first_requests POLICY...; prints the kernels that are compiled, or loaded from the
cache, during the first requests after the warm-up, by policy and case, as JSON.

Each policy has a process of its own, forked before any kernel is compiled.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from numba.core.dispatcher import Dispatcher
from tests.control.churn_rig import base, engine, join
from tests.control.live_rig import cluster_of, request

from kvroute.control import Control, ControlSpec
from kvroute.topology import Cluster
from kvroute.types import (
    Admitted,
    Arrived,
    Decode,
    Finished,
    InputError,
    KvStored,
    Prefill,
    PrefillFinished,
    TransferFinished,
)

CONSTRAINTS = ("pod:required", "node:required", "rack:preferred:0.5", "rack:fallback", "")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overcommit": {"overcommit": True, "reserve_bytes": 1e6},
    "layerwise": {"layerwise": True},
    "pool": {"prefix_pool": True},
    "sessions": {"session_bonus_s": 0.5, "adapters": {"poet": 1.0}, "predicts": True},
    "bounded": {"cache_block_tokens": 16, "slow_start_s": 10.0, "prefill": "cache-aware"},
    "no-cache": {"prefill_cache": False, "prefill": "round-robin"},
}
LISTED: dict[str, Cluster] = {
    "apart": cluster_of("vp0", "vd1"),
    "near": cluster_of("vp0", "vp1", "vd0", "vd1", "vd2"),
    "both": cluster_of("vb0", "vb1", "sp2", "sd3", "vd1"),
}


def cases() -> Iterator[tuple[str, ControlSpec, Cluster]]:
    """Yield the cases without the policy, those first whose warm-up reaches least by chance."""
    empty = base()
    for constraint in CONSTRAINTS:
        yield f"discovered {constraint}", ControlSpec(constraint=constraint), empty
    for place, cluster in LISTED.items():
        for constraint in CONSTRAINTS:
            yield f"{place} {constraint}", ControlSpec(constraint=constraint), cluster
    for name, options in OPTIONS.items():
        yield f"near {name}", msgspec.structs.replace(ControlSpec(), **options), LISTED["near"]


def serve(control: Control) -> None:
    """Let the first requests arrive, and move them on."""
    instances = [instance.name for instance in control.cluster.instances]
    for number in range(1, 7):
        decisions = control.handle(
            Arrived(float(number), request(number, 1_000, 64, blocks=(1, 2, 3), session=number % 2))
        )
        if any(isinstance(decision, Prefill) for decision in decisions):
            decisions = (*decisions, *control.handle(PrefillFinished(number + 0.1, number)))
        if any(isinstance(decision, Decode) for decision in decisions):
            with suppress(InputError):  # served alone, or on the same instance
                control.handle(TransferFinished(number + 0.2, number))
            control.handle(Admitted(number + 0.3, number))
            if number % 2:
                control.handle(Finished(number + 0.4, number, output_tokens=8))
        control.handle(KvStored(number + 0.5, instances[number % len(instances)], (1, 2, 3)))


def signatures() -> Counter[str]:
    """Return the number of types of arguments for which each kernel is ready."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("kvroute.")]
    kernels = {
        id(kernel): kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, Dispatcher)
    }
    return Counter({kernel.py_func.__qualname__: len(kernel.signatures) for kernel in kernels.values()})


def compiled_at_first_use(policy: str) -> dict[str, list[str]]:
    """Return the kernels by case, for the cases that have any."""
    found = {}
    for name, spec, cluster in cases():
        spec = msgspec.structs.replace(spec, decode=policy)
        spec.warm_up(cluster)
        control, before = spec.build(cluster), signatures()
        if not cluster.instances:
            join(control, 0.0, engine("p0", "prefill"), engine("p1", "prefill", 1), engine("d0"), engine("d1", node=3))
        serve(control)
        if kernels := signatures() - before:
            found[name] = sorted(kernels.elements())
    return found


def main(policies: list[str]) -> None:
    """Print the result."""
    results: dict[str, dict[str, list[str]]] = {}
    for policy in policies:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writer, "w") as pipe:
                json.dump(compiled_at_first_use(policy), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        assert os.waitpid(child, 0)[1] == 0, policy
        results[policy] = json.loads(text)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
