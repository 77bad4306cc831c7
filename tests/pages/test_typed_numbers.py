"""Measured numbers in pages are between marks; a number with a unit outside them is a setting."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from docs.generate.results import QUOTE, ROOT

PAGES = ("README.md", "bench/README.md", "docs/fidelity.md", "docs/heroserve.md")
GIVEN = re.compile(r"<!-- given -->.*?<!-- /given -->", re.DOTALL)
"""Inputs, bounds, and worked examples that a test checks."""
HISTORICAL = re.compile(r"<!-- historical -->(.*?)<!-- /historical -->", re.DOTALL)
"""Measurements that nothing repeats; the text names the commit that described them."""
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)|^ {4}[^\n]*", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(
    r"(?<![\w.,])[-+±]?\d[\d,.]*(?:(?: to | and |, )\d[\d,.]*)*"
    r"(?:x|\s(?:%|(?:s|ms|us|minutes|MB|GB|times|requests/s|tokens/s)\b(?!/)))"
)
SET = {
    "README.md": (
        "with 90 % of every link used",
        "below 80 % of its slots",
        "within 2 % of the best",
        "at 90 % SLO attainment",
    ),
    "bench/README.md": (
        "arrive 64 times as often",
        "waits 0.1 s for further changes",
        "about 300 MB installed",
        "about 700 MB)",
        "TTFT 2.5 s, TPOT 60 ms",
        "90 % of Poisson arrivals",
        "about 180 MB)",
        "At 150 requests/s each",
        "every 5 ms each",
        "20 ms round trip (10 ms each way)",
        "0.1 % loss, and 48 MB of KV",
        "a prefill of 4 s in 4 chunks",
    ),
    "docs/fidelity.md": (
        "30, 60 and 90 % of the rate",
        "an H100 (80 GB)",
        "85 % of the memory bandwidth, the planner's",
        "of 10 ms per iteration",
        "[0, 30) at 80 % load",
        "RAG at 100 %",
        "the text says 32 and 69 %",
        "FIFO prefill at 80 % load",
        "abstract says 54 % over homogeneous and 32 % over naive",
        "5 ms one way",
        "decode iterations of 25 ms",
        "± 95 % interval",
        "at 45 % of the planned throughput",
        "a TTFT within 10 s and 40 tokens/s",
        "100 Gbps to 30 % would",
        "starts 20 s (mean",
        "grow by 0.5 ms and more with each request",
        "tuned on 30 s of other requests",
        "log-normal around 1 MB",
        "buffers of 40, 80, 320 GB; 50 and 90 % of the storage NIC's rate; compute quotas of 0.1, 0.3, 1 s",
        "differ by more than 2 %",
        "the quota is 0.1 s and buffers are 320 GB",
        "a table every 10 ms",
    ),
    "docs/heroserve.md": (
        "The published gain over DistServe, ATP and SwitchML (1.33 to 1.53 times the rate)",
        "5 or 25 % of the packets",
        "90 % of the requests",
        "Llama 1 s (chat) or 5 s, and 50 ms per token",
        "the planner predicts 90 %",
        "The planner predicts 90 %",
        "Loads are 0.25, 0.5, 0.75 and 1 times",
        "3 us each way",
        "at least 100 us or 1 ms",
        "0, 0.1 and 1 % loss",
        "with 1 % loss and eight workers",
    ),
}
"""Phrases with values that are set or published, by page."""


def typed(page: str, text: str) -> Iterator[str]:
    """Yield page, line and number of each number with a unit that is neither between marks nor set."""
    plain = text
    for pattern in (QUOTE, GIVEN, HISTORICAL, CODE, *(spaced(phrase) for phrase in SET.get(page, ()))):
        plain = pattern.sub(lambda found: re.sub(r"[^\n]", "#", found[0]), plain)
    for number in NUMBER.finditer(plain):
        line = plain.count("\n", 0, number.start()) + 1
        yield f"{page}:{line}: {number[0]}"


def spaced(phrase: str) -> re.Pattern[str]:
    """Return a pattern for a phrase that may be on two lines."""
    return re.compile(r"\s+".join(map(re.escape, phrase.split())))


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_are_between_marks(page: str) -> None:
    """Quote the number from a result file, or add the phrase of a value that is set to SET."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert list(typed(page, text)) == []
    assert [phrase for phrase in SET[page] if not spaced(phrase).search(text)] == [], "not in the page any more"


@pytest.mark.parametrize("page", PAGES)
def test_historical_numbers_name_their_commit(page: str) -> None:
    found = HISTORICAL.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [text for text in found if not re.search(r"commits?\s+`[0-9a-f]{8}`", text)] == []


def test_a_typed_number_is_named_with_its_line() -> None:
    text = "It takes\n<!-- result some time -->3 s<!-- /result -->, `--for 4 s`, and 12.5 ms\nor 2x, 3 and 4 % more.\n"
    assert list(typed("some.md", text)) == ["some.md:2: 12.5 ms", "some.md:3: 2x", "some.md:3: 3 and 4 %"]
    assert list(typed("README.md", "in cells within 2 % of the\nbest <!-- given -->5 s<!-- /given -->")) == []
