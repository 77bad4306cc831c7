"""A buffer server and workers over loopback: blocks written by one worker are read into the buffer and loaded by
another, byte for byte; order, room, damage, and a server that dies."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
import uvloop
from engine.tests.connector.loopback import WAIT_S, Cache, FencedRegion
from tests.waiting import until

from kvroute_engine.block_keys import NO_PARENT, block_keys
from kvroute_engine.block_store.interface import StoreError
from kvroute_engine.block_store.location import StoreLocation
from kvroute_engine.buffer import BufferServer, BufferSpec
from kvroute_engine.buffer.arena import Arena
from kvroute_engine.connector.blocks import Region
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.storage.loads import LoadPart, StagedLoad
from kvroute_engine.connector.storage.plan import StorageStep
from kvroute_engine.connector.storage.worker import StorageWorker
from kvroute_engine.connector.storage.write_back import BlockWrite, Writes
from kvroute_engine.errors import InputError
from kvroute_engine.timed_connection import ConnectionLimits

LAYERS, LAYER_BYTES, BLOCK_TOKENS = 3, 512, 32
BLOCK_BYTES = LAYERS * LAYER_BYTES
OPTIONS = ConnectorSettings(token="secret", timeout_s=5.0)
TOKENS = list(range(10 * BLOCK_TOKENS))
KEYS = block_keys(TOKENS, BLOCK_TOKENS)


@dataclass
class Node:
    """A buffer server and a session for its HTTP port."""

    server: BufferServer
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
        """Return the status and the document of a response."""
        data = msgspec.json.encode(body) if body else None
        async with self.session.request(method, f"{self.server.url}/v1/kv/reads{path}", data=data) as response:
            text = await response.read()
            return response.status, msgspec.json.decode(text) if text else None

    async def read(self, name: str, keys: Sequence[bytes], **more: Any) -> tuple[int, Any]:
        """Order a read."""
        return await self.call("POST", id=name, keys=[key.hex() for key in keys], **more)

    async def state(self) -> dict[str, int]:
        """Return the state of the buffer."""
        _, state = await self.call("GET")
        return dict(state)


@asynccontextmanager
async def node(
    store: Path, *, blocks: int = 100, options: ConnectorSettings = OPTIONS, location: StoreLocation | None = None
) -> AsyncIterator[Node]:
    """Run a buffer server with room for `blocks` blocks."""
    where = location or StoreLocation(str(store), 10_000_000)
    server = BufferServer(BufferSpec(location=where, quota_bytes=blocks * BLOCK_BYTES, options=options))
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Node(server, session)
    finally:
        await server.close()


class Engine:
    """The storage worker of an engine whose cache has random or no content."""

    def __init__(self, address: str, seed: int | None = None, passed: list[str] | None = None, **options: Any) -> None:
        """Args: `passed`: the cache is used only after a fence, which is noted here."""
        self.cache = Cache(LAYERS, LAYER_BYTES, seed=seed)
        layers = {f"layer{at}": [at] for at in range(LAYERS)}
        chosen = msgspec.structs.replace(OPTIONS, buffer=address, **options)
        regions: Sequence[Region] = self.cache.regions
        fence = None
        if passed is not None:
            regions, fence = (
                [FencedRegion(region, passed) for region in self.cache.regions],
                partial(passed.append, "passed"),
            )
        self.worker = StorageWorker(regions, self.cache.layout, chosen, layers, lambda: fence, environ={})

    async def write(self, keys: Sequence[bytes], blocks: Sequence[int], parent: bytes = NO_PARENT) -> set[bytes]:
        """Write blocks back, as after a step, and wait until that is over. Return the stored ones."""
        parents = [parent, *keys]
        writes = [BlockWrite(*parts) for parts in zip(keys, parents, blocks, strict=False)]
        self.worker.begin(StorageStep(number=1, writes=[Writes("r", tuple(writes), ends=True)]))
        assert self.worker.ended() == {"r"}
        self.worker.finish()
        stored: set[bytes] = set()

        def settled() -> bool:
            report = self.worker.written()
            stored.update(report.keys if report else ())
            return report is not None and report.settled_number == 1

        await until(settled)
        return stored

    async def load(self, data: str, read_id: str, blocks: Sequence[int], first: int = 0, key: bytes = KEYS[-1]) -> None:
        """Load a read into blocks, waiting for each layer, as a step does."""
        part = LoadPart(data, read_id, first, tuple(blocks), key.hex())

        def step() -> None:
            self.worker.begin(StorageStep(loads=[StagedLoad("r", (part,), 1)]))
            for at in range(LAYERS):
                self.worker.wait_for_layer(f"layer{at}")
            self.worker.finish()

        await asyncio.to_thread(step)

    def content(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the content of blocks."""
        return [b"".join(self.cache.block(layer, block) for layer in range(LAYERS)) for block in blocks]


