"""The connector's half inside vLLM's scheduler: which prompts are pulled, held or let go. No vllm, no sockets.

Whatever is wrong with a handover costs time, never correctness: vLLM then computes the prompt itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvroute.connector.handover import Handover, prompt_digest, read_handover
from kvroute.connector.options import Options

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pull:
    """Fetch the prompt's blocks from position `first` on into `blocks`."""

    request_id: str
    handover: Handover
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """What the workers are to begin in this step."""

    holds: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    releases: list[Handover] = field(default_factory=list)


class Scheduler:
    """Called by vLLM in the order: arrived, matched (any number of times), allocated, finished; `take` every step."""

    def __init__(
        self,
        options: Options,
        *,
        engine_id: str,
        block_tokens: int,
        tp: int = 1,
        producer: bool = True,
        consumer: bool = True,
    ) -> None:
        self._options, self._engine_id, self._block_tokens = options, engine_id, block_tokens
        self._tp, self._producer, self._consumer = tp, producer, consumer
        self._addresses: list[tuple[str, int]] = []
        self._handovers: dict[str, Handover] = {}
        self._step = Step()

    def listening(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Where the workers' servers are, by rank."""
        self._addresses = [addresses[rank] for rank in sorted(addresses)]

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, prompt: Sequence[int] | None) -> None:
        """Remember where the prompt's KV is, if the request says so and can be believed."""
        if not (self._consumer and params and params.get("do_remote_prefill")):
            return
        handover = read_handover(params)
        if isinstance(handover, str):
            log.warning(
                "request %s computes its own prompt: kv_transfer_params are of no use, %s", request_id, handover
            )
            return
        if problem := self._problem(handover, prompt):
            log.warning("request %s computes its own prompt: %s", request_id, problem)
            if handover.tp_size == self._tp:
                self._step.releases.append(handover)
            return
        self._handovers[request_id] = handover

    def matched(self, request_id: str, prompt_tokens: int, computed_tokens: int) -> int:
        """Tokens to pull beyond `computed_tokens`. Changes nothing."""
        handover = self._handovers.get(request_id)
        if handover is None:
            return 0
        return max(self._end(handover, prompt_tokens) - computed_tokens, 0)

    def allocated(self, request_id: str, prompt_tokens: int, blocks: Sequence[int], pulled_tokens: int) -> None:
        """The request has its blocks here; `pulled_tokens` of them are to be filled from there. Once per request."""
        handover = self._handovers.pop(request_id, None)
        if handover is None:
            return
        if not pulled_tokens:
            self._step.releases.append(handover)
            return
        end = self._end(handover, prompt_tokens)
        first = (end - pulled_tokens) // self._block_tokens
        mine = tuple(blocks[first : -(-end // self._block_tokens)])
        self._step.pulls.append(Pull(request_id, handover, first, mine))

    def finished(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        prompt: Sequence[int] | None,
        *,
        completed: bool,
        computed_tokens: int,
        blocks: Sequence[int],
    ) -> dict[str, Any] | None:
        """The request is over. What its decode instance must be told, if its blocks are to be held, else None."""
        if handover := self._handovers.pop(request_id, None):
            self._step.releases.append(handover)
        if not (params and params.get("do_remote_decode") and self._producer and completed and blocks):
            return None
        host, port = self._addresses[0]
        self._step.holds.append((request_id, tuple(blocks)))
        told = Handover(
            remote_engine_id=self._engine_id,
            remote_request_id=request_id,
            remote_host=host,
            remote_port=port,
            remote_ports=tuple(port for _, port in self._addresses) if self._tp > 1 else (),
            remote_block_ids=(tuple(blocks),),
            remote_num_tokens=computed_tokens,
            remote_prompt=prompt_digest(prompt),
            remote_instance=self._options.instance,
            tp_size=self._tp,
        )
        return told.params()

    def take(self) -> Step:
        """What has come together since the last call."""
        step, self._step = self._step, Step()
        return step

    def _end(self, handover: Handover, prompt_tokens: int) -> int:
        """Prompt tokens whose KV is there; all of them, or whole blocks."""
        if handover.remote_num_tokens >= prompt_tokens:
            return prompt_tokens
        return handover.remote_num_tokens // self._block_tokens * self._block_tokens

    def _problem(self, handover: Handover, prompt: Sequence[int] | None) -> str:
        if handover.tp_size != self._tp or len(handover.remote_ports or (0,)) < self._tp:
            return f"tensor parallelism is {handover.tp_size} on its prefill instance and {self._tp} here"
        if handover.remote_prompt != prompt_digest(prompt) or not handover.remote_prompt:
            return "its prompt has other tokens here than on its prefill instance"
        return ""
