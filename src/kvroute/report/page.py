"""Renders the HTML templates: one file per page, inline figures, escaped text, no scripts, no external files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from kvroute import __version__
from kvroute.files.compressed_lines import written_whole
from kvroute.report.drawing import inline, save
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure on a page: its file name, its caption, and the inline SVG."""

    name: str
    caption: str
    svg: Markup


def picture(figure: Figure, out: Path, name: str, caption: str) -> Picture:
    """Save the figure as PNG and SVG in `out`/figures and return it for the page."""
    text = save(figure, out / "figures", name)
    return Picture(name, caption, Markup(inline(text, name, escape(caption))))  # our own SVG with an escaped label


def write_page(template: str, path: Path, *, package: str = "kvroute.report", **values: Any) -> Path:
    """Render a template of a package into `path`; it may extend those of this package.

    Raises:
        InputError: the path cannot be written.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, "kvroute.report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template(template).render(version=__version__, **values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror})", where=str(path), hint="choose another folder"
        ) from error
    with written_whole(path, "choose another folder") as part:
        part.write_text(text, encoding="utf-8")
    return path


def parameters(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a nested configuration to (dotted name, text), in its own order."""
    rows: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            rows += parameters(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:g}"))
        elif isinstance(value, bool):
            rows.append((prefix + name, "yes" if value else "no"))
        elif isinstance(value, (list, tuple)):
            between = "; " if any(isinstance(part, Mapping) for part in value) else ", "
            rows.append((prefix + name, between.join(_text(part) for part in value) or "none"))
        else:
            rows.append((prefix + name, "none" if value in (None, "", {}) else str(value)))
    return rows


def _text(part: Any) -> str:
    if isinstance(part, Mapping):
        return ", ".join(f"{name} {_text(value)}" for name, value in part.items())
    return f"{part:g}" if isinstance(part, float) else str(part)
