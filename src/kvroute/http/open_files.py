"""File descriptors: raises the limit of the process and recognizes errors of a process that has none left."""

from __future__ import annotations

import errno
import os
import resource

RAISE_MOST = 1 << 20
"""Maximum soft limit, even if the hard limit is higher: the kernel's default of `fs.nr_open`."""


def out_of_files(error: OSError | UnicodeError) -> bool:
    """Whether an attempt to connect failed because no descriptor was left. Errors of the resolver, and errors of
    several addresses together, do not show it: then a probe decides."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return True
    return isinstance(error, OSError) and (number is None or number < 0) and exhausted() is not None


def exhausted() -> int | None:
    """Return the error number with which the process gets no descriptor now; None: a descriptor is free."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return error.errno
    return None


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = RAISE_MOST if hard == resource.RLIM_INFINITY else min(hard, RAISE_MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
