"""Live: clients of other projects run against `kvroute serve --embedded`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.services import missing

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / ".venv-clients"
MODEL = "llama-3-70b"
SECTION = "\ngateway:\n  passthrough: [/tokenizer_info]\n"
"""lm-eval asks for the tokenizer, on a path that the gateway does not pass on by itself."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway with emulated engines."""
    if not (ENVIRONMENT / ".installed").exists():
        missing("there is no .venv-clients; run `make clients`")
    folder = tmp_path_factory.mktemp("served")
    file, ready = folder / "cluster.yaml", folder / "ready.json"
    file.write_text((ROOT / "examples" / "small.yaml").read_text(encoding="utf-8") + SECTION)
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--port", "0"]
    command += ["--ready-file", str(ready), "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            yield str(json.loads(ready.read_text())["url"])
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


@pytest.mark.parametrize("client", sorted(path.name for path in HERE.glob("ask_*")))
def test_a_client_gets_what_it_asks_for(url: str, client: str, tmp_path: Path) -> None:
    """Its program checks the answers and ends with an error if one is wrong."""
    programs, npm = ENVIRONMENT / "bin", ENVIRONMENT / "npm"
    python = client.endswith(".py")
    command = [str(programs / ("python" if python else "node")), str(HERE / client), url, MODEL]
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "CI": "1"}
    environment |= {name: value for name, value in os.environ.items() if name == "LANG"}
    ran = subprocess.run(
        command if python else [*command, str(npm)], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