def run(main: Callable[[], Any]) -> None:
    uvloop.run(main())


def test_blocks_are_copied_after_the_device_s_work_with_them(tmp_path: Path) -> None:
    """Blocks to write are read, and loaded blocks are written, after a fence behind the steps before."""

    async def main() -> None:
        async with node(tmp_path) as here:
            passed: list[str] = []
            writer, loader = Engine(here.server.data, seed=1, passed=passed), Engine(here.server.data, passed=passed)
            try:
                assert await writer.write(KEYS[:2], [3, 1]) == set(KEYS[:2])
                _, found = await here.read("a", KEYS[:2])
                passed.clear()
                await loader.load(found["data"], "a", [5, 6], key=KEYS[1])
                assert not loader.worker.failed_blocks()
                assert loader.content([5, 6]) == writer.content([3, 1])
            finally:
                writer.worker.close()
                loader.worker.close()

    run(main)


def test_written_blocks_are_read_and_loaded_byte_for_byte(tmp_path: Path) -> None:
    """Every block, in order, into other block numbers; the buffer is free afterwards."""

    async def main() -> None:
        async with node(tmp_path) as here:
            writer, loader = Engine(here.server.data, seed=1), Engine(here.server.data)
            try:
                sources, targets = list(range(10)), [20, 3, 4, 5, 11, 9, 0, 1, 2, 22]
                assert await writer.write(KEYS, sources) == set(KEYS)
                status, found = await here.read("a", KEYS)
                assert (status, found["blocks"], found["bytes"]) == (200, 10, 10 * BLOCK_BYTES)
                assert (await here.state())["buffered_bytes"] == 10 * BLOCK_BYTES
                await loader.load(found["data"], "a", targets)
                assert not loader.worker.failed_blocks()
                assert loader.content(targets) == writer.content(sources)
                await buffer_is_free(here)
                assert (await here.state())["read_bytes"] == 10 * BLOCK_BYTES
            finally:
                writer.worker.close()
                loader.worker.close()

    run(main)


async def buffer_is_free(here: Node) -> None:
    """Wait until no read has room in the buffer."""
    while (await here.state())["buffered_bytes"]:
        await asyncio.sleep(0.01)


