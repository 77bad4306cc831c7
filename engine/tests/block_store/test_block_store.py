"""The block store on files: laws against a dictionary, damage, bad input."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from engine.tests.block_store.blocks import (
    ALL,
    EXTENT_BYTES,
    FORMAT,
    chain,
    content,
    opened,
    write_chain,
    wrong,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.disk import files_no_longer_than

from kvroute_engine.block_store import BlockFormat, PosixStore, PosixStoreSpec, StoreError
from kvroute_engine.block_store.location import StoreLocation

CAPACITY_BLOCKS = 6
CHAINS = {name: chain(name, 4) for name in "abc"}
KEYS = [key for keys in CHAINS.values() for key in keys]
PARENTS = {key: parent for keys in CHAINS.values() for parent, key in zip([b"", *keys], keys, strict=False)}


class StoreAndDictionary(RuleBasedStateMachine):
    """A store and a dictionary from stored keys to times of use, which evicts in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1_000.0
        self.used: dict[bytes, float] = {}
        self.store = self._opened()

    def _opened(self) -> PosixStore:
        capacity = PosixStoreSpec(capacity_bytes=CAPACITY_BLOCKS * EXTENT_BYTES, touch_interval_s=0.0)
        return PosixStore(Path(self.folder.name), FORMAT, capacity, lambda: self.now)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule()
    def restart(self) -> None:
        """A store that is opened again knows blocks and times of use."""
        self.store.close()
        self.store = self._opened()

    @rule(key=st.sampled_from(KEYS))
    def write(self, key: bytes) -> None:
        """A block is stored if its parent is; the least recently used blocks without children make room."""
        self.now += 1
        parent = PARENTS[key]
        expected = key in self.used or parent == b"" or parent in self.used
        if key not in self.used and expected:
            expected = self._evict_for(parent)
            if expected:
                self.used[key] = self.now
        assert self.store.write(key, parent, memoryview(content(key))) == expected

    def _evict_for(self, parent: bytes) -> bool:
        while len(self.used) >= CAPACITY_BLOCKS:
            held = {PARENTS[key] for key in self.used} | {parent}
            free = [(used, key) for key, used in self.used.items() if key not in held]
            if not free:
                return False
            del self.used[min(free)[1]]
        return True

    @rule(name=st.sampled_from(sorted(CHAINS)), length=st.integers(0, 4))
    def match(self, name: str, length: int) -> None:
        """A match counts leading stored blocks and marks them as used."""
        self.now += 1
        keys = CHAINS[name][:length]
        stored = [key for key in keys if key in self.used]
        assert self.store.match(keys) == len(stored)
        self.used.update(dict.fromkeys(stored, self.now))

    @rule(name=st.sampled_from(sorted(CHAINS)), first=st.integers(0, 2), layers=st.integers(1, 3))
    def read(self, name: str, first: int, layers: int) -> None:
        """Layers can be read alone, and a read does not change the order of eviction."""
        asked = range(first, min(first + layers, FORMAT.layers))
        size = len(asked) * FORMAT.layer_bytes
        keys = CHAINS[name]
        into = memoryview(bytearray(size * len(keys)))
        count = self.store.read(keys, asked, into)
        assert count == sum(key in self.used for key in keys)
        for at, key in enumerate(keys[:count]):
            start = asked.start * FORMAT.layer_bytes
            assert into[at * size : (at + 1) * size] == content(key)[start : start + size]

    @invariant()
    def files_fit(self) -> None:
        """The published files fit into the capacity, and stored chains are closed under prefixes."""
        names = {path.name for path in Path(self.folder.name, "blocks").rglob("*") if path.is_file()}
        assert names == {key.hex() for key in self.used}
        assert len(names) <= CAPACITY_BLOCKS
        assert all(PARENTS[key] in self.used or PARENTS[key] == b"" for key in self.used)


TestStoreAndDictionary = StoreAndDictionary.TestCase
TestStoreAndDictionary.settings = settings(max_examples=40, stateful_step_count=30)


