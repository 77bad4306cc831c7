"""`kvroute buffer`: ready line, requests, end by SIGTERM, and one sentence for each wrong input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.cli.cli_rig import Kvroute
from tests.commands import kvroute_command


def test_it_is_ready_answers_and_ends(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "store"), "--port", "0", "--data-port", "0", "--quota", "3MB"]
    with subprocess.Popen(
        kvroute_command("buffer", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with urllib.request.urlopen(f"{ready['url']}/v1/kv/reads", timeout=60) as answer:
            state = json.load(answer)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert state == {"queued_bytes": 0, "buffered_bytes": 0, "quota_bytes": 3_000_000, "read_bytes": 0}
    assert ready["data"].startswith("127.0.0.1:")
    assert (process.returncode, "Traceback" in errors) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/proc/kvroute"], "/proc/kvroute: the store cannot be written (No such file or directory); choose a folder"),
        ([""], "the location of the store is empty; write a folder, or the URL of Redis or S3"),
        (["ftp://x"], "ftp://x: ftp:// is not a known kind of store; write a folder"),
        (["s3:///x"], "s3:///x: the bucket is missing; write s3://bucket/prefix"),
        (["STORE", "--quota", "-5GB"], "invalid value for '--quota': '-5GB' is not a size; write a number and"),
        (["STORE", "--quota", "0B"], "invalid value for '--quota': '0B' is not a size; write a number"),
        (["STORE", "--dscp", "storage=99"], "--dscp: 'storage=99' is no code point; write class=number"),
        (["STORE", "--host", "0.0.0.0"], "--host: every client that reaches 0.0.0.0 could read the KV cache; give"),
        (["STORE", "--token-env", "KVROUTE_NO_SUCH"], "token_env: KVROUTE_NO_SUCH is not set; export it"),
    ],
)
def test_wrong_input_is_one_sentence(kvroute: Kvroute, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    ended = kvroute("buffer", *[str(tmp_path / "s") if argument == "STORE" else argument for argument in arguments])
    assert ended.code == 2
    assert ended.err.startswith(f"kvroute: {sentence}")
    assert len(ended.err.splitlines()) == 1


def test_a_library_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    """Without the extra `store`, as far as an import can show it."""
    code = "import sys; sys.modules['redis'] = None; from kvroute.cli.app import main; main()"
    command = [sys.executable, "-c", code, "buffer", "redis://127.0.0.1:1/0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "kvroute: a block store in Redis needs redis-py; install kvroute with its extra `store`"
    )
