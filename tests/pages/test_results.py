"""Numbers of studies and benches in the pages are those of the result files."""

from __future__ import annotations

import re

import pytest
from docs.generate.results import QUOTE, QUOTING, ROOT, all_results, rendered, with_dates

from kvroute.types import InputError
from kvroute_studies.shared.result_files import ResultFile, ResultTable, code_digests

RESULTS = all_results()
MADE = ResultFile(
    command="kvroute experiment some --seeds 2",
    date="2026-01-31",
    seeds=2,
    code=code_digests(["kvroute/flows"]),
    tables={"gains": ResultTable(["System", "Gain"], [["`basic`", "1.00"], ["`best`", "1.88"]])},
    figures={"gain": "1.00 to 1.88"},
)
PAGE = """It is <!-- result some gain -->2.03<!-- /result --> times as fast:

<!-- result some gains -->
| System | Gain |
<!-- /result -->

The end.
"""
RENDERED = """It is <!-- result some gain -->1.00 to 1.88<!-- /result --> times as fast:

<!-- result some gains -->

| System | Gain |
|---|---|
| `basic` | 1.00 |
| `best` | 1.88 |

<!-- /result -->

The end.
"""


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_the_content_of_the_result_files(page: str) -> None:
    """`python -m docs.generate.results` writes them; a number that was changed by hand fails here."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert rendered(text, str(page), RESULTS) == text
    starts = re.findall(r"<!-- result [a-z]", text)
    assert len(starts) == len(re.findall(r"<!-- /result -->", re.sub(r"`[^`\n]*`", "", text)))
    inline = [
        quote for quote in QUOTE.finditer(text) if quote["cell"] or quote["item"] in RESULTS[quote["name"]].figures
    ]
    lines = [text[text.rfind("\n", 0, quote.start()) + 1 : quote.start()] for quote in inline]
    assert [line for line in lines if not re.search(r"\w|\|", line)] == [], "a line that begins with it is no Markdown"


def test_every_result_file_is_quoted() -> None:
    """Each table and figure is in a page."""
    quoted = {(quote["name"], quote["item"]) for page in QUOTING for quote in QUOTE.finditer(page.read_text("utf-8"))}
    items = {(name, item) for name, result in RESULTS.items() for item in (*result.tables, *result.figures)}
    assert quoted == items


def test_what_is_between_the_marks_is_replaced() -> None:
    """The rest of the page stays, and a rendered page is as it was."""
    assert rendered(PAGE, "page.md", {"some": MADE}) == RENDERED
    assert rendered(RENDERED, "page.md", {"some": MADE}) == RENDERED


def test_an_unknown_result_or_item_is_named_with_its_page() -> None:
    with pytest.raises(InputError, match=r"page\.md.*there is no result 'some'"):
        rendered(PAGE, "page.md", {"other": MADE})
    with pytest.raises(InputError, match=r"page\.md.*the result some has no 'gain'"):
        rendered(PAGE, "page.md", {"some": ResultFile(command="", date="", seeds=1, code={}, tables=MADE.tables)})


def test_a_cell_of_a_table_is_quoted_by_its_row_and_column() -> None:
    page = "The best is <!-- result some gains: `best`; Gain -->1<!-- /result --> times as fast."
    assert rendered(page, "page.md", {"some": MADE}) == page.replace(">1<", ">1.88<")
    other = ResultFile(command="", date="2026-01-31", code={}, tables=MADE.tables)
    assert "1<!-- /result --> (of 2026-01-31) times" in with_dates(page, {"some": other})
    for place in ("`worst`; Gain", "`best`; Loss", "Gain"):
        with pytest.raises(InputError, match=r"page\.md: some gains.*there is no cell"):
            rendered(page.replace("`best`; Gain", place), "page.md", {"some": MADE})


def test_the_site_shows_the_date_of_a_result_of_other_code() -> None:
    """A result of the code of today has no remark."""
    assert with_dates(RENDERED, {"some": MADE}) == RENDERED
    other = ResultFile(
        command=MADE.command,
        date=MADE.date,
        seeds=2,
        code=MADE.code | {"kvroute/sim": "0" * 16},
        tables=MADE.tables,
        figures=MADE.figures,
    )
    dated = with_dates(RENDERED, {"some": other})
    assert "1.00 to 1.88<!-- /result --> (of 2026-01-31) times as fast" in dated
    remark = "*Of 2026-01-31, by other code than that of today (kvroute/sim): `kvroute experiment some --seeds 2`*"
    assert f"<!-- /result -->\n\n{remark}\n\nThe end." in dated
