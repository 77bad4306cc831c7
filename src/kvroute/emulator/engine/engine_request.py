"""One request to an engine: the fields of vLLM's HTTP interface that the emulator uses. Other fields are ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgspec

from kvroute.emulator.errors import ApiError
from kvroute.emulator.generation.answer import Sampling
from kvroute.emulator.generation.constraint import read_constraint
from kvroute.emulator.prompt import EmulatedPrompt, chat_prompt, checked_salt, completion_prompts, response_prompt
from kvroute.emulator.request_body import Body, KeptBlocksBody, Kind, KvParams, StorageParams
from kvroute.emulator.transcription import Audio
from kvroute.types import Role

Leg: TypeAlias = Literal["prefill", "decode", "whole"]
COMPLETION_TOKENS = 16
"""Output tokens of a completion that sets no limit. Conversations have no limit then."""
N_MAX = 128
LOGPROBS_MAX = 20
"""Most tokens at each place whose log-probabilities are returned."""
STOPS_MAX = 64
_OUTPUT_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Details:
    """What a response has beside the text of its answers."""

    token_ids: bool = False
    logprobs: int | None = None
    """Number of the most likely tokens at each place; None: there are no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt, in a whole response."""
    as_ids: bool = False
    """Whether log-probabilities show tokens as ids."""
    echo: bool = False
    """Whether the text of a completion begins with the prompt."""
    prompt_only: bool = False
    """Whether the echo is all that a completion has."""
    last_message: str = ""
    """Text with which the message of a chat begins, because it continues the last one."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request for a response, which repeats some of them."""
    output_tokens_max: int = 0
    """Limit of a response that sets none."""

    @property
    def plain(self) -> bool:
        """Whether the events of a stream have nothing beside the text."""
        return not (self.token_ids or self.echo or self.logprobs is not None)


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Key and address under which the KV of one answer is fetched. On the prefill leg the address is empty."""

    key: str
    host: str = ""
    port: int = 0
    awaited: bool = False
    """True if the source may not have the KV yet."""
    early: bool = False
    """True if the KV is sent while it is computed, False if only when it is complete."""
    tokens: int | None = None
    """Number of tokens whose KV the source has; None if not given."""
    prefill_cached_tokens: int | None = None
    """Prompt tokens that the prefill instance had cached before it computed the rest; None if not given."""
    kept: KeptBlocksBody | None = None
    """What the own node has read from the store."""


@dataclass(frozen=True, slots=True)
class EmulatedRequest:
    """A validated request for `len(prompts) * n` answers."""

    kind: Kind
    model: str
    """Model name that the client used."""
    leg: Leg
    prompts: tuple[EmulatedPrompt, ...]
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    tickets: tuple[KvHandle, ...]
    """One handle per answer. Empty without a KV transfer, and on vLLM's prefill leg: the engine generates the key."""
    wants_params: bool
    """True if the response of a prefill leg contains `kv_transfer_params`."""
    prefix: KvHandle | None = None
    """KV of a prompt prefix that a prefill leg fetches before it computes the rest."""
    storage: StorageParams | None = None
    """Blocks that a prefill leg takes from the buffers of storage nodes."""
    details: Details = field(default_factory=Details)
    audio: Audio | None = None
    """The audio of a transcription."""


_DECODER = msgspec.json.Decoder(Body)


