"""A full disk, a wrong option, a closed pipe: older files are kept, and one sentence is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tests.disk import files_no_longer_than
from tests.examples import EXAMPLES
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.cli.trial.demo import save
from kvroute.files.compressed_lines import written_whole
from kvroute.report import drawing
from kvroute.types import InputError

CLUSTER = str(EXAMPLES / "small.yaml")
KVROUTE = [sys.executable, "-m", "kvroute.cli.app"]
NOBODY_UID = 65_534
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@contextmanager
def without_root_privileges(folder: Path) -> Iterator[Path]:
    """Give up root's right to write read-only files by running as another user, who becomes the owner of the folder."""
    if os.geteuid() != 0:
        yield folder
        return
    os.chown(folder, NOBODY_UID, NOBODY_UID)
    os.setresuid(NOBODY_UID, NOBODY_UID, 0)
    try:
        yield folder
    finally:
        os.setresuid(0, 0, 0)


def all_in(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder with its content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(st.none() | st.binary(max_size=9), st.binary(max_size=9), st.sampled_from([None, OSError, KeyError]))
def test_replacing_a_file_is_atomic(old: bytes | None, new: bytes, fault: type[Exception] | None) -> None:
    """No other file remains in the folder, for any failure after the last byte; only an OSError becomes an
    InputError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if old is not None:
            (folder / "file").write_bytes(old)
        before = all_in(folder)

        def write() -> None:
            with written_whole(folder / "file") as part:
                part.write_bytes(new)
                if fault is not None:
                    raise fault(5, "no")

        if fault is None:
            write()
            assert all_in(folder) == {"file": new}
        else:
            with pytest.raises(InputError if fault is OSError else fault):
                write()
            assert all_in(folder) == before


def test_a_replaced_file_keeps_its_permissions_and_its_symbolic_link(tmp_path: Path) -> None:
    """A symbolic link keeps its target, and the permissions stay the same."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    with written_whole(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").readlink() == Path("file")
    assert ((tmp_path / "file").read_text(), (tmp_path / "file").stat().st_mode & 0o777) == ("new", 0o600)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_read_only_file_is_not_replaced() -> None:
    """The file stays although its folder is writable."""
    with tempfile.TemporaryDirectory() as name, without_root_privileges(Path(name)) as folder:
        (folder / "file").touch(0o444)
        with pytest.raises(InputError, match="Permission denied"), written_whole(folder / "file") as part:
            part.write_text("new")
        assert all_in(folder) == {"file": b""}


def test_an_older_trace_survives_a_full_disk(tmp_path: Path) -> None:
    """The older trace is complete, no other file remains, and the message suggests a fix for a full disk."""
    path = tmp_path / "trace.jsonl"
    assert CliRunner().invoke(app, ["trace", "generate", str(path), "--requests", "2"]).exit_code == 0
    before = all_in(tmp_path)
    with files_no_longer_than(2_000):
        ended = CliRunner().invoke(app, ["trace", "generate", str(path), "--requests", "200"])
    assert isinstance(ended.exception, InputError)
    assert str(ended.exception).startswith(f"{path}: cannot be written (File too large); raise the file size limit")
    assert all_in(tmp_path) == before


@needs_full
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A symbolic link leads to a device that is always full."""
    path = tmp_path / "trace.jsonl"
    path.symlink_to("/dev/full")
    ended = CliRunner().invoke(app, ["trace", "generate", str(path), "--requests", "2"])
    assert str(ended.exception) == f"{path}: cannot be written (No space left on device); choose a disk with free space"
    assert Path("/dev/full").is_char_device()
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_log_survives_a_full_disk(tmp_path: Path) -> None:
    """Only a complete log replaces it."""
    path = tmp_path / "run.log"
    line = ["simulate", CLUSTER, "--policy", "netkv", "--seeds", "1", "--log", str(path), "--workers", "1"]
    assert CliRunner().invoke(app, [*line, "--requests", "1"]).exit_code == 0
    before = all_in(tmp_path)
    with files_no_longer_than(5_000):
        ended = CliRunner().invoke(app, [*line, "--requests", "9"])
    assert isinstance(ended.exception, InputError), ended.output
    assert str(ended.exception).startswith(f"{path}: cannot be written (File too large); ")
    assert all_in(tmp_path) == before


def test_no_partial_figure_remains(tmp_path: Path) -> None:
    """Neither the picture nor its data is replaced; the older files stay."""
    figure = Figure(figsize=(1, 1))
    figure.text(0.5, 0.5, "old")
    drawing.save(figure, tmp_path, "figure")
    before = all_in(tmp_path)
    assert set(before) == {"figure.svg", "figure.png"}
    figure.text(0.1, 0.1, "and much more than there was")
    with files_no_longer_than(1_000), pytest.raises(InputError, match=r"figure\.svg: cannot be written"):
        drawing.save(figure, tmp_path, "figure")
    assert all_in(tmp_path) == before


@needs_full
@pytest.mark.parametrize("line", ["topology show superpod.yaml --json", "topology show small.yaml", "--version"])
def test_a_full_stdout_gives_one_sentence(line: str) -> None:
    """The output is more than a buffer, less, or comes before any command: the exit code is 2, without a message of
    Python at exit."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([*KVROUTE, *line.split()], stdout=full, stderr=subprocess.PIPE, cwd=EXAMPLES, text=True)
    message = (
        "kvroute: the output cannot be written (No space left on device); send stdout and files to a disk with room\n"
    )
    assert (ended.returncode, ended.stderr) == (2, message)


@pytest.mark.parametrize("line", ["llm", "llm --json", "--version", "--help", "topology check small.yaml"])
def test_a_closed_stdout_gives_one_sentence(line: str) -> None:
    """`kvroute ... >&-` has this effect."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *KVROUTE, *line.split()]
    ended = subprocess.run(command, stderr=subprocess.PIPE, cwd=EXAMPLES, text=True)
    message = "kvroute: the output cannot be written (stdout is closed); send stdout to a file or a terminal\n"
    assert (ended.returncode, ended.stderr) == (2, message)


def test_a_silent_command_works_without_standard_streams(tmp_path: Path) -> None:
    """The files that it opens do not take the numbers of the closed streams."""
    path = tmp_path / "trace.jsonl"
    line = ["trace", "generate", str(path), "--requests", "2"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *KVROUTE, *line])
    assert ended.returncode == 0
    assert path.read_bytes().count(b"\n") == 2


def test_older_results_of_the_demo_survive_a_full_disk(tmp_path: Path) -> None:
    save([], "an older page", tmp_path)
    before = all_in(tmp_path)
    assert set(before) == {"dashboard.html", "demo.json"}
    with files_no_longer_than(100), pytest.raises(InputError, match=r"dashboard\.html: cannot be written"):
        save([], "a page " * 100, tmp_path)
    assert all_in(tmp_path) == before


def test_a_closed_pipe_causes_no_message() -> None:
    """`kvroute ... | head` has this effect."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run([*KVROUTE, "llm"], stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")
