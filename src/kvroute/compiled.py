"""Compiles kernels with numba and caches the machine code in the first folder that this user can write.

The folders, in order: `NUMBA_CACHE_DIR`, `__pycache__` next to the kernel, the user's cache folder, and a folder of
this user below the system's temporary folder. If none can be written, every process compiles the kernels again.

numba treats a cached kernel as stale if the kernel's own file has changed. `compiled` also includes the files of the
kernels that it calls and the constants that it imports, because numba compiles both into the caller.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, TypeVar, cast

_absent = {"scipy", "coverage"} - sys.modules.keys()
"""numba imports these to know their versions, if they are installed; they take 10 MB."""
sys.modules.update(dict.fromkeys(_absent, cast(ModuleType, None)))
import numba  # noqa: E402
from numba.core import caching  # noqa: E402
from numba.core.runtime.nrt import rtsys  # noqa: E402

for _name in _absent:
    del sys.modules[_name]

Function = TypeVar("Function", bound=Callable[..., object])
_HINT = "set NUMBA_CACHE_DIR to a writable, permanent folder"
_WARNED = "KVROUTE_WARNED_OF_KERNEL_CACHE"
"""Environment variable that is set after the user has been warned; child processes inherit it."""
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p .*/libllvmlite\S*\n(?:\w+: .*\n)*?Private_Dirty: +0 kB\n", re.MULTILINE
)
"""A part of LLVM's library, in smaps, whose pages are equal to those of the file."""
_stamps: dict[str, str] = {}
"""Digest of each module with kernels, by module name."""


class NotCached(Exception):
    """A kernel is not in the cache; the argument is its name there."""


_only_cached: ContextVar[bool] = ContextVar("only_cached", default=False)


@contextmanager
def only_cached() -> Iterator[None]:
    """Raise NotCached in place of compiling a kernel in this thread, if there is a folder for the cache."""
    token = _only_cached.set(True)
    try:
        yield
    finally:
        _only_cached.reset(token)


def compiled(function: Function) -> Function:
    """Compile `function` at its first call, or load it from the cache; division follows numpy's rules.

    Kernels and constants from other modules must be imported above the first kernel of the file. Kernels pass each
    other named tuples. A kernel that Python calls takes its arguments one by one, because each field of a named tuple
    costs 0.1 us there.
    """
    return _compile(function)


def compiled_in_place(function: Function) -> Function:
    """Compile a function that changes arrays in place and neither creates nor returns arrays; see `compiled`.

    Such a function needs no reference counts. They take most of the time of small kernels that pass on tens of arrays.
    """
    return _compile(function, _nrt=False, forceinline=True)


def compiled_without_gil(function: Function) -> Function:
    """Compile a function like `compiled_in_place`; other threads of Python run while it does."""
    return _compile(function, _nrt=False, nogil=True)


def _compile(function: Function, **options: Any) -> Function:
    kernel: Any = numba.njit(error_model="numpy", **options)(function)
    stamp = f"{_stamp(function.__module__, function.__globals__)} {sorted(options)}"
    try:
        kernel._cache = _KernelCache(function, stamp)
    except RuntimeError:  # numba found no writable folder
        _warn("compiled kernels cannot be cached, because this user has no writable folder: every start compiles them")
    return cast(Function, kernel)


def _stamp(module: str, namespace: Mapping[str, Any]) -> str:
    """Return a digest of a module's file, the constants in its namespace and the modules of the kernels in its
    namespace."""
    if module not in _stamps:
        digest = hashlib.sha256(Path(namespace["__file__"]).read_bytes())
        for name, value in sorted(namespace.items()):
            other = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(value, int | float | str) and not name.startswith("__"):
                digest.update(f"{name}={value!r}\n".encode())
            elif other in _stamps:
                digest.update(f"{name}:{_stamps[other]}\n".encode())
        _stamps[module] = digest.hexdigest()
    return _stamps[module]


def release_compiler() -> None:
    """Return the pages of LLVM's library that this process has read, about 60 MB, to the system.

    It reads them again if a kernel is compiled later. Without smaps, which only Linux has, this does nothing.
    """
    try:
        mappings = _MAPPING.findall(Path("/proc/self/smaps").read_text())
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in mappings:
        madvise(int(start, 16), int(end, 16) - int(start, 16), mmap.MADV_DONTNEED)


class _TemporaryLocator(caching.UserWideCacheLocator):
    """A folder that outlives this process, but possibly not a restart of the machine or the container."""

    def __init__(self, function: Callable[..., object], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(temporary_folder() or "", self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Callable[..., object], file: str) -> _TemporaryLocator | None:
        """Return the locator, or None if there is no such folder."""
        return super().from_function(function, file) if temporary_folder() else None


@lru_cache(maxsize=1)
def temporary_folder() -> str | None:
    """Return the fallback folder for caches, created if needed; None if that fails or other users can write to the
    folder."""
    try:
        folder = Path(tempfile.gettempdir()) / f"kvroute-kernels-{os.geteuid()}"
        if not folder.is_symlink():
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return str(folder) if own else None


class _KernelCacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [  # noqa: RUF012
        caching.UserProvidedCacheLocator,
        caching.InTreeCacheLocator,
        caching.UserWideCacheLocator,
        _TemporaryLocator,
    ]


class _KernelCacheFile(caching.IndexDataCacheFile):
    """Index and data files of one kernel. numba reads a whole index before it checks whether it is stale."""

    def _load_index(self) -> dict[Any, Any]:
        try:
            found: dict[Any, Any] = super()._load_index()
            return found
        except (AttributeError, ImportError, EOFError, ValueError, UnpicklingError):
            return {}  # another version of kvroute wrote it, with classes that do not exist any more, or it is damaged


class _KernelCache(caching.FunctionCache):
    """numba's cache of one kernel; a folder that fails later costs compile time but does not end the process."""

    _impl_class = _KernelCacheImpl

    def __init__(self, function: Callable[..., object], stamp: str) -> None:
        super().__init__(function)
        self._cache_file = _KernelCacheFile(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=(self._cache_file._source_stamp, stamp),
        )
        if isinstance(self._impl.locator, _TemporaryLocator):
            _warn(
                f"compiled kernels are cached in {temporary_folder()}, because this user has no other writable folder"
            )

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the cached machine code, or None.

        numba's own function imports first what only compiling needs (20 MB, scipy among it); compiling does so, too.

        Raises:
            NotCached: there is none, within `only_cached`.
        """
        found = None
        rtsys.initialize(context)
        try:
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(signature, context)
        except OSError as error:
            _warn(f"cached kernels cannot be read from {self.cache_path} ({error.strerror}) and are compiled again")
        if found is None and _only_cached.get():
            raise NotCached(self._impl.filename_base)
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        """Cache the machine code if the folder can be written."""
        try:
            super().save_overload(signature, result)
        except OSError as error:
            _warn(f"compiled kernels cannot be cached in {self.cache_path} ({error.strerror})")


def _warn(what: str) -> None:
    """Print one sentence on stderr, once for this process and its children."""
    if _WARNED not in os.environ:
        os.environ[_WARNED] = "1"
        sys.stderr.write(f"kvroute: {what}; {_HINT}\n")
