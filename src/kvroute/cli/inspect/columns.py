"""Named figures, such as `transfer_s` or `hit_tokens`, as columns for people; the last part of the name is the unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvroute.report.grid import UNKNOWN, GridEntry, Heading

Column = tuple[Heading, tuple[GridEntry, ...]]


def columns_of(
    figures: Mapping[str, Sequence[float | None]], *, drop: Sequence[str] = (), best: int | None = None
) -> list[Column]:
    """Return a heading and its texts for each figure; None becomes "-".

    Args:
        figures: values by name. All names that end in `_s` are shown in one unit, so that the terms of a sum can be
            added.
        drop: names of columns that may be dropped from a table that is too wide, in this order.
        best: the row to set in bold.
    """
    unit, scale, digits = _seconds_unit(
        [value for name, column in figures.items() if _is_time(name) for value in column]
    )
    made: list[Column] = []
    for name, values in figures.items():
        order = drop.index(name) + 1 if name in drop else 0
        if _is_time(name):
            title, text = f"{_words(name, '_s')} {unit}", _fixed(scale, digits)
        elif name.endswith("_bytes_per_s"):
            title, text = f"{_words(name, '_bytes_per_s')} Gbps".strip(), _fixed(8e-9, 1)
        elif name.endswith("_tokens"):
            title, text = _words(name, ""), _fixed(1, 0)
        else:
            title, text = _words(name, ""), _figure
        entries = (
            GridEntry(UNKNOWN) if value is None else GridEntry(text(value), best=index == best)
            for index, value in enumerate(values)
        )
        made.append((Heading(title, drop=order), tuple(entries)))
    return made


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _words(name: str, unit: str) -> str:
    return name.removesuffix(unit).replace("_", " ")


def _fixed(scale: float, digits: int) -> Callable[[float], str]:
    return lambda value: f"{value * scale:,.{digits}f}" if np.isfinite(value) else UNKNOWN


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _seconds_unit(values: Sequence[float | None]) -> tuple[str, float, int]:
    """Return the unit for the largest value, its factor, and decimals that show at least five digits of that value."""
    largest = max((abs(value) for value in values if value is not None and np.isfinite(value)), default=0.0)
    if largest >= 10:
        return "s", 1.0, 3
    return ("ms", 1e3, 2) if largest >= 1e-2 or not largest else ("us", 1e6, 1)