@settings(max_examples=60)
@given(at=st.integers(0, EXTENT_BYTES - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_block_is_never_served(at: int, bit: int, cut: bool) -> None:
    """A flipped bit of a checksum, key or layer, or a shorter file, is a miss; the block can be written again."""
    with tempfile.TemporaryDirectory() as name:
        store = opened(Path(name))
        keys = CHAINS["a"]
        assert write_chain(store, keys) == 4
        path = next(Path(name, "blocks").rglob(keys[2].hex()))
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged[:at] if cut else damaged)
        into = memoryview(bytearray(FORMAT.block_bytes * 4))
        count = store.read(keys, ALL, into)
        padding = FORMAT.layers * 8 + 154 + 8 <= at < 4096 and not cut
        assert count == (4 if padding else 2)
        assert wrong(store, keys) == []
        assert write_chain(store, keys) == 4
        assert store.read(keys, ALL, into) == 4
        store.close()


def test_without_verification_a_flipped_byte_is_served(tmp_path: Path) -> None:
    """The control experiment: only the checksums detect this damage."""
    keys = CHAINS["a"]
    store = opened(tmp_path, verify=False)
    write_chain(store, keys)
    path = next((tmp_path / "blocks").rglob(keys[0].hex()))
    path.write_bytes(path.read_bytes()[:-1] + bytes([content(keys[0])[-1] ^ 1]))
    assert wrong(store, keys) == keys[:1]
    store.close()


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path: Path) -> None:
    """The block that did not fit leaves no file, and a later write of it succeeds."""
    keys = CHAINS["a"]
    store = opened(tmp_path)
    write_chain(store, keys[:2])
    with (
        files_no_longer_than(EXTENT_BYTES // 2),
        pytest.raises(StoreError, match=r"^.*: a block cannot be stored \(.*"),
    ):
        store.write(keys[2], keys[1], memoryview(content(keys[2])))
    assert store.match(keys) == 2
    assert list((tmp_path / "writing").iterdir()) == []
    assert write_chain(store, keys) == 4
    assert wrong(store, keys) == []
    store.close()


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    """The error names both formats."""
    opened(tmp_path).close()
    other = BlockFormat("other", 3, 4, 4000)
    with pytest.raises(StoreError, match=r"another format .*toy.*other"):
        PosixStore(tmp_path, other, PosixStoreSpec(capacity_bytes=EXTENT_BYTES))


def test_an_extent_of_another_model_is_a_miss(tmp_path: Path) -> None:
    """A file that was copied from another store has another digest in its header."""
    other = PosixStore(tmp_path / "other", BlockFormat("other", 3, 4, 4000), PosixStoreSpec(capacity_bytes=10**6))
    key = CHAINS["a"][0]
    other.write(key, b"", memoryview(content(key)))
    store = opened(tmp_path / "store")
    store.write(key, b"", memoryview(content(key)))
    [copied], [replaced] = ([*(tmp_path / name / "blocks").rglob(key.hex())] for name in ("other", "store"))
    replaced.write_bytes(copied.read_bytes())
    assert store.read([key], ALL, memoryview(bytearray(FORMAT.block_bytes))) == 0
    other.close()
    store.close()


def test_a_folder_that_cannot_be_created_is_one_sentence(tmp_path: Path) -> None:
    """A file stands in place of the folder."""
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(StoreError, match="the store cannot be written"):
        opened(tmp_path / "store")


def test_a_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    """No block could ever be stored."""
    with pytest.raises(StoreError, match="less than one block"):
        PosixStore(tmp_path, FORMAT, PosixStoreSpec(capacity_bytes=EXTENT_BYTES - 1))


def test_with_fsync_a_block_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the file, then its name, then the folder that has the name; without the option nothing waits for the
    disk."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        steps.append(f"sync {path.relative_to(tmp_path).parts[0]}{'/' if path.is_dir() else ''}")
        fsync(fd)

    def renamed(old: Path, new: Path) -> None:
        steps.append("rename")
        rename(old, new)

    (first, second) = chain("a", 2)
    store = PosixStore(tmp_path, FORMAT, PosixStoreSpec(capacity_bytes=10 * EXTENT_BYTES, fsync=True))
    plain = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    assert store.write(first, b"", memoryview(content(first)))
    assert steps == ["sync writing", "rename", "sync blocks/", "sync blocks/"]
    steps.clear()
    assert plain.write(second, first, memoryview(content(second)))
    assert steps == ["rename"]


@pytest.mark.parametrize(
    ("library", "location", "service"),
    [("redis", "redis://localhost:1/0", "Redis needs redis-py"), ("obstore", "s3://bucket/x", "S3 needs obstore")],
)
def test_a_store_whose_library_is_missing_is_one_sentence(
    library: str, location: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for backend in ("redis_backend", "s3_backend"):
        monkeypatch.delitem(sys.modules, f"kvroute_engine.block_store.{backend}", raising=False)
    with pytest.raises(StoreError, match=f"^a block store in {service}; install kvroute with its extra `store`$"):
        StoreLocation(location, 10**6).check()


def _block_link(folder: Path) -> None:
    (folder / f"00{folder.name}").symlink_to("/dev/null")


def _block_fifo(folder: Path) -> None:
    os.mkfifo(folder / f"00{folder.name}")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file that NFS keeps open": lambda folder: (folder / ".nfs000001").write_bytes(b"x"),
    "a file whose name is no key": lambda folder: (folder / "junk.tmp").write_bytes(b"x"),
    "a name of odd length": lambda folder: (folder / "abc").write_bytes(b"x"),
    "the key of another subfolder": lambda folder: (folder / "abcdff").write_bytes(b"x"),
    "a folder": lambda folder: (folder / f"ab{folder.name}").mkdir(),
    "a link": _block_link,
    "a FIFO": _block_fifo,
    "a file beside the subfolders": lambda folder: (folder.parent / "readme").write_bytes(b"x"),
    "a FIFO beside the subfolders": lambda folder: os.mkfifo(folder.parent / "ab"),
    "a file beside those being written": lambda folder: (folder.parents[1] / "writing" / ".nfs1").write_bytes(b"x"),
    "a FIFO beside those being written": lambda folder: os.mkfifo(folder.parents[1] / "writing" / f"ab.{'0' * 16}"),
}


def entries(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name != "lock"}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_stay_and_disturb_no_write(tmp_path: Path, name: str) -> None:
    """A store that is full evicts its own blocks beside them, and can be opened again."""
    keys = [chain(f"block {number}", 1)[0] for number in range(2 * CAPACITY_BLOCKS)]
    store = opened(tmp_path, blocks=CAPACITY_BLOCKS)
    write_chain(store, keys[:1])
    folder = next((tmp_path / "blocks").iterdir())
    before = entries(tmp_path)
    FOREIGN[name](folder)
    foreign = entries(tmp_path) - before
    for _ in range(2):
        assert all(store.write(key, b"", memoryview(content(key))) for key in keys)
        assert store.match(keys[-1:]) == 1
        assert wrong(store, keys[-1:]) == []
        assert foreign <= entries(tmp_path)
        store.close()
        store = opened(tmp_path, blocks=CAPACITY_BLOCKS)
    store.close()


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "device"])
def test_a_special_file_in_place_of_a_block_is_a_miss(tmp_path: Path, kind: str) -> None:
    """Reading it neither follows the link nor waits for a writer of the FIFO; the block can be written again."""
    key = CHAINS["a"][0]
    store = opened(tmp_path / "store")
    write_chain(store, [key])
    [path] = (tmp_path / "store" / "blocks").rglob(key.hex())
    target = tmp_path / "elsewhere"
    path.rename(target)
    before = target.read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else "/dev/zero")
    into = memoryview(bytearray(FORMAT.block_bytes))
    assert store.match([key]) == store.read([key], ALL, into) == 0
    assert target.read_bytes() == before
    if kind != "folder":
        assert write_chain(store, [key]) == 1
        assert store.read([key], ALL, into) == 1
        assert target.read_bytes() == before
    store.close()


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(None, 0o600), (0o755, 0o600), (0o777, 0o660), (0o2770, 0o660)])
def test_only_the_users_of_the_folder_may_read_blocks(tmp_path: Path, folder_mode: int | None, file_mode: int) -> None:
    """A new store is its user's alone. Others get no access; the group does if the folder is writable for it."""
    place = tmp_path / "store"
    if folder_mode is not None:
        place.mkdir()
        place.chmod(folder_mode)
    store = opened(place)
    write_chain(store, CHAINS["a"])
    store.close()
    paths = [path for path in place.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in paths} == {file_mode}
    assert {path.stat().st_mode & 0o777 for path in place.rglob("*") if path.is_dir()} == {
        file_mode | file_mode >> 2 & 0o110
    }
    assert place.stat().st_mode & 0o7777 == (0o700 if folder_mode is None else folder_mode)


def test_files_that_a_store_makes_anew_are_private_too(tmp_path: Path) -> None:
    """Somebody has removed the counter and the lock while the store was open."""
    store = opened(tmp_path / "store")
    names = ("used_bytes", "lock")
    for name in names:
        (tmp_path / "store" / name).unlink()
    assert write_chain(store, CHAINS["a"]) == len(CHAINS["a"])
    store.close()
    assert [(tmp_path / "store" / name).stat().st_mode & 0o777 for name in names] == [0o600, 0o600]
