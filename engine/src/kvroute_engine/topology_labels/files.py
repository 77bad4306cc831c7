"""Reads the files of a Downward API volume, all of one version.

The kubelet writes a new folder for each version and then renames a symbolic link `..data` to it, so a reader that opens
file by file can mix two versions.
"""

from __future__ import annotations

import os
from pathlib import Path

_DATA = "..data"
_MOST_BYTES = 4096
"""Longer files are no label values."""
_MOST_ATTEMPTS = 100


def read_labels(folder: Path) -> dict[str, str]:
    """Return the value of each file by its name, without empty ones; empty if the folder does not exist.

    A label that the pod does not have is an empty file. Files whose name begins with a dot, folders, and files that are
    no UTF-8 text are left out.

    Raises:
        OSError: the folder cannot be read, or changes all the time.
    """
    for _ in range(_MOST_ATTEMPTS):
        version = _version(folder)
        try:
            labels = _read(folder / version if version else folder)
        except FileNotFoundError:
            labels = None
        if labels is not None and _version(folder) == version:
            return labels
        if not folder.exists():
            return {}
    raise OSError(f"{folder} changes too often to be read")


def _version(folder: Path) -> str:
    """Return the name of the current version's folder; empty if the volume has no versions."""
    try:
        return os.readlink(folder / _DATA)
    except OSError:
        return ""


def _read(folder: Path) -> dict[str, str]:
    labels = {}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.is_file():
            value = _text(path)
            if value:
                labels[path.name] = value
    return labels


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        return content.decode().strip() if len(content) <= _MOST_BYTES else ""
    except UnicodeDecodeError:
        return ""
