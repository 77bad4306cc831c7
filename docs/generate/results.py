"""`python -m docs.generate.results`: write tables and figures of result files into the pages.

`<!-- result NAME ITEM -->` and `<!-- /result -->` enclose a table, or one figure inside a line, but not at its start: a
line that begins with a comment is no Markdown. `<!-- result NAME TABLE: CELL; COLUMN -->` encloses one cell of a table:
the column, in the row whose first cells are CELL; ... A bench, in `bench/results/`, has a NAME with `bench-` before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bench import quoted as benches

from kvroute.types import InputError
from kvroute_studies.shared.result_files import ResultFile, ResultTable, read_results

ROOT = Path(__file__).resolve().parents[2]
QUOTING = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "README.md")
"""The pages that may quote results."""
QUOTE = re.compile(
    r"(?P<start><!-- result (?P<name>[a-z][\w-]*) (?P<item>[\w-]+)(?:: (?P<cell>[^>]+))? -->)"
    r"(?P<content>.*?)<!-- /result -->",
    re.DOTALL,
)
_END = "<!-- /result -->"


def all_results() -> dict[str, ResultFile]:
    """Return the results of studies and benches by name. Raises InputError for a file that is none."""
    return read_results() | benches.results()


def rendered(text: str, where: str, results: Mapping[str, ResultFile]) -> str:
    """Return a page with the content of the results between its marks.

    Args:
        text: the page.
        where: its name, for messages.
        results: the result files by name.

    Raises:
        InputError: there is no such result, or it has no such table or figure.
    """
    return QUOTE.sub(lambda quote: f"{quote['start']}{_content(quote, where, results)}{_END}", text)


def with_dates(text: str, results: Mapping[str, ResultFile]) -> str:
    """Return a page with the date of each table and figure that other code than that of today has made."""
    names = {quote["name"] for quote in QUOTE.finditer(text)}
    changed = {name: results[name].changed() for name in names}
    return QUOTE.sub(lambda quote: quote[0] + _remark(quote, results[quote["name"]], changed[quote["name"]]), text)


def _remark(quote: re.Match[str], result: ResultFile, changed: list[str]) -> str:
    if not changed:
        return ""
    if quote["item"] in result.figures or quote["cell"]:
        return f" (of {result.date})"
    return f"\n\n*Of {result.date}, by other code than that of today ({', '.join(changed)}): `{result.command}`*"


def _content(quote: re.Match[str], where: str, results: Mapping[str, ResultFile]) -> str:
    name, item = quote["name"], quote["item"]
    if name not in results:
        raise InputError(f"there is no result {name!r}", where=where, hint=f"choose among {', '.join(results)}")
    result = results[name]
    if item in result.figures:
        return result.figures[item]
    if item in result.tables and quote["cell"]:
        return _cell(result.tables[item], quote["cell"], f"{where}: {name} {item}")
    if item in result.tables:
        return f"\n\n{_markdown(result.tables[item])}\n\n"
    hint = f"it has {', '.join((*result.tables, *result.figures))}"
    raise InputError(f"the result {name} has no {item!r}", where=where, hint=hint)


def _cell(table: ResultTable, place: str, where: str) -> str:
    *first, column = place.split("; ")
    rows = [row for row in table.rows if row[: len(first)] == first]
    if len(rows) != 1 or column not in table.columns:
        raise InputError(
            f"there is no cell {place!r}", where=where, hint="name the first cells of one row, and a column"
        )
    return rows[0][table.columns.index(column)]


def _markdown(table: ResultTable) -> str:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (table.columns, *table.rows))
    return "\n".join((head, f"|{'---|' * len(table.columns)}", *rows))


def main() -> None:
    """Write all pages."""
    results = all_results()
    for page in QUOTING:
        old = page.read_text(encoding="utf-8")
        new = rendered(old, str(page.relative_to(ROOT)), results)
        if new != old:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
