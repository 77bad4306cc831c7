"""Fuzzing target: the text of a cluster file with its `gateway:` section, through all its readers."""

from __future__ import annotations

import re

import msgspec
from tests.fuzz.targets import CORPUS

from kvroute.serve.config.preflight import deployment_of, settings_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.topology import Cluster, FileError, parse
from kvroute.types import InputError, InputErrors

INSTRUMENTED = (
    *(
        "kvroute_engine.files.document",
        "kvroute_engine.files.form",
        "kvroute_engine.files.units",
        "kvroute.topology.place",
    ),
    *("kvroute.topology.reading.expansion", "kvroute.topology.reading.assembly", "kvroute.topology.reading.check"),
    *(
        f"kvroute.serve.config.{name}"
        for name in ("preflight", "settings_checks", "instance_checks", "field_types", "offload_checks", "policy")
    ),
)
RUNS = 2_000


_FILES = [
    re.findall(r"[\w.\"'-]+|\W", (CORPUS / "cluster_file" / name).read_text(encoding="utf-8"))
    for name in ("small", "live", "fat_tree", "two_sites", "superpod")
]
_VALUES = (
    *("0", "-1", "1", "2", "7", "64", "1024", "65536", "65537", "4294967296", "99999999999999999999", "0.5", "1e-300"),
    *("1e308", "1e999", ".inf", ".nan", "null", "~", "true", "no", "''", "' '", '"\\n"', '"a\\n"', "[]", "{}", "[{}]"),
    *("2001-01-01", "1:30", "0x10", "0o7", "é", "\u2028", "prefill", "decode", "both", "node0", "rack0", "node0:0-7"),
    *("'node0:7-0'", "'node0:0-999999'", "1 Gbps", "0 GB", "1e30 GB", "1 ns", "24 h", "80 GB", "fat-tree", "superpod"),
    *(
        "linear",
        "quadratic",
        "piecewise",
        "gpu",
        "server",
        "flow",
        "tp",
        "name",
        "gateway",
        "role",
        "x",
        ",",
        ":",
        "\n",
    ),
)


def check(data: bytes) -> str:
    """The result is a cluster that is equal after it is written and read again, or the project's input error, which has
    one sentence and one line of the file for each error."""
    _check_text(_edited(data[:18]))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return _check_text(text)


def _edited(script: bytes) -> str:
    """Replace some parts of a valid file: the first byte selects the file, each three of the rest select a part and its
    replacement. Random bytes rarely get past the first syntax error."""
    parts = _FILES[script[0] % len(_FILES)].copy() if script else _FILES[0]
    for at in range(1, len(script) - 2, 3):
        place = (script[at] << 8 | script[at + 1]) % len(parts)
        parts[place] = _VALUES[script[at + 2] % len(_VALUES)] if parts[place].strip() else parts[place]
    return "".join(parts)


def _check_text(text: str) -> str:
    cluster = _read(text, lambda: parse(text, "f"))
    settings = _read(text, lambda: settings_of(text, "f", None))
    both = _read(text, lambda: deployment_of(text, "f", embedded=True, environ=None))
    assert both is None or (cluster is not None and settings is not None)
    if isinstance(cluster, Cluster):
        assert parse(cluster.file.to_yaml()).file == cluster.file
    if isinstance(settings, GatewaySettings):
        assert msgspec.structs.asdict(settings)
    return "refused" if both is None else "accepted"


def _read(text: str, read: object) -> object:
    assert callable(read)
    try:
        return read()
    except InputErrors as errors:
        for problem in errors.problems:
            _check(text, problem)
    except InputError as error:
        _check(text, error)
    return None


def _check(text: str, problem: InputError) -> None:
    assert problem.what
    assert len(str(problem).splitlines()) == 1, str(problem)
    assert len(str(problem)) < 2_000
    if isinstance(problem, FileError):
        assert 1 <= problem.line <= text.count("\n") + text.count("\r") + text.count("\x85") + text.count("\u2028") + 2
