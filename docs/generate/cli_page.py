"""The command line as Markdown: every command, argument and option, as typer itself documents them."""

from __future__ import annotations

import re
import subprocess
import sys

from kvroute.cli.help_topics import topics_markdown

_BOLD = re.compile(r'<span style="font-weight: bold">(.*?)</span>', re.DOTALL)
_SECTION = re.compile(r"^#+ `(kvroute [\w -]+)`\n\n(.+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ `(kvroute[\w -]*)`$")
_LISTED = re.compile(r"^\* `([\w-]+)`: ")


def cli_markdown() -> str:
    """One section for each command and one for the help topics, without the page's title."""
    command = [sys.executable, "-m", "typer", "kvroute.cli.app", "utils", "docs", "--name", "kvroute"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    text = _BOLD.sub(lambda match: f"`{' '.join(match[1].split())}`", out.stdout.strip())
    summaries = dict(_SECTION.findall(text))
    lines, inside, in_commands = [], "", False
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            inside = heading[1]
        if line.startswith(("**", "#")):
            in_commands = line == "**Commands**:"
        listed = _LISTED.match(line)
        if in_commands and listed:  # typer cuts these off after 45 characters
            name = f"{inside} {listed[1]}"
            line = f"* [`{name}`](#{name.replace(' ', '-')}): {summaries[name]}"
        lines.append(line)
    topics = f"## Help topics\n\n`kvroute help TOPIC` prints these texts.\n\n{topics_markdown()}"
    return "\n".join(lines[1:]).strip() + "\n\n" + topics
