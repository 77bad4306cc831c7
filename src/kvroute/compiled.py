"""Compiles kernels with numba and caches the machine code in the first folder that this user can write.

The folders, in order: `NUMBA_CACHE_DIR`, `__pycache__` beside the kernel, the user's cache folder, and a folder of this
user's own below the system's temporary folder. Where none can be written, kernels are compiled again in every process.

numba takes a cached kernel for stale when the kernel's own file has changed. `compiled` also counts the files of the
kernels that it calls and the constants that it imports, because numba compiles both into the caller.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

Function = TypeVar("Function", bound=Callable[..., object])
_MEND = "set NUMBA_CACHE_DIR to a folder that it can write and that outlives the process"
_WARNED = "KVROUTE_WARNED_OF_KERNEL_CACHE"
"""Environment variable that is set once the user has been warned; child processes inherit it."""
_stamps: dict[str, str] = {}
"""Digest of each module that has kernels, by its name."""


def compiled(function: Function) -> Function:
    """Compile `function` at its first call, or load it from the cache; division follows numpy's rules.

    Kernels and constants that it uses from other modules must be imported above the first kernel of its file.
    """
    kernel: Any = numba.njit(error_model="numpy")(function)
    stamp = _stamp(function.__module__, function.__globals__)
    try:
        kernel._cache = _KernelCache(function, stamp)
    except RuntimeError:  # numba found no folder
        _warn("compiled kernels cannot be cached, because this user can write no folder: every start compiles them")
    return cast(Function, kernel)


def _stamp(module: str, namespace: Mapping[str, Any]) -> str:
    """Digest of a module's file, of the constants in its namespace and of the modules whose kernels it has there."""
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


class _TemporaryLocator(caching.UserWideCacheLocator):
    """A folder that survives this process, but perhaps not the next start of the machine or the container."""

    def __init__(self, function: Callable[..., object], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(temporary_folder() or "", self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Callable[..., object], file: str) -> _TemporaryLocator | None:
        """None where there is no such folder."""
        return super().from_function(function, file) if temporary_folder() else None


@lru_cache(maxsize=1)
def temporary_folder() -> str | None:
    """The folder for caches of last resort, made if need be; None where it cannot be, or is not this user's alone.

    Loading a cache runs code from it, and anybody may make a folder of this name below /tmp first.
    """
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


class _KernelCache(caching.FunctionCache):
    """numba's cache of one kernel; a folder that fails after it was chosen costs time, not the process."""

    _impl_class = _KernelCacheImpl

    def __init__(self, function: Callable[..., object], stamp: str) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, stamp)
        if isinstance(self._impl.locator, _TemporaryLocator):
            _warn(f"compiled kernels are cached in {temporary_folder()}, because this user can write no other folder")

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The cached machine code, or None."""
        try:
            return super().load_overload(signature, context)
        except OSError as error:
            _warn(f"cached kernels cannot be read from {self.cache_path} ({error.strerror}) and are compiled again")
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Cache it, if the folder takes it."""
        try:
            super().save_overload(signature, result)
        except OSError as error:
            _warn(f"compiled kernels cannot be cached in {self.cache_path} ({error.strerror})")


def _warn(what: str) -> None:
    """One sentence on stderr, in this process or a parent of it."""
    if _WARNED not in os.environ:
        os.environ[_WARNED] = "1"
        sys.stderr.write(f"kvroute: {what}; {_MEND}\n")
