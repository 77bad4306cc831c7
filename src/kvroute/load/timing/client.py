"""The calls to an engine's OpenAI API, and the times at which its tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvroute.types import InputError

_CHARS = 200
_DATA, _DONE = b"data:", b"[DONE]"
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Whole:
    """One response of one token."""

    seconds: float
    cached_tokens: int | None
    """Prompt tokens that the engine had cached; None: it does not say."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class EngineApi:
    """One engine. Every method raises an InputError if the engine does not answer as an OpenAI API does."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str = "") -> None:
        """Args:

        session: for its connections, without a limit of their number and of the time.
        url: `http://host:port`, also with `/v1`.
        key: the engine's API key; empty: none.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is not an address", where="URL", hint="give http://host:port")
        self._session = session
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        """Name of its model; empty before `meet`."""
        self.context_tokens = 0
        """Longest sequence; 0: unknown."""

    async def meet(self) -> None:
        """Ask for the model and its context."""
        try:
            cards = msgspec.json.decode(await self._get("/v1/models"), type=_Cards).data
        except msgspec.MsgspecError:
            raise InputError(f"{self.url}/v1/models lists no models", hint="give the URL of an engine") from None
        if not cards:
            raise InputError(f"{self.url} serves no model", hint="wait until it is ready")
        self.model, self.context_tokens = cards[0].id, cards[0].max_model_len or 0

    async def is_vllm(self) -> bool:
        """Return whether its metrics are those of vLLM."""
        return "\nvllm:" in await self._metrics()

    async def running(self) -> int | None:
        """Return the number of requests that the engine processes, by vLLM's or SGLang's metrics; None if unknown."""
        page = await self._metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs")
        found = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(names)]
        return int(sum(found)) if found else None

    async def _metrics(self) -> str:
        """Return the page of its metrics; empty if it has none."""
        try:
            return (await self._get("/metrics")).decode()
        except InputError:
            return ""

    async def first_token(self, prompt: list[int]) -> Whole:
        """Return the time of a response of one token."""
        posted = self._post(prompt, 1, stream=False)
        async with posted as response:
            body = await response.read()
            seconds = time.perf_counter() - posted.sent_s
            self._check(response, body)
        try:
            usage = msgspec.json.decode(body, type=_Answer).usage
        except msgspec.MsgspecError:
            raise InputError(f"{self.url} sent no valid completion", hint="give the URL of an engine") from None
        details = usage.prompt_tokens_details if usage is not None else None
        return Whole(seconds, details.cached_tokens if details is not None else None)

    async def first_tokens_s(self, prompts: list[list[int]]) -> float:
        """Return the time of responses of one token to requests that start together, until the last one."""
        started_s = time.perf_counter()
        await _together([self.first_token(prompt) for prompt in prompts])
        return time.perf_counter() - started_s

    async def token_times_s(self, prompt: list[int], tokens: int) -> list[float]:
        """Return the times, on the clock of `time.perf_counter`, at which the events of a stream arrive."""
        arrived = []
        async with self._post(prompt, tokens, stream=True) as response:
            if response.status != 200:
                self._check(response, await response.read())
            async for line in response.content:
                if line.startswith(_DATA) and _DONE not in line:
                    arrived.append(time.perf_counter())
                    if b'"error"' in line[:20]:
                        raise InputError(f"{self.url} ended a stream with an error: {_text(line)}", hint="see its log")
        return arrived

    async def batch_times_s(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """Return `token_times_s` of requests that start together."""
        return await _together([self.token_times_s(prompt, tokens) for prompt in prompts])

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(self.url + path, headers=self._headers) as response:
                body = await response.read()
                self._check(response, body)
                return body
        except (aiohttp.ClientError, OSError) as error:
            raise self._silent(error) from None

    def _post(self, prompt: list[int], tokens: int, *, stream: bool) -> _Posted:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        return _Posted(self, lambda: self._session.post(f"{self.url}/v1/completions", json=body, headers=self._headers))

    def _check(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        if response.status != 200:
            what = f"{response.url} answers {response.status}: {_text(body)}"
            hint = "name the variable with its key (--key-env)" if response.status in (401, 403) else "see its log"
            raise InputError(what, hint=hint)

    def _silent(self, error: Exception) -> InputError:
        return InputError(f"{self.url} does not answer ({error})", hint="check the address, and that the engine runs")


class _Posted:
    """A response as a context; broken connections become an InputError.

    If the connection ends without a response, the request is sent again once: the engine may have closed it because it
    was idle.
    """

    def __init__(self, engine: EngineApi, send: Callable[[], aiohttp.client._RequestContextManager]) -> None:
        self._engine, self._send = engine, send
        self._response: aiohttp.client._RequestContextManager
        self.sent_s = 0.0
        """When it was sent, on the clock of `time.perf_counter`."""

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            try:
                return await self._begin()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                return await self._begin()
        except (aiohttp.ClientError, OSError) as error:
            raise self._engine._silent(error) from None

    async def _begin(self) -> aiohttp.ClientResponse:
        self.sent_s = time.perf_counter()
        self._response = self._send()
        return await self._response.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._response.__aexit__(kind, error, None)
        if isinstance(error, aiohttp.ClientError | OSError):
            raise self._engine._silent(error) from None


async def _together(requests: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of requests that start together; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _text(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:_CHARS]
