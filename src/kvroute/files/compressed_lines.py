"""Lines of a plain, zstd or gzip file, detected by its first bytes; a truncated or damaged file is an input error.

Files are written completely or not at all: a full disk must not destroy the previous content.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash
import zstandard

from kvroute_engine.errors import InputError

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_LINE_MAX_BYTES = 1 << 26
"""Maximum length of a line. A file with a longer line is not a trace."""
_HINTS = {
    errno.ENOSPC: "choose a disk with free space",
    errno.EDQUOT: "choose a disk with free space",
    errno.EFBIG: "raise the file size limit (`ulimit -f`)",
    errno.EACCES: "choose a writable file or folder",
    errno.EROFS: "choose a writable file or folder",
}


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield lines without line ends (LF or CRLF) and without a byte order mark, lazily.

    Raises:
        InputError: the file is missing, unreadable, damaged or truncated, or has a line of more than 64 MiB.
    """
    try:
        with path.open("rb") as file:
            yield from _lines(_chunks(file), path)
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
        raise InputError(why, where=str(path), hint="check its path") from None
    except (zstandard.ZstdError, EOFError, zlib.error) as error:
        raise InputError(
            f"the compressed data are damaged or cut off ({error})", where=str(path), hint="fetch the file again"
        ) from None


def fingerprint(path: Path) -> str:
    """Return the XXH64 of a file, or of all files of a folder with their names."""
    if not path.is_dir():
        return xxhash.xxh64_hexdigest(path.read_bytes())
    whole = xxhash.xxh64()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        whole.update(f"{file.name}\0{fingerprint(file)}\0".encode())
    return whole.hexdigest()


def write_compressed(path: Path, content: bytes) -> None:
    """Write a file, compressed according to the suffix of its name; equal input gives equal files."""
    if path.suffix == ".zst":
        content = zstandard.ZstdCompressor(level=9).compress(content)
    elif path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    with written_whole(path) as part:
        part.write_bytes(content)


@contextmanager
def written_whole(path: Path, hint: str = "give a file in a folder that exists") -> Iterator[Path]:
    """Yield a path to write to, and rename it to `path` at the end; after an error `path` is unchanged and the partial
    file is removed.

    A symbolic link stays a link, and a pipe or device is written directly.

    Raises:
        InputError: the system refuses the write; `hint` is the advice for errors without specific advice.
    """
    whole = Path(os.path.realpath(path))
    replaced = whole.is_file() or not whole.exists()
    part = whole.with_name(f"{whole.name}.part") if replaced else whole
    try:
        if whole.is_file() and not os.access(whole, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # renaming needs only rights on the folder
        yield part
        if replaced:
            if whole.exists():
                shutil.copymode(whole, part)
            part.replace(whole)
    except BaseException as error:
        if replaced:
            with suppress(OSError):
                part.unlink()
        if not isinstance(error, OSError):
            raise
        what = f"cannot be written ({error.strerror or error})"
        raise InputError(what, where=str(path), hint=_HINTS.get(error.errno or 0, hint)) from None


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    magic = file.read(4)
    file.seek(0)
    if magic == _ZSTD_MAGIC:
        return _zstd(file)
    if magic[:2] == _GZIP_MAGIC:
        unpacked = gzip.GzipFile(fileobj=file)
        return iter(lambda: unpacked.read(_CHUNK_BYTES), b"")
    return iter(lambda: file.read(_CHUNK_BYTES), b"")


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress zstd data. The library's own reader treats a truncated frame as the end of the file; this function
    does not."""
    frame = None
    while packed := file.read(_CHUNK_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame is incomplete")


def _lines(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    rest, number = b"", 0
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            yield _trimmed(line, number)
        if len(rest) > _LINE_MAX_BYTES:
            raise InputError("the line is longer than 64 MiB", where=f"{path}:{number + 1}", hint="give a trace")
    if rest:
        yield _trimmed(rest, number + 1)


def _trimmed(line: bytes, number: int) -> bytes:
    line = line.removesuffix(b"\r")
    return line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
