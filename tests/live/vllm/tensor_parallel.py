"""One rank of a tensor-parallel vLLM, started by torchrun's variables: generates greedily and prints the token ids.

Runs in vLLM's environment: `tensor_parallel.py MODEL RANKS OUTPUT_TOKENS`. KVROUTE_TEST_CORRUPT=N changes the N-th sum
through the switch, which must change tokens. KVROUTE_TEST_HOLD=PATH lets every rank wait before its 200th sum through
the switch until the file PATH exists; PATH.RANK shows that a rank waits.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = (40, 200, 900)
HELD_SUM = 200


def corrupt(number: int) -> None:
    """Let the switch's sum with this number be wrong."""
    from kvroute_engine.all_reduce.switched import SwitchedSums

    correct, calls = SwitchedSums.all_reduce, 0

    def wrong(self: SwitchedSums, tensor: Any, generation: int = 0) -> Any:
        nonlocal calls
        calls += 1
        total = correct(self, tensor, generation)
        return total + 1.0 if total is not None and calls == number else total

    SwitchedSums.all_reduce = wrong  # type: ignore[method-assign]


def hold(path: Path) -> None:
    """Wait in the middle of the generation until this file exists."""
    from kvroute_engine.all_reduce.switched import SwitchedSums

    correct, calls = SwitchedSums.all_reduce, 0

    def held(self: SwitchedSums, tensor: Any, generation: int = 0) -> Any:
        nonlocal calls
        calls += 1
        if calls == HELD_SUM:
            path.with_name(f"{path.name}.{os.environ['RANK']}").touch()
            while not path.exists():
                time.sleep(0.02)
        return correct(self, tensor, generation)

    SwitchedSums.all_reduce = held  # type: ignore[method-assign]


def main() -> None:
    """Generate; print `running` before and JSON after."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model, ranks, output_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if number := os.environ.get("KVROUTE_TEST_CORRUPT"):
        corrupt(int(number))
    if path := os.environ.get("KVROUTE_TEST_HOLD"):
        hold(Path(path))
    llm = LLM(
        model,
        dtype="float32",
        tensor_parallel_size=ranks,
        distributed_executor_backend="external_launcher" if ranks > 1 else None,
        max_model_len=2048,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
        seed=1,
    )
    drawn = random.Random(7)
    prompts = [{"prompt_token_ids": [drawn.randrange(3, 420) for _ in range(length)]} for length in PROMPT_TOKENS]
    print("running", flush=True)
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True))
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
