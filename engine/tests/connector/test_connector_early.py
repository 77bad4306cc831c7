"""A prompt that is pulled while it is computed: scheduler and worker of two instances over loopback, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from engine.tests.connector.loopback import WAIT_S, Cache, Clock

from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.scheduler import ConnectorScheduler
from kvroute_engine.connector.worker import CHECK_S, ConnectorWorker


class Pair:
    """Scheduler and worker of a prefill and a decode instance, and a router that gives a prompt of 40 tokens the ID
    `t`."""

    def __init__(self, stack: ExitStack) -> None:
        self.prompt, self.ask = list(range(40)), {"do_remote_decode": True, "transfer_id": "t"}
        self.source, self.target, self.clock = Cache(2, 64, seed=10), Cache(2, 64), Clock()
        options = ConnectorSettings(layerwise=True, instance="prefill0")
        layers = {"l0": [0], "l1": [1]}
        self.prefill = ConnectorWorker(
            self.source.regions,
            self.source.layout,
            options,
            consumer=False,
            layers=layers,
            clock=self.clock,
            environ={},
        )
        stack.callback(self.prefill.close)
        decode = ConnectorSettings(instance="decode0")
        self.decode = ConnectorWorker(self.target.regions, self.target.layout, decode, producer=False, environ={})
        stack.callback(self.decode.close)
        assert self.prefill.address is not None
        self.there = ConnectorScheduler(options, engine_id="p", block_tokens=16)
        self.there.listening({0: self.prefill.address})
        self.here = ConnectorScheduler(decode, engine_id="d", block_tokens=16)

    def announce(self, prompt: list[int]) -> None:
        """Let the decode instance pull a prompt that its partner should compute."""
        assert self.prefill.address is not None
        host, port = self.prefill.address
        params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": host, "remote_port": port}
        self.here.arrived("d", params | {"remote_instance": "prefill0"}, prompt)
        self.here.allocated("d", 40, [10, 11, 12], self.here.matched("d", 40, 0))
        self.decode.begin(self.here.take())

    def compute(self, tokens: int, layers: tuple[str, ...] = ("l0", "l1")) -> None:
        """Run one step of the prefill instance."""
        self.there.scheduled("p", [3, 4, 5][: -(-tokens // 16)], tokens)
        step = self.there.take()
        self.prefill.overwrites(step)
        for layer in layers:
            self.prefill.computed(step, layer)
        self.prefill.begin(step)

    def finish(self) -> None:
        """Finish the prompt on the prefill instance."""
        self.there.finished("p", self.ask, self.prompt, completed=True, computed_tokens=40, blocks=[3, 4, 5])
        self.prefill.begin(self.there.take())

    def received(self) -> None:
        """Wait until the decode instance has received the prompt or reports a failure."""
        deadline = time.monotonic() + WAIT_S
        while self.decode.ended()[1] != {"d"}:
            assert time.monotonic() < deadline

    def arrived(self, layer: int) -> bool:
        """Return whether all blocks of a layer are at their positions."""
        pairs = zip((3, 4, 5), (10, 11, 12), strict=True)
        return all(self.target.block(layer, here) == self.source.block(layer, there) for there, here in pairs)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A pair whose prefill instance will compute the prompt."""
    with ExitStack() as stack:
        made = Pair(stack)
        made.there.arrived("p", made.ask, made.prompt)
        yield made


def test_prefill_and_transfer_overlap_between_two_instances(pair: Pair) -> None:
    """The transfer is complete before the prompt is finished. It is counted as early, and the kernel counts the bytes
    sent."""
    pair.announce(pair.prompt)
    pair.compute(20)
    pair.compute(40)
    pair.received()
    assert (pair.arrived(0), pair.arrived(1)) == (True, True)
    assert pair.decode.failed_blocks() == set()
    counts = pair.decode.counts()
    assert (counts["early"], counts["early_bytes"]) == ({"prefill0": 1}, {"prefill0": 6 * 64})
    assert (counts["transfers"], counts["failures"]) == ({}, {})
    assert pair.prefill.counts()["sent"] == {}  # the last sample is too recent
    pair.clock.now += CHECK_S
    assert pair.prefill.counts()["sent"]["decode0"]["nbytes"] >= 6 * 64
    assert pair.prefill.ended() == (set(), set())
    pair.finish()
    deadline = time.monotonic() + WAIT_S
    while pair.prefill.ended()[0] != {"p"}:
        assert time.monotonic() < deadline


def test_a_pull_of_another_prompt_fails(pair: Pair) -> None:
    """The tokens of the request on the decode instance differ from those on the prefill instance."""
    pair.announce([*pair.prompt[1:], 7])
    pair.compute(40)
    pair.received()
    assert pair.decode.counts()["failures"] == {"prefill0": {"prompt": 1}}
    assert pair.decode.failed_blocks() == {10, 11, 12}
    assert not pair.target.memory.any()


def test_a_preempted_prompt_is_no_longer_sent(pair: Pair) -> None:
    """The first layer has been sent; then the prompt's blocks belong to another request."""
    pair.announce(pair.prompt)
    pair.compute(40, ("l0",))
    while not pair.arrived(0):
        assert pair.decode.ended() == (set(), set())
    pair.there.preempted("p")
    pair.prefill.overwrites(pair.there.take())
    pair.source.memory[:] = 0
    pair.compute(40)
    pair.received()
    (reason,) = pair.decode.counts()["failures"]["prefill0"]
    assert reason == "gone"
    assert not pair.target.memory[1].any()


def test_a_cancelled_request_ends_its_pull(pair: Pair) -> None:
    """The request's blocks on the decode instance are returned to vLLM long before the wait ends."""
    pair.announce(pair.prompt)
    pair.here.finished("d", {}, pair.prompt, completed=False, computed_tokens=0, blocks=[10, 11, 12])
    pair.decode.begin(pair.here.take())
    pair.received()
    assert pair.decode.counts()["failures"] == {"prefill0": {"cancelled": 1}}


def test_a_prompt_cancelled_during_prefill_ends_its_pull(pair: Pair) -> None:
    """The prompt is cancelled half computed; vLLM gets its blocks back as soon as no thread reads them."""
    pair.announce(pair.prompt)
    pair.compute(20)
    ending = pair.there.finished("p", pair.ask, pair.prompt, completed=False, computed_tokens=20, blocks=[3, 4])
    assert ending.keep
    pair.prefill.begin(pair.there.take())
    pair.received()
    assert pair.decode.counts()["failures"] == {"prefill0": {"gone": 1}}
    deadline = time.monotonic() + WAIT_S
    while pair.prefill.ended()[0] != {"p"}:
        assert time.monotonic() < deadline


def test_a_prompt_cancelled_before_prefill_ends_its_pull(pair: Pair) -> None:
    """The waiting pull ends at once."""
    pair.announce(pair.prompt)
    ending = pair.there.finished("p", pair.ask, pair.prompt, completed=False, computed_tokens=0, blocks=[])
    assert not ending.keep
    pair.prefill.begin(pair.there.take())
    pair.received()
    assert pair.decode.counts()["failures"] == {"prefill0": {"gone": 1}}
