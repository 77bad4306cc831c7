"""The stream that workers of one machine share: every entry reaches all of them, in one order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.waiting import HANGS_S, until

from kvroute.serve.replication.local_stream import LocalStream
from kvroute.serve.replication.stream import StreamError
from kvroute.serve.workers.stream_server import StreamServer


async def entries(stream: LocalStream, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [entry for _, entry in await stream.read("")]
    return found


def test_all_workers_read_all_entries_in_one_order(tmp_path: Path) -> None:
    """Their own ones too."""

    async def scenario() -> None:
        server = StreamServer()
        await server.start(tmp_path / "stream")
        streams = [LocalStream(tmp_path / "stream") for _ in range(3)]
        for stream in streams:
            await stream.open()
        await until(lambda: server.connections == 3)
        sizes = [0, 1, 300_000]

        async def write(number: int) -> None:
            for size in sizes:
                await streams[number].append(b"%d" % number + bytes(size))

        reading = [asyncio.create_task(entries(stream, 9)) for stream in streams]
        await asyncio.gather(*(write(number) for number in range(3)))
        first, *others = await asyncio.gather(*reading)
        assert all(other == first for other in others)
        for number in range(3):
            assert [len(entry) - 1 for entry in first if entry.startswith(b"%d" % number)] == sizes
        for stream in streams:
            await stream.close()
        await until(lambda: server.connections == 0)
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_the_end_of_the_server_is_an_error_and_another_one_serves(tmp_path: Path) -> None:
    """A worker connects again; entries from before do not come again."""

    async def scenario() -> None:
        path = tmp_path / "stream"
        stream = LocalStream(path)
        with pytest.raises(StreamError, match="does not answer"):
            await stream.open()
        for turn in range(2):
            server = StreamServer()
            await server.start(path)
            await stream.open()
            await stream.append(b"%d" % turn)
            assert await entries(stream, 1) == [b"%d" % turn]
            await server.close()
            with pytest.raises(StreamError, match="has ended"):
                await stream.read("")
            await stream.close()
            path.unlink(missing_ok=True)

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_a_worker_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    """The others are served on."""

    async def scenario() -> None:
        server = StreamServer(unread_max_bytes=1 << 20)
        await server.start(tmp_path / "stream")
        stuck, well = LocalStream(tmp_path / "stream"), LocalStream(tmp_path / "stream")
        await stuck.open()
        await well.open()
        await until(lambda: server.connections == 2)
        sent = 0
        while server.connections == 2:
            await well.append(bytes(1 << 20))
            sent += 1
            assert len(await entries(well, 1)) == 1
        assert sent > 1
        await well.close()
        await stuck.close()
        await server.close()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))
