"""Agents that re-read cached KV from the store through prefill and decode nodes: `python -m bench.gateway.storage`.

`kvroute serve --embedded examples/dualpath.yaml` serves closed-loop agents: after a pause, each turn sends the whole
context, the output of the turn before and a few new tokens. Memory of the prefill instance holds one context, so nearly
every turn reads its context from the store. The same agents run with each read path. The rows compare the turns per
second after the first turn of each agent, which has nothing to read, and the bytes of the storage NICs. The notes have
the simulator's prediction for the same agents.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import uvloop
from bench.gateway.program import Program, served
from bench.measurement import ROOT, Failed, Row, show

from kvroute.control import ControlSpec
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Loop, Trace, TracedRequest
from kvroute.topology import load

EXAMPLE = ROOT / "examples" / "dualpath.yaml"
READS = ("prefill", "alternating", "shorter", "split")
METRIC = "kvroute_storage_read_bytes_total{"
THINK_S = 1.0
"""Pause before each turn, as for a tool call. Meanwhile the context leaves the memory of the prefill instance."""
BLOCK_TOKENS = 16
CONTEXT, APPENDED, OUTPUT = 16_000, 160, 16
"""Tokens of a first prompt, and those appended and generated in each turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one read path."""

    reads: str
    turns_per_s: float
    read_bytes: dict[str, float]
    """Bytes that each instance's node has read, by name."""
    cached_share: float
    """Cached share of the prompt tokens of all but the first turns."""
    predicted_per_s: float
    """Turns per second in the simulator."""

    @property
    def balance(self) -> float:
        """Maximum bytes of a storage NIC divided by the mean of all three."""
        return max(self.read_bytes.values()) / statistics.mean(self.read_bytes.values())


async def outcome(reads: str, agents: int, turns: int) -> Outcome:
    """Run the agents with one read path. Raises Failed if the gateway does not start or a turn fails."""
    with tempfile.TemporaryDirectory() as folder:
        cluster, ready = Path(folder, "dualpath.yaml"), Path(folder, "ready.json")
        cluster.write_text(EXAMPLE.read_text().replace("reads: split", f"reads: {reads}"))
        command = [
            str(Path(sys.executable).with_name("kvroute")),
            "serve",
            "--embedded",
            str(cluster),
            "--kv-scale",
            "0",
        ]
        command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        with Program(command, name="kvroute") as program:
            addresses = await served(ready, program)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                rate_per_s, cached_share = await run_agents(session, addresses["url"], agents, turns)
                read_bytes = await _read_bytes(session, addresses)
                return Outcome(reads, rate_per_s, read_bytes, cached_share, predicted(cluster, agents, turns))


async def run_agents(session: aiohttp.ClientSession, url: str, agents: int, turns: int) -> tuple[float, float]:
    """Run agents with a first turn and `turns` more. Return the turns per second after the first ones, and the cached
    share of their prompt tokens. Raises Failed if a turn fails."""
    first = [first_prompt(agent) for agent in range(agents)]
    contexts = await asyncio.gather(*(send_turn(session, url, turn) for turn in first))
    began = time.monotonic()
    counts = await asyncio.gather(*(_agent(session, url, context, turns) for context, _, _ in contexts))
    seconds = time.monotonic() - began
    cached, prompts = (sum(column) for column in zip(*counts, strict=True))
    return agents * turns / seconds, cached / prompts


def predicted(file: Path, agents: int, turns: int) -> float:
    """Return the turns per second of the same agents in the simulator."""
    requests, after = [], []
    for turn in range(turns + 1):
        tokens = CONTEXT + turn * (APPENDED + OUTPUT)
        for agent in range(agents):
            blocks = tuple((agent << 32) + number for number in range(tokens // BLOCK_TOKENS))
            requests.append(TracedRequest(0.0, tokens, OUTPUT, blocks, BLOCK_TOKENS))
            # All second turns begin after the last first one, as above.
            after.append(tuple(range(agents)) if turn == 1 else (agent + (turn - 1) * agents,) if turn else ())
    think_s = tuple(THINK_S if earlier else 0.0 for earlier in after)
    trace = Trace("agents", tuple(requests), loop=Loop(tuple(after), think_s, (math.inf,) * len(requests)))
    spec = ControlSpec(decode="foresight", prefill="cache-aware")
    ended_s = simulate(load(file), trace, spec, SimSpec()).outcomes.finished_s
    return float(agents * turns / (ended_s.max() - ended_s[:agents].max()))


def first_prompt(agent: int) -> list[int]:
    """Return the tokens of an agent's first prompt."""
    draw = np.random.default_rng(agent)
    tokens: list[int] = draw.integers(0, 32_000, CONTEXT).tolist()
    return tokens


async def _agent(session: aiohttp.ClientSession, url: str, context: list[int], turns: int) -> tuple[int, int]:
    """Run the turns of one agent; return its cached and its prompt tokens."""
    cached = prompts = 0
    draw = np.random.default_rng(context[0])
    for _ in range(turns):
        await asyncio.sleep(THINK_S)
        prompt = [*context, *draw.integers(0, 32_000, APPENDED).tolist()]
        context, hit, tokens = await send_turn(session, url, prompt)
        cached, prompts = cached + hit, prompts + tokens
    return cached, prompts


async def send_turn(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[list[int], int, int]:
    """Send one turn; return the new context, the cached tokens and the prompt tokens."""
    body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        document = await response.json()
        if response.status != 200:
            raise Failed(f"a turn failed with status {response.status}: {document}")
    text, usage = document["choices"][0]["text"], document["usage"]
    output: list[int] = np.frombuffer(text.encode(), "<u4").tolist()
    return [*prompt, *output], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


async def _read_bytes(session: aiohttp.ClientSession, addresses: dict[str, str]) -> dict[str, float]:
    found = {"prefill0": 0.0, "decode0": 0.0, "decode1": 0.0}
    async with session.get(f"{addresses['admin']}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(METRIC):
                labels, _, value = line.partition("} ")
                found[labels.partition('engine="')[2].partition('"')[0]] += float(value)
    return found


def rows(outcomes: list[Outcome], nics: str = "storage NICs") -> list[Row]:
    """Return the throughput of each read path, compared with the prefill node alone, and the balance of the NICs."""
    alone = outcomes[0]
    result = [
        Row(
            measure=f"turns/s with {nics}, read path {outcome.reads}",
            unit="/s",
            better="higher",
            ours=outcome.turns_per_s,
            peer=alone.turns_per_s,
            peer_name="prefill node alone",
            target=2.0 * alone.turns_per_s if outcome.reads in ("shorter", "split") else None,
            note=f"{100 * outcome.cached_share:.0f} % of the prompt tokens cached; "
            f"the simulator predicts {outcome.predicted_per_s:.2f}/s, and {alone.predicted_per_s:.2f}/s for the peer",
        )
        for outcome in outcomes[1:]
    ]
    result += [
        Row(
            measure=f"bytes of the {nics}, maximum to mean, read path {outcome.reads}",
            unit="",
            better="lower",
            ours=outcome.balance,
            target=1.2 if outcome.reads in ("shorter", "split") else None,
            note=", ".join(f"{name} {nbytes / 1e9:.3g} GB" for name, nbytes in outcome.read_bytes.items()),
        )
        for outcome in outcomes
    ]
    return result


def main() -> None:
    """Run every read path in turn; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    given = parser.parse_args()
    show(rows([uvloop.run(outcome(reads, given.agents, given.turns)) for reads in READS]), given.json)


if __name__ == "__main__":
    main()