def read_engine_request(
    kind: Kind,
    data: bytes,
    *,
    models: Sequence[str],
    role: Role,
    block_tokens: int,
    adapters: Collection[str] = (),
) -> EmulatedRequest:
    """Parse and validate a body. `models` are the names that the engine serves, its own first; `adapters` of these are
    LoRA adapters.

    Raises:
        Refusal: broken JSON, a field of a wrong type or out of range, a model that is not served.
    """
    try:
        body = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(f"the body cannot be read: {error}") from None
    model = served_model(body.model, models)
    salt = checked_salt(body.cache_salt)
    prompts = _prompts(kind, body, block_tokens, salt)
    if body.model is not None and body.model in adapters:
        prompts = [prompt.with_adapter(body.model, block_tokens) for prompt in prompts]
    n = _bounded(body.n, "n", 1, N_MAX) if kind in ("completions", "chat") else 1
    answers = len(prompts) * n
    leg, tickets = _handles(body, role, answers)
    details = _details(kind, body)
    if kind == "responses":
        details = replace(details, given=msgspec.json.decode(data))
    return EmulatedRequest(
        kind=kind,
        model=model,
        leg=leg,
        prompts=tuple(prompts),
        n=n,
        sampling=_sampling(kind, body, prompt_only=details.prompt_only),
        stream=bool(body.stream),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        tickets=tickets,
        wants_params=leg == "prefill" and body.kv_transfer_params is not None,
        prefix=_prefix(body.kv_transfer_params) if leg == "prefill" else None,
        storage=body.kv_transfer_params.storage if leg == "prefill" and body.kv_transfer_params else None,
        details=details,
    )


def served_model(name: str | None, models: Sequence[str]) -> str:
    """Return the model of a request, the first one if it names none.

    Raises:
        ApiError: no such model is served.
    """
    if name is not None and name not in models:
        what = f"The model `{name}` does not exist; use {' or '.join(models)}"
        raise ApiError(what, status=404, kind="NotFoundError", param="model")
    return name or models[0]


def _sampling(kind: Kind, body: Body, *, prompt_only: bool) -> Sampling:
    bound = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    bound = body.max_output_tokens if kind == "responses" else bound
    if bound is None and kind == "completions":
        bound = COMPLETION_TOKENS
    limit = 1 if prompt_only else bound if bound is None else _bounded(bound, "max_tokens", 1, 2**31 - 1)
    least = body.min_tokens or 0
    if least < 0 or (limit is not None and least > limit):
        what = f"min_tokens must be less than or equal to max_tokens={limit} and not negative, got {least}."
        raise ApiError(what, param="min_tokens")
    stop = body.stop_sequences if kind == "messages" else body.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops) or len(stops) > STOPS_MAX:
        raise ApiError(f"stop has an empty string or more than {STOPS_MAX} strings", param="stop")
    return Sampling(
        limit=limit,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=least,
        stop=stops,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        constraint=read_constraint(kind, body),
    )


_PLAIN = Details()


def _details(kind: Kind, body: Body) -> Details:
    if not (body.return_token_ids or body.echo) and body.logprobs is body.top_logprobs is body.prompt_logprobs is None:
        return _PLAIN
    echo = bool(body.echo)
    return Details(
        token_ids=bool(body.return_token_ids),
        logprobs=_logprobs(kind, body),
        prompt_logprobs=_most_likely(body.prompt_logprobs, "prompt_logprobs"),
        as_ids=bool(body.return_tokens_as_token_ids),
        echo=echo and kind == "completions",
        prompt_only=echo and kind == "completions" and body.max_tokens == 0,
        last_message=_last_message(body) if echo and kind == "chat" else "",
    )


def _logprobs(kind: Kind, body: Body) -> int | None:
    if kind == "completions":
        return _most_likely(None if body.logprobs is None else int(body.logprobs), "logprobs")
    top = _most_likely(body.top_logprobs or 0, "top_logprobs")
    if kind == "responses":
        return top if isinstance(body.include, list) and _OUTPUT_LOGPROBS in body.include else None
    if top and not body.logprobs:
        raise ApiError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return top if body.logprobs and kind == "chat" else None


def _most_likely(number: int | None, name: str) -> int | None:
    """Return a number of tokens at each place; None: none is wanted."""
    if number is not None and not 0 <= number <= LOGPROBS_MAX:
        raise ApiError(f"{name} is {number}; give 0 to {LOGPROBS_MAX}", param=name)
    return number


