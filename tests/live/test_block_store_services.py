"""The block store in real Redis and in an S3 server (moto): the same laws for both."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from engine.tests.block_store.blocks import ALL, FORMAT, chain, content
from tests.live.services import free_port, missing, required, started
from tests.waiting import until

from kvroute_engine.block_store import BlockFormat, BlockStore, StoreError

pytestmark = pytest.mark.live
Opened = Callable[[BlockFormat], BlockStore]


def needs(module: str) -> None:
    """Require a Python package of the extra `store`, or of the live tests."""
    if importlib.util.find_spec(module) is None:
        missing(f"there is no {module}; run `make live`")


@pytest.fixture(params=["redis", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Yield what opens the store of a fresh server."""
    with {"redis": redis_server, "s3": s3_server}[request.param](tmp_path, monkeypatch) as opens:
        yield opens


@contextmanager
def redis_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Run Debian's Redis on a Unix socket."""
    needs("redis")
    from kvroute_engine.block_store.redis_backend import redis_store

    socket = folder / "socket"
    program = required("redis-server", "redis-server")
    command = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    with started(command, "eady to accept connections"):
        yield lambda form: redis_store(f"unix://{socket}", "kv:", form)


@contextmanager
def s3_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Run moto's S3 server with an empty bucket."""
    needs("obstore")
    needs("moto")
    from kvroute_engine.block_store.s3_backend import s3_store

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            env=dict(os.environ),
        )
    try:
        asyncio.run(until(lambda: answers(url)))
        urllib.request.urlopen(urllib.request.Request(f"{url}/blocks", method="PUT"), timeout=60).close()
        yield lambda form: s3_store("blocks", "kv", form, endpoint=url)
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Return whether a server accepts requests there."""
    with suppress(OSError):
        urllib.request.urlopen(url, timeout=60).close()
        return True
    return False


def test_blocks_layers_and_formats(opened: Opened) -> None:
    """Blocks and layers are those that were written; a gap ends a match; another model is refused."""
    store = opened(FORMAT)
    keys = chain("a", 4)
    assert store.match(keys) == 0
    assert not store.write(keys[1], keys[0], memoryview(content(keys[1])))
    for at, key in enumerate(keys[:3]):
        assert store.write(key, keys[at - 1] if at else b"", memoryview(content(key)))
    again = opened(FORMAT)
    assert again.match(keys) == 3
    for layers in (ALL, range(1, 2), range(1, 3)):
        size = len(layers) * FORMAT.layer_bytes
        start = layers.start * FORMAT.layer_bytes
        into = memoryview(bytearray(size * 4))
        assert again.read(keys, layers, into) == 3
        assert into[: 3 * size] == b"".join(content(key)[start : start + size] for key in keys[:3])
    with pytest.raises(StoreError, match="another format"):
        opened(BlockFormat("other", 3, 4, 4000))