def test_a_part_of_a_read_is_loaded_if_the_engine_has_its_beginning(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as here:
            engine = Engine(here.server.data, seed=1)
            loader = Engine(here.server.data)
            try:
                await engine.write(KEYS, range(10))
                _, found = await here.read("a", KEYS)
                await loader.load(found["data"], "a", [7, 8, 9], first=7)
                assert loader.content([7, 8, 9]) == engine.content([7, 8, 9])
                assert loader.content(range(7)) == [bytes(BLOCK_BYTES)] * 7
                await buffer_is_free(here)
            finally:
                engine.worker.close()
                loader.worker.close()

    run(main)


def test_a_second_instance_waits_for_the_parent_of_its_blocks(tmp_path: Path) -> None:
    """The decode instance's blocks arrive first; they are stored after the prefill instance's."""

    async def main() -> None:
        async with node(tmp_path) as here:
            prefill, decode = Engine(here.server.data, seed=1), Engine(here.server.data, seed=2)
            try:
                later = asyncio.ensure_future(decode.write(KEYS[6:], range(6, 10), parent=KEYS[5]))
                await until(lambda: not decode.worker.idle)  # queued
                await prefill.write(KEYS[:6], range(6))
                assert await later == set(KEYS[6:])
                _, found = await here.read("a", KEYS)
                assert found["blocks"] == 10
            finally:
                prefill.worker.close()
                decode.worker.close()

    run(main)


def test_blocks_that_are_stored_are_not_sent_again(tmp_path: Path) -> None:
    """Neither by the instance that wrote them, which does not even copy them, nor by another one."""

    async def main() -> None:
        async with node(tmp_path) as here:
            first, second = Engine(here.server.data, seed=1), Engine(here.server.data, seed=2)
            try:
                assert await first.write(KEYS, range(10)) == set(KEYS)
                assert await first.write(KEYS, range(10)) == set(KEYS)
                assert await second.write(KEYS, range(10)) == set(KEYS)
                _, found = await here.read("a", KEYS)
                await second.load(found["data"], "a", range(10))
                assert second.content(range(10)) == first.content(range(10))
            finally:
                first.worker.close()
                second.worker.close()

    run(main)


def test_blocks_beyond_the_memory_for_writing_are_not_stored(tmp_path: Path) -> None:
    """The first ones are, so that what is stored is a prefix; the others follow when they are written again."""

    async def main() -> None:
        async with node(tmp_path) as here:
            engine = Engine(here.server.data, seed=1, write_back_bytes=4 * BLOCK_BYTES)
            try:
                assert await engine.write(KEYS, range(10)) == set(KEYS[:4])
                assert await engine.write(KEYS, range(10)) == set(KEYS[:8])
                assert (await here.read("a", KEYS))[1]["blocks"] == 8
            finally:
                engine.worker.close()

    run(main)


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_block_ends_the_read_unless_checksums_are_off(tmp_path: Path, verify: bool) -> None:
    async def main() -> None:
        location = StoreLocation(str(tmp_path), 10_000_000, verify=verify)
        async with node(tmp_path, location=location) as here:
            engine = Engine(here.server.data, seed=1)
            try:
                await engine.write(KEYS, range(10))
                (path,) = [path for path in tmp_path.glob("*/blocks/*/*") if path.name == KEYS[4].hex()]
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
                _, found = await here.read("a", KEYS)
                assert found["blocks"] == (4 if verify else 10)
                assert found["bytes"] == found["blocks"] * BLOCK_BYTES
                assert (await here.state())["buffered_bytes"] == found["bytes"]
            finally:
                engine.worker.close()

    run(main)


def test_reads_wait_for_room_first_in_first_out(tmp_path: Path) -> None:
    """Released by the router or by an engine; a read that waits can be cancelled; one that never fits is rejected."""

    async def main() -> None:
        async with node(tmp_path, blocks=10) as here:
            engine = Engine(here.server.data, seed=1)
            try:
                await engine.write(KEYS, range(10))
                assert (await here.read("a", KEYS[:6], wait="room")) == (202, {"id": "a", "blocks": 6})
                assert (await here.call("GET", "/a"))[1]["blocks"] == 6
                waiting = asyncio.ensure_future(here.read("b", KEYS[:8]))
                await becomes(here, "queued_bytes", 8 * BLOCK_BYTES)
                behind = asyncio.ensure_future(here.read("c", KEYS[:2]))
                await becomes(here, "queued_bytes", 10 * BLOCK_BYTES)
                assert (await here.read("b", KEYS))[0] == 409
                await here.call("DELETE", "/b")
                assert (await waiting)[0] == 404
                assert (await behind)[1]["blocks"] == 2
                await here.call("DELETE", "/a")
                await engine.load(here.server.data, "c", [0, 1], key=KEYS[1])
                await becomes(here, "buffered_bytes", 0)
                status, error = await here.read("d", [*KEYS, b"1" * 16], wait="room")
                assert status == 202, error  # the last key is not stored
                assert (await here.call("GET", "/e"))[0] == 404
            finally:
                engine.worker.close()

    run(main)


async def becomes(here: Node, field: str, value: int) -> None:
    """Wait until the state has this value."""
    while (await here.state())[field] != value:
        await asyncio.sleep(0.01)


def test_bad_requests_get_one_sentence(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, blocks=3) as here:
            status, document = await here.read("a", KEYS)
            assert status == 503
            assert document["error"]["message"].startswith("no engine has connected to this buffer server yet")
            engine = Engine(here.server.data, seed=1)
            try:
                await engine.write(KEYS, range(10))
                status, document = await here.read("a", KEYS)
                assert status == 413
                assert "10 blocks are more than the 3 of the buffer" in document["error"]["message"]
                assert (await here.call("POST", id="a b", keys=[]))[0] == 400
                assert (await here.call("POST", id="a", keys=["xyz"]))[0] == 400
                assert (await here.call("PUT", "/a"))[0] == 404
                page = {"Origin": "http://elsewhere.example"}
                async with here.session.get(f"{here.server.url}/v1/kv/reads", headers=page) as response:
                    assert response.status == 403
            finally:
                engine.worker.close()

    run(main)


def test_an_engine_with_another_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a running buffer server, and by one that is started again on the store."""

    async def refused(here: Node, reason: str) -> None:
        caplog.clear()
        other = engine_with(here, model="other")
        try:
            assert await other.write(KEYS, range(10)) == set()
            assert reason in caplog.text
        finally:
            other.worker.close()

    async def main() -> None:
        async with node(tmp_path) as here:
            engine = Engine(here.server.data, seed=1)
            await engine.write(KEYS, range(10))
            engine.worker.close()
            await refused(here, "model is tiny here and other there")
        async with node(tmp_path) as here:
            await refused(here, "the store has blocks of another format")

    run(main)


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("/proc/kvroute", "/proc/kvroute: the store cannot be written"),
        (
            "ftp://host/x",
            "ftp://host/x: ftp:// is not a known kind of store; write a folder, or a URL that begins with",
        ),
        ("s3:///prefix", "s3:///prefix: the bucket is missing; write s3://bucket/prefix"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_sentence(location: str, sentence: str) -> None:
    with pytest.raises(StoreError, match="^" + sentence):
        BufferServer(BufferSpec(location=StoreLocation(location, 10**6), quota_bytes=1, options=OPTIONS))


def test_a_load_from_a_server_that_dies_fails_its_blocks(tmp_path: Path) -> None:
    """The engine then computes them, and skips the write-back of blocks that were computed from them."""

    async def main() -> None:
        async with node(tmp_path) as here:
            engine = Engine(here.server.data, seed=1, timeout_s=1.0)
            await engine.write(KEYS, range(10))
            data = here.server.data
        try:
            await engine.load(data, "a", [3, 4])
            assert engine.worker.failed_blocks() == {3, 4}
            assert engine.worker.failed_blocks() == set()
            (result,) = engine.worker.results()
            assert result.failure == "refused"
            fresh = block_keys(TOKENS[::-1], BLOCK_TOKENS)
            writes = Writes("r", (BlockWrite(fresh[0], NO_PARENT, 3),), ends=True)
            for _ in range(2):
                engine.worker.begin(StorageStep(number=2, writes=[writes]))
                engine.worker.finish()
                assert engine.worker.ended() == {"r"}
                assert engine.worker.idle
        finally:
            engine.worker.close()

    run(main)


def test_a_read_of_another_prompt_is_not_loaded(tmp_path: Path) -> None:
    """The engine names the key of the last block that it expects."""

    async def main() -> None:
        async with node(tmp_path) as here:
            engine = Engine(here.server.data, seed=1)
            try:
                await engine.write(KEYS, range(10))
                await here.read("a", KEYS)
                await engine.load(here.server.data, "a", range(10), key=KEYS[3])
                assert engine.worker.failed_blocks() == set(range(10))
            finally:
                engine.worker.close()

    run(main)


def test_all_ranks_must_have_a_block(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with its own part of every block."""

    async def main() -> None:
        async with node(tmp_path) as here:
            engines = [engine_with(here, rank + 1, tp=2, rank=rank) for rank in range(2)]
            try:
                await engines[0].write(KEYS, range(10))
                assert (await here.read("a", KEYS))[0] == 503
                await engines[1].write(KEYS[:4], range(4))
                _, found = await here.read("a", KEYS)
                assert (found["blocks"], found["bytes"]) == (4, 2 * 4 * BLOCK_BYTES)
                before = [engine.content(range(4)) for engine in engines]
                for engine in engines:
                    await engine.load(found["data"], "a", [20, 21, 22, 23], key=KEYS[3])
                assert [engine.content([20, 21, 22, 23]) for engine in engines] == before
                await buffer_is_free(here)
            finally:
                for engine in engines:
                    engine.worker.close()

    run(main)


def engine_with(here: Node, seed: int = 1, **layout: Any) -> Engine:
    """Return an engine whose layout differs in some fields."""
    engine = Engine(here.server.data, seed=seed)
    engine.worker.close()
    layers = {f"layer{at}": [at] for at in range(LAYERS)}
    options = msgspec.structs.replace(OPTIONS, buffer=here.server.data)
    changed = msgspec.structs.replace(engine.cache.layout, **layout)
    engine.worker = StorageWorker(engine.cache.regions, changed, options, layers, environ={})
    return engine


def test_a_read_waits_until_every_rank_has_room(tmp_path: Path) -> None:
    """The ranks load at their own pace, so one of them may have room earlier."""

    async def main() -> None:
        async with node(tmp_path, blocks=10) as here:
            engines = [engine_with(here, rank + 1, tp=2, rank=rank) for rank in range(2)]
            try:
                for engine in engines:
                    await engine.write(KEYS[:5], range(5))
                _, found = await here.read("a", KEYS[:5])
                assert found["blocks"] == 5
                await engines[0].load(found["data"], "a", range(10, 15), key=KEYS[4])
                await becomes(here, "buffered_bytes", 5 * BLOCK_BYTES)
                waiting = asyncio.ensure_future(here.read("b", KEYS[:5]))
                await becomes(here, "queued_bytes", 2 * 5 * BLOCK_BYTES)
                assert not waiting.done()
                await engines[1].load(found["data"], "a", range(10, 15), key=KEYS[4])
                assert (await waiting)[1]["blocks"] == 5
                for engine in engines:
                    await engine.load(found["data"], "b", range(15, 20), key=KEYS[4])
                    assert engine.content(range(15, 20)) == engine.content(range(5))
                await buffer_is_free(here)
            finally:
                for engine in engines:
                    engine.worker.close()

    run(main)


def locked_bytes() -> int:
    """Return the locked memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("VmLck:")]
    return int(line.split()[1]) * 1024


def test_slots_are_locked_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked with the kernel's count. A limit that is too low is one sentence before any engine connects."""
    before = locked_bytes()
    arena = Arena(2, 4096, 64 * 8192, locked=True)
    assert locked_bytes() - before >= 64 * 8192
    assert arena.slots == 64
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    location = StoreLocation(str(tmp_path), 10**6)
    settings = BufferSpec(location=location, quota_bytes=10**6, lock_memory=True, options=OPTIONS)
    with pytest.raises(InputError, match=r"^--lock-memory: at most 65536 bytes of memory may be locked, less than the"):
        BufferServer(settings)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/kv/reads HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"])
def test_a_router_that_does_not_send_its_request_is_disconnected(tmp_path: Path, sent: bytes) -> None:
    """A connection without a request, and a request without the rest of its body."""
    location = StoreLocation(str(tmp_path), 10**6)
    limits = ConnectionLimits(request_s=0.2, idle_s=WAIT_S)
    settings = BufferSpec(location=location, quota_bytes=10**6, options=OPTIONS, limits=limits)

    async def main() -> None:
        server = BufferServer(settings)
        await server.start()
        try:
            address = urlsplit(server.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(sent)
            async with asyncio.timeout(WAIT_S):
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        finally:
            await server.close()

    asyncio.run(main())
