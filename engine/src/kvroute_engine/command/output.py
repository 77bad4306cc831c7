"""What commands print and write: sentences on stderr, files as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from kvroute_engine.errors import InputError


def tell(sentences: Iterable[str]) -> None:
    """Print each sentence as a line on stderr."""
    for sentence in sentences:
        sys.stderr.write(f"{sentence}\n")


def make_folder(path: Path, where: str) -> None:
    """Create a folder if needed; raises an InputError that names the option `where` on failure."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} is not a writable folder ({error.strerror})", where=where, hint="give another folder"
        ) from None


def check_writable(path: Path, where: str) -> None:
    """Raise an InputError that names the option `where` if a file cannot be written there; called before long work."""
    if path.is_dir() or not (os.access(path if path.exists() else path.parent, os.W_OK)):
        why = (
            "it is a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "permission denied"
        )
        raise InputError(f"{path} cannot be written ({why})", where=where, hint="give another file")


def write_whole(path: Path, text: str, where: str) -> None:
    """Write a file atomically, because readers may wait for it. An InputError names the option `where`."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror})", where=where, hint="give another file"
        ) from None
