"""`python -m docs.generate FOLDER`: write all pages of the site there, as Markdown for any site generator."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generate.pages import write_pages

if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
