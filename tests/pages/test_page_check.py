"""The check of pages finds a wrong number, an old text, an unknown option, and a command that is not listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pages.page_blocks import ROOT, Command, Output, read_page
from tests.pages.page_check import Outcome, commands_of, listing_faults, mention_faults, outcomes, prepared
from tests.pages.page_output import difference
from tests.pages.write import rewritten

QOS = (ROOT / "docs" / "qos.md").read_text(encoding="utf-8")
LINES = st.lists(st.from_regex(r"[a-z]{1,4} [1-9]\d{0,3}\.\d", fullmatch=True), min_size=1, max_size=6)


def ran(text: str, folder: Path) -> list[Outcome]:
    """Run the commands of docs/qos.md with another text of the page."""
    folder.mkdir()
    return list(outcomes(commands_of("docs/qos.md", text), prepared("docs/qos.md", text, folder)))


@pytest.mark.parametrize(
    ("old", "new"),
    [(" 98           98        1        1   high", " 97           98        1        1   high"), ("is shared", "are")],
)
def test_a_wrong_output_is_found_with_page_and_line_and_can_be_written(old: str, new: str, tmp_path: Path) -> None:
    """A number or a text of the page is wrong. Writing the page restores it."""
    old = old if old in QOS else "A class that sends alone"
    wrong = QOS.replace(old, new, 1)
    assert wrong != QOS
    line = QOS[: QOS.index(old)].count("\n") + 1
    found = ran(wrong, tmp_path / "wrong")
    [fault] = [outcome.fault for outcome in found if outcome.fault]
    assert fault.startswith(f"docs/qos.md:{line}: ")
    assert rewritten(wrong, found) == QOS
    assert not any(outcome.fault for outcome in ran(QOS, tmp_path / "right"))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("--link roce", "--links roce", "No such option: --links"),
        ("plan qos examples", "plan qoos examples", "No such command 'qoos'"),
        ("kvroute plan qos examples/superpod.yaml\n", "kvroute plan qos\n", "Missing argument"),
        ("kvroute plan qos examples/superpod.yaml\n", "git push --all\n", "is not in tests/pages/page_commands.py"),
    ],
)
def test_a_command_that_is_not_accepted_or_not_listed_is_found(old: str, new: str, fault: str) -> None:
    commands = commands_of("docs/qos.md", QOS.replace(old, new, 1))
    [found] = listing_faults(commands)
    assert found.startswith(f"docs/qos.md:{QOS[: QOS.index(old)].count(chr(10)) + 1}: ")
    assert fault in found


@pytest.mark.parametrize("text", ["`kvroute simulate --sync none`", "| a |\n|---|\n| `kvroute simlate x` |"])
def test_a_wrong_command_in_a_sentence_is_found(text: str) -> None:
    [found] = mention_faults(f"# A\n\n{text}\n\n`kvroute simulate --sync-ms`", "p.md")
    assert found.startswith(f"p.md:{3 + text.count(chr(10))}: `kvroute sim")


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    """Its message is part of the fault."""
    [fault] = [
        outcome.fault
        for outcome in ran(QOS.replace("superpod.yaml\n", "none.yaml\n", 1), tmp_path / "a")
        if outcome.fault
    ]
    assert "docs/qos.md:8: " in fault
    assert "ended with 2: kvroute: " in fault


@given(LINES, st.data())
def test_a_changed_digit_is_found_and_a_part_is_accepted(lines: list[str], data: st.DataObject) -> None:
    """The lines of a page that `...` replaces may be any lines."""
    printed = "\n".join(lines)
    index = data.draw(st.integers(0, len(lines) - 1))
    other = lines[index][:-1] + ("1" if lines[index][-1] != "1" else "2")
    page = Output(5, (*lines[:index], other, *lines[index + 1 :]))
    found = difference(page, printed)
    assert found is not None
    assert (found.line, found.printed) == (5 + index, lines[index])
    assert difference(Output(5, tuple(lines)), printed) is None
    assert difference(Output(5, ("...", *lines[index:])), printed) is None
    assert difference(Output(5, (*lines[:index], "...")), printed) is None
    assert difference(Output(5, ("...", *lines[:index], "...")), printed) is None
    assert difference(Output(5, (lines[0], "...", *lines[index:])), printed) is None or index == 0


@pytest.mark.parametrize(
    ("page", "printed", "tolerance", "same"),
    [
        ("mean 1,000 ms", "mean 1,090 ms", 0.1, True),
        ("mean 1,000 ms", "mean 1,290 ms", 0.1, False),
        ("mean 1,000 ms", "mean 1,000 s", 0.1, False),
        ("a  ───  12", "a ───── 12", 0.0, True),
        ("rate 5 ± 1", "rate 5 ± 3", 0.1, False),
        ("a\nb", "a\nb\nc", 0.0, False),
        ("a\nb", "a", 0.0, False),
        ("took ... s", "took 4.2 s", 0.0, True),
    ],
)
def test_outputs_are_compared_line_by_line(page: str, printed: str, tolerance: float, same: bool) -> None:
    assert (difference(Output(1, tuple(page.splitlines())), printed, tolerance) is None) == same


@pytest.mark.parametrize(
    ("page", "same"), [('{"a": 1}', True), ('{"a": 2}', False), ('{"c": 2}', False), ('{"b": ["..."]}', True)]
)
def test_json_of_a_page_may_leave_out_keys(page: str, same: bool) -> None:
    found = difference(Output(1, (page,), language="json"), '{"a": 1, "b": ["x y"]}')
    assert (found is None) == same


def test_commands_and_outputs_are_read_from_blocks() -> None:
    """Comments, prompts and continued lines are not part of a command; a heading ends the search for an output."""
    text = """\
Text with `kvroute help`.

    $ kvroute simulate \\
      a.yaml   # a comment
    kvroute --version

    kvroute 1.0

1. An item

       sudo make demo

```text
made
```

## Next

```yaml
kvroute: simulate
```

    x = 1
"""
    commands, alone = read_page(text, "p.md")
    assert commands == [
        Command("p.md", 3, "kvroute simulate a.yaml"),
        Command("p.md", 5, "kvroute --version", Output(7, ("kvroute 1.0",), 4)),
        Command("p.md", 11, "sudo make demo", Output(14, ("made",), 0, "text")),
    ]
    assert commands[2].arguments == ["make", "demo"]
    assert alone == [Output(23, ("x = 1",), 4)]


def test_a_short_run_must_not_print() -> None:
    """A command that runs with other options than printed cannot be compared with the output in the page."""
    text = "    kvroute simulate examples/small.yaml --gateways 2\n\n    some output\n"
    assert listing_faults(commands_of("docs/scale.md", text)) == [
        "docs/scale.md:1: its output is that of other options"
    ]