def _last_message(body: Body) -> str:
    """Return the text of the last message if the assistant said it."""
    last = msgspec.json.decode(body.messages)[-1]
    text = last.get("content") if last["role"] == "assistant" else ""
    return text if isinstance(text, str) else ""


def _prompts(kind: Kind, body: Body, block_tokens: int, salt: str) -> list[EmulatedPrompt]:
    match kind:
        case "completions" | "transcriptions":
            return completion_prompts(body.prompt, block_tokens, salt)
        case "chat":
            return [chat_prompt(body.messages, block_tokens, salt)]
        case "messages":
            return [chat_prompt(body.messages, block_tokens, salt, bytes(body.tools) + bytes(body.system))]
        case "responses":
            return [response_prompt(body.input, block_tokens, salt, bytes(body.tools) + bytes(body.instructions))]


def _bounded(value: int | None, name: str, default: int, most: int) -> int:
    if value is None:
        return default
    if not 1 <= value <= most:
        raise ApiError(f"{name} is {value}; give 1 to {most}", param=name)
    return value


def _handles(body: Body, role: Role, answers: int) -> tuple[Leg, tuple[KvHandle, ...]]:
    if body.bootstrap_room is not None:
        return ("prefill" if role == "prefill" else "decode"), _rooms(body, answers)
    params = body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return "whole", ()
    if answers > 1:
        raise ApiError("kv_transfer_params do not support several choices; use one prompt and n of 1", param="n")
    if params.do_remote_decode:
        return "prefill", (KvHandle(params.transfer_id),) if params.transfer_id else ()
    if params.transfer_id and params.remote_bootstrap_addr:
        host, port = _address(params.remote_bootstrap_addr)
        return "decode", (KvHandle(params.transfer_id, host, port, awaited=True),)
    if params.transfer_id and not params.remote_request_id and params.remote_host and params.remote_port:
        return "decode", (KvHandle(params.transfer_id, params.remote_host, params.remote_port, True, early=True),)
    return "decode", (_forwarded(params),)


def _prefix(params: KvParams | None) -> KvHandle | None:
    return _forwarded(params) if params is not None and params.do_remote_prefill else None


def _forwarded(params: KvParams) -> KvHandle:
    """Return the KV handle in the parameters of another instance's response."""
    if not (params.remote_request_id and params.remote_host and params.remote_port):
        what = "kv_transfer_params lacks remote_request_id, remote_host or remote_port; copy them from prefill"
        raise ApiError(what, param="kv_transfer_params")
    return KvHandle(
        params.remote_request_id,
        params.remote_host,
        params.remote_port,
        tokens=params.remote_num_tokens,
        prefill_cached_tokens=params.remote_prefill_cached_tokens,
        kept=params.kept,
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise ApiError(f"{text!r} is not host:port", param="kv_transfer_params")
    return host, int(port)


def _rooms(body: Body, answers: int) -> tuple[KvHandle, ...]:
    """Return the KV handles of SGLang's bootstrap rooms: one room, or a list with one per answer."""
    rooms = body.bootstrap_room if isinstance(body.bootstrap_room, list) else [body.bootstrap_room]
    hosts = body.bootstrap_host if isinstance(body.bootstrap_host, list) else [body.bootstrap_host or ""] * len(rooms)
    ports = body.bootstrap_port if isinstance(body.bootstrap_port, list) else [body.bootstrap_port or 0] * len(rooms)
    if not len(rooms) == len(hosts) == len(ports) == answers:
        what = f"{len(rooms)} bootstrap rooms, {len(hosts)} hosts and {len(ports)} ports for {answers} choices"
        raise ApiError(f"{what}; give one of each per choice", param="bootstrap_room")
    meetings = zip(rooms, hosts, ports, strict=True)
    return tuple(KvHandle(f"room-{room}", host, port, awaited=True) for room, host, port in meetings)
