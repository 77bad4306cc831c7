"""Live: `kvroute timing measure` on real vLLM servers. How exact it is depends on the load of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvroute.timing import prefill_time
from kvroute.types import LinearPrefill

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def measure(*words: str) -> Any:
    """Run the command and return its document."""
    command = [sys.executable, "-m", "kvroute.cli.app", "timing", "measure", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_prompts_and_decode_steps_are_measured(pair: Pair) -> None:
    """Servers with a KV connector also answer a request alone. A cached prefix is found."""
    found = measure(
        *(pair.prefill.url, "--decode", pair.decode.url),
        *("--max-prompt-tokens", "3000", "--max-batch", "8", "--repeats", "3"),
    )
    spec = found["prefill"]["spec"]
    fitted = prefill_time(LinearPrefill(per_token_s=spec["per_token_s"], base_s=spec["base_s"]))
    assert fitted.seconds(3000) > fitted.seconds(100) > 0
    assert {check["tokens"] for check in found["prefixes"]} >= {64, 1024, 3000}
    longest = max(found["prefixes"], key=lambda check: check["tokens"])
    assert longest["cached_tokens"] == 1500 // 32 * 32
    decode = found["decode"]
    assert decode["error"]["n"] == 6
    step = decode["spec"]
    assert step["base_s"] + 8 * step["per_request_s"] + 8 * 64 * step["per_context_token_s"] > 0
