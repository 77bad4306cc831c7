"""Request-level states: they can be reused only at the exact length at which they were stored."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.control import Control, ControlSpec
from kvroute.prefix import StateIndex
from kvroute.topology import build, two_datacenters
from kvroute.topology.schema import InstanceDefaults
from kvroute.types import Arrived, Finished, KvCleared, KvEvicted, KvStored, Prefill, Request
from kvroute_engine.files.units import Size

INSTANCES = 3
CHAINS = st.lists(st.integers(0, 1), max_size=4).map(lambda steps: chain(*steps))
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "clear"]), st.integers(0, INSTANCES - 1), CHAINS, st.integers(0, 6)),
    max_size=20,
)


def chain(*steps: int) -> tuple[int, ...]:
    """Return chained hashes: an equal number means an equal prefix."""
    hashes, last = [], 1
    for step in steps:
        last = hash((last, step))
        hashes.append(last)
    return tuple(hashes)


@given(STEPS, CHAINS, st.lists(st.integers(0, 6), min_size=INSTANCES, max_size=INSTANCES))
def test_a_match_is_the_deepest_stored_state(
    steps: list[tuple[str, int, tuple[int, ...], int]], query: tuple[int, ...], limits: list[int]
) -> None:
    """The match equals that of a plain set of whole prefixes, for any stores, evictions and clears."""
    index, kept = StateIndex(INSTANCES), [set[tuple[int, ...]]() for _ in range(INSTANCES)]
    for action, instance, blocks, keep in steps:
        if action == "store":
            index.store(instance, blocks)
            kept[instance] |= {blocks} - {()}
        elif action == "evict":
            index.evict(instance, blocks, keep)
            kept[instance] -= {blocks[:depth] for depth in range(keep + 1, len(blocks) + 1)}
        else:
            index.clear(instance)
            kept[instance].clear()
    depths = np.minimum(np.array(limits), len(query))
    deepest = [
        max((len(prefix) for prefix in held if prefix == query[: len(prefix)] and len(prefix) <= depth), default=0)
        for held, depth in zip(kept, depths.tolist(), strict=True)
    ]
    assert index.match(query, depths).tolist() == deepest


def core(model: str) -> tuple[Control, str]:
    """Return a core over two sites, and the name of its first prefill instance at home."""
    defaults = InstanceDefaults(model=model, tp=4, kv_capacity_bytes=Size(180e9))
    cluster = build(two_datacenters(prefill_nodes=1, local_prefill_nodes=1, decode_nodes=1, defaults=defaults))
    name = next(i.name for i in cluster.instances if i.role == "prefill" and i.datacenter == "local-site")
    return ControlSpec(decode="foresight", prefill="cache-aware").build(cluster), name


def cached(control: Control, number: int, blocks: tuple[int, ...]) -> int:
    """Return the cached tokens of a new prompt of these blocks and one more token."""
    tokens = 100 * len(blocks) + 1
    request = Request(id=number, input_tokens=tokens, blocks=blocks, block_tokens=100)
    prefill = control.handle(Arrived(0.0, request))[0]
    assert isinstance(prefill, Prefill)
    control.handle(Finished(0.0, number))
    return prefill.cached_tokens


def test_a_hybrid_model_continues_only_from_the_end_of_a_prompt() -> None:
    """The next turn reuses the whole previous turn; a prompt that shares half of it reuses nothing, unlike with a dense
    model."""
    turn, half = chain(0, 0, 0, 0), chain(0, 0, 1, 1)
    for model, of_half in (("prfaas-1t-hybrid", 0), ("llama-3-70b", 200)):
        control, instance = core(model)
        control.handle(KvStored(0.0, instance, turn, 100))
        assert cached(control, 1, chain(0, 0, 0, 0, 2)) == 400
        assert cached(control, 2, half) == of_half
        control.handle(KvEvicted(0.0, instance, turn, 3))
        assert cached(control, 3, chain(0, 0, 0, 0, 2)) == (0 if model == "prfaas-1t-hybrid" else 300)
        # A longer prompt stores the blocks again, but keeps a state only at its own end.
        control.handle(KvStored(0.0, instance, chain(0, 0, 0, 0, 5), 100))
        assert cached(control, 5, chain(0, 0, 0, 0, 2)) == (0 if model == "prfaas-1t-hybrid" else 400)
        control.handle(KvStored(0.0, instance, turn, 100))
        control.handle(KvCleared(0.0, instance))
        assert cached(control, 4, turn) == 0
