"""The command line as Markdown: every command, argument and option, as typer itself documents them."""

from __future__ import annotations

import re
import subprocess
import sys

_BOLD = re.compile(r'<span style="font-weight: bold">(.*?)</span>', re.DOTALL)


def cli_markdown() -> str:
    """One section for each command, without the page's title."""
    command = [sys.executable, "-m", "typer", "kvroute.cli.app", "utils", "docs", "--name", "kvroute"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    _, _, body = out.stdout.partition("\n")  # the title
    return _BOLD.sub(lambda match: f"`{' '.join(match[1].split())}`", body).strip()
