"""A Downward API volume on disk, which changes as the kubelet changes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Volume:
    """A Downward API volume: a folder for each version, and a link `..data` to the current one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def write(self, **labels: str) -> None:
        """Write a version, make it the current one, and remove the one before, in the kubelet's order."""
        self._count += 1
        version = self.folder / f"..2026_{self._count}"
        version.mkdir()
        for name, value in labels.items():
            (version / name).write_text(value)
            link = self.folder / name
            if not link.is_symlink():
                link.symlink_to(Path("..data") / name)
        old = os.readlink(self.folder / "..data") if (self.folder / "..data").is_symlink() else ""
        (self.folder / "..data_tmp").symlink_to(version.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")
        if old:
            shutil.rmtree(self.folder / old)
