"""The connector's half inside vLLM's scheduler: selects the prompts to pull, hold or release. No vllm, no sockets.

Invalid transfer parameters cost time, never correctness: vLLM then computes the prompt itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.block_leases import Computing
from kvroute_engine.connector.transfer_params import KvTransferParams, prompt_digest, read_transfer_params

log = logging.getLogger(__name__)
NAMES_MAX = 4096
"""Maximum number of stored names from the router. A name that is used twice would mix two prompts."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Fetch the prompt's blocks from position `first` on into `blocks`."""

    request_id: str
    transfer_params: KvTransferParams
    first: int
    blocks: tuple[int, ...]
    prompt: str = ""
    """Digest of the tokens that the peer must hold."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of a finished prompt, which peers request by `name`."""

    name: str
    owner: str
    """vLLM's name of the request."""
    blocks: tuple[int, ...]
    prompt: str = ""
    """Digest of the prompt."""


@dataclass(slots=True)
class ConnectorStep:
    """Work for the workers in one step. `withdrawn` is handled before the model runs, `computing` while it runs."""

    withdrawn: list[str] = field(default_factory=list)
    """Names whose blocks have been given to other requests."""
    computing: list[Computing] = field(default_factory=list)
    holds: list[HeldBlocks] = field(default_factory=list)
    drops: list[tuple[str, str]] = field(default_factory=list)
    """Name and owner of requests that vLLM gave up while they were being computed."""
    refusals: list[str] = field(default_factory=list)
    """Names that will never be computed."""
    pulls: list[Pull] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Pulls that are no longer needed, by local name of the request."""
    releases: list[KvTransferParams] = field(default_factory=list)


class Ending(NamedTuple):
    """What vLLM needs when a request is over."""

    keep: bool
    """True if its blocks stay allocated until the workers free them."""
    kv_transfer_params: dict[str, Any] | None
    """Transfer parameters for its decode instance."""


@dataclass(slots=True)
class _Named:
    """A local prompt that a peer requests by a name from the router, perhaps before it is computed."""

    name: str
    prompt_tokens: int
    digest: str
    begun: bool = False


class ConnectorScheduler:
    """Plans pulls and holds. vLLM calls, in this order: arrived, matched (any number of times), allocated, scheduled
    (in every step that computes some of the prompt), finished; and `take` in every step."""

    def __init__(
        self,
        options: ConnectorSettings,
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
        self._transfer_params: dict[str, KvTransferParams] = {}
        self._digests: dict[str, str] = {}
        """Digests of the prompts that are pulled before they are computed, by request."""
        self._early: set[str] = set()
        """Requests whose pull began before their prompt was computed."""
        self._named: dict[str, _Named] = {}
        self._names_used: OrderedDict[str, None] = OrderedDict()
        self._step = ConnectorStep()

    def listening(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Set the addresses of the workers' servers, by rank."""
        self._addresses = [addresses[rank] for rank in sorted(addresses)]

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, prompt: Sequence[int] | None) -> None:
        """Store the location of the prompt's KV, if the request gives a valid one, and the name that peers use."""
        if self._producer and params and params.get("do_remote_decode") and params.get("transfer_id"):
            self._name(request_id, str(params["transfer_id"]), prompt or ())
        if not (self._consumer and params and params.get("do_remote_prefill")):
            return
        transfer_params = read_transfer_params(params, self._tp)
        if isinstance(transfer_params, str):
            log.warning(
                "request %s computes its own prompt: kv_transfer_params are not usable, %s", request_id, transfer_params
            )
            return
        if problem := self._problem(transfer_params, prompt):
            log.warning("request %s computes its own prompt: %s", request_id, problem)
            if transfer_params.tp_size == self._tp:
                self._step.releases.append(transfer_params)
            return
        self._transfer_params[request_id] = transfer_params
        if transfer_params.early:
            self._digests[request_id] = prompt_digest(prompt)

    def matched(self, request_id: str, prompt_tokens: int, computed_tokens: int) -> int:
        """Return the number of tokens to pull beyond `computed_tokens`: up to the prompt's end, or, if the peer holds
        only a prefix, up to that prefix's end in whole blocks. It changes nothing."""
        transfer_params = self._transfer_params.get(request_id)
        if transfer_params is None:
            return 0
        return max(self._end(transfer_params, prompt_tokens) - computed_tokens, 0)

    def pulls(self, request_id: str) -> bool:
        """Return whether the prompt's KV is pulled from a prefill instance."""
        return request_id in self._transfer_params

    def allocated(self, request_id: str, prompt_tokens: int, blocks: Sequence[int], pulled_tokens: int) -> None:
        """Plan the pull of `pulled_tokens` tokens into the request's blocks. Called once per request."""
        transfer_params = self._transfer_params.pop(request_id, None)
        if transfer_params is None:
            return
        digest = self._digests.pop(request_id, transfer_params.remote_prompt)
        if not pulled_tokens:
            self._step.releases.append(transfer_params)
            return
        end = self._end(transfer_params, prompt_tokens)
        first = (end - pulled_tokens) // self._block_tokens
        mine = tuple(blocks[first : -(-end // self._block_tokens)])
        self._step.pulls.append(Pull(request_id, transfer_params, first, mine, digest))
        if transfer_params.early:
            self._early.add(request_id)

    def watched(self, computed: Mapping[str, int]) -> list[tuple[str, int]]:
        """Return the requests in a step, with their computed tokens, for which `scheduled` must be called."""
        if not (self._named and self._options.layerwise):
            return []
        return [(request_id, tokens) for request_id, tokens in computed.items() if request_id in self._named]

    def scheduled(self, request_id: str, blocks: Sequence[int], computed_tokens: int) -> None:
        """Record that this step computes the prompt up to `computed_tokens`, into `blocks`."""
        named = self._named[request_id]
        named.begun = True
        whole = computed_tokens // self._block_tokens
        ready = -(-named.prompt_tokens // self._block_tokens) if computed_tokens >= named.prompt_tokens else whole
        self._step.computing.append(Computing(named.name, request_id, tuple(blocks), ready, named.digest))

    def preempted(self, request_id: str) -> None:
        """Record that vLLM has taken the request's blocks and will compute it again."""
        named = self._named.get(request_id)
        if named and named.begun:
            self._step.withdrawn.append(named.name)
            named.begun = False

    def finished(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        prompt: Sequence[int] | None,
        *,
        completed: bool,
        computed_tokens: int,
        blocks: Sequence[int],
    ) -> Ending:
        """Handle the end of a request that has `computed_tokens` tokens computed into `blocks`."""
        if transfer_params := self._transfer_params.pop(request_id, None):
            self._digests.pop(request_id, None)
            self._step.releases.append(transfer_params)
        if request_id in self._early:
            self._early.remove(request_id)
            self._step.cancels.append(request_id)
        named = self._named.pop(request_id, None)
        if not (params and params.get("do_remote_decode") and self._producer and completed and blocks):
            return self._given_up(request_id, named)
        name = named.name if named else request_id
        digest = prompt_digest(prompt)
        self._step.holds.append(HeldBlocks(name, request_id, tuple(blocks), digest))
        host, port = self._addresses[0]
        kv_transfer_params = KvTransferParams(
            remote_engine_id=self._engine_id,
            remote_request_id=name,
            remote_host=host,
            remote_port=port,
            remote_ports=tuple(port for _, port in self._addresses) if self._tp > 1 else (),
            remote_block_ids=(tuple(blocks),),
            remote_num_tokens=computed_tokens,
            remote_prompt=digest,
            remote_instance=self._options.instance,
            tp_size=self._tp,
        )
        return Ending(True, kv_transfer_params.params())

    def take(self) -> ConnectorStep:
        """Return the work collected since the last call."""
        step, self._step = self._step, ConnectorStep()
        return step

    def _name(self, request_id: str, name: str, prompt: Sequence[int]) -> None:
        if name in self._names_used:
            log.warning("request %s: transfer_id %s was used before and is ignored", request_id, name)
            return
        self._names_used[name] = None
        if len(self._names_used) > NAMES_MAX:
            self._names_used.popitem(last=False)
        self._named[request_id] = _Named(name, len(prompt), prompt_digest(prompt))

    def _given_up(self, request_id: str, named: _Named | None) -> Ending:
        if named and named.begun:
            self._step.drops.append((named.name, request_id))
            return Ending(True, None)
        if named:
            self._step.refusals.append(named.name)
        return Ending(False, None)

    def _end(self, transfer_params: KvTransferParams, prompt_tokens: int) -> int:
        """Return the number of prompt tokens whose KV the peer has: all of them, or whole blocks."""
        if transfer_params.early or transfer_params.remote_num_tokens >= prompt_tokens:
            return prompt_tokens
        return transfer_params.remote_num_tokens // self._block_tokens * self._block_tokens

    def _problem(self, transfer_params: KvTransferParams, prompt: Sequence[int] | None) -> str:
        ports = len(transfer_params.remote_ports) or (self._tp if transfer_params.early else 1)
        if transfer_params.tp_size != self._tp or ports < self._tp:
            return f"tensor parallelism is {transfer_params.tp_size} on its prefill instance and {self._tp} here"
        if transfer_params.early:
            return "" if prompt else "it has no tokens"
        beginning = (prompt or ())[: max(transfer_params.remote_num_tokens, 0)]
        alike = transfer_params.remote_prompt in (prompt_digest(prompt), prompt_digest(beginning))
        if not (alike and transfer_params.remote_prompt):
            return "its first tokens differ from those on the instance that holds its KV"
        return ""
