"""Every command in the code blocks of README.md and docs/ is run, and every printed output compared with the run.

`python -m tests.pages.write PAGE...` replaces old outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pages.page_blocks import PAGES, mentions, page_name, read_page
from tests.pages.page_check import commands_of, listing_faults, mention_faults, outcomes, prepared, runs_here
from tests.pages.page_commands import ANYWHERE, BY_PAGE, NOT_PRINTED, PRINTED_BY, treatment

TEXTS = {page_name(path): path.read_text(encoding="utf-8") for path in PAGES}
COMMANDS = {page: commands_of(page, text) for page, text in TEXTS.items()}


def _pages(live: bool, alone: bool = False) -> list[str]:
    return [page for page, commands in COMMANDS.items() if any(runs_here(command, live, alone) for command in commands)]


def _faults(page: str, folder: Path, live: bool, alone: bool = False) -> list[str]:
    ran = outcomes(COMMANDS[page], prepared(page, TEXTS[page], folder), live, alone)
    return [outcome.fault for outcome in ran if outcome.fault]


def test_every_command_is_listed_and_accepted() -> None:
    commands = [command for page in COMMANDS.values() for command in page]
    assert len(commands) > 200
    faults = listing_faults(commands)
    assert not faults, "\n".join(faults)


def test_every_command_in_a_sentence_exists_with_its_options() -> None:
    assert sum(len(mentions(text, page)) for page, text in TEXTS.items()) > 200
    faults = [fault for page, text in TEXTS.items() for fault in mention_faults(text, page)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", _pages(live=False))
def test_commands_of_a_page(page: str, tmp_path: Path) -> None:
    faults = _faults(page, tmp_path, live=False)
    assert not faults, "\n".join(faults)


@pytest.mark.live
@pytest.mark.parametrize("page", _pages(live=True))
def test_long_commands_and_services_of_a_page(page: str, tmp_path: Path) -> None:
    faults = _faults(page, tmp_path, live=True)
    assert not faults, "\n".join(faults)


@pytest.mark.live
@pytest.mark.alone
@pytest.mark.parametrize("page", _pages(live=True, alone=True))
def test_measurements_of_a_page(page: str, tmp_path: Path) -> None:
    faults = _faults(page, tmp_path, live=True, alone=True)
    assert not faults, "\n".join(faults)


def test_every_other_block_is_listed_with_a_reason() -> None:
    """A block without a language is the output of the command before it, or listed."""
    known = {*NOT_PRINTED, *PRINTED_BY}
    alone = [(page, output) for page, text in TEXTS.items() for output in read_page(text, page)[1]]
    unlisted = [
        f"{page}:{output.line}: {output.lines[0]}"
        for page, output in alone
        if not any(page == where and output.lines[0].startswith(words) for where, words in known)
    ]
    assert not unlisted, "\n".join(unlisted)
    for where, words in known:
        assert any(page == where and output.lines[0].startswith(words) for page, output in alone), (where, words)


def test_every_entry_is_used() -> None:
    """Each entry of the table is the treatment of a command."""
    commands = [command for page in COMMANDS.values() for command in page]
    for page, table in (*BY_PAGE.items(), ("", ANYWHERE)):
        for prefix, how in table.items():
            assert any(
                command.page == (page or command.page) and command.text.startswith(prefix) and treatment(command) is how
                for command in commands
            ), (page, prefix)
