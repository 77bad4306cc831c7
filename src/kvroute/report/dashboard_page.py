"""The gateway's dashboard as one self-contained file, with a saved state instead of the live stream."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from importlib.resources import files


def dashboard_page(state: bytes, others: Sequence[bytes] = ()) -> str:
    """Return a complete HTML page.

    Args:
        state: the response of the admin port at `/state`.
        others: states of other runs on the same cluster; the page shows their figures by policy, in their order.
    """
    assets = files("kvroute.serve.observe").joinpath("dashboard")
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in assets.iterdir() if entry.is_file()}
    page = texts["index.html"]
    scripts = {name: text for name, text in texts.items() if name.endswith(".js")}
    # Modules in data: URLs cannot import by relative name, so imports use bare names that an import map resolves.
    bare = {name: re.sub(r'(from\s+)"\./', r'\1"kvroute/', text) for name, text in scripts.items()}
    imports = {f"kvroute/{name}": _data_url(text) for name, text in bare.items()}
    head = f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
    snapshot = json.loads(state)
    if others:
        splits = {split["policy"]: split for other in others for split in json.loads(other)["tick"]["splits"]}
        snapshot["tick"]["splits"] = list(splits.values())
    saved = json.dumps(snapshot, separators=(",", ":")).replace("</", "<\\/")
    body = f'<script type="application/json" id="saved">{saved}</script>\n'
    start = '<script type="module">import "kvroute/dashboard.js";</script>'
    page = page.replace(
        '<link rel="stylesheet" href="dashboard.css">', f"<style>{texts['dashboard.css']}</style>{head}"
    )
    page = page.replace('<script type="module" src="dashboard.js"></script>', "")
    return page.replace("</body>", f"{body}{start}\n</body>")


def _data_url(text: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()
