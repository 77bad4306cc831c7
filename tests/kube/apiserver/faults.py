"""Faults that tests inject: failed or delayed requests, a frozen storage, dropped watches, lost history."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
from tests.kube.apiserver.admission import throttled
from tests.kube.apiserver.requests import Answer
from tests.kube.apiserver.status import ApiError, Object

FROZEN_TIMEOUT_S = 34.0
CONFLICT_TEXT = "the object has been modified; please apply your changes to the latest version and try again"


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What happens to the next `count` requests that match; -1 is every one until the faults are cleared."""

    count: int = 1
    skip: int = 0
    """How many requests that match pass before the first one that does not."""
    verbs: list[str] = []
    resource: str = ""
    path: str = ""
    user_agent: str = ""
    delay_s: float = 0.0
    code: int = 0
    """Status of the answer; 0 lets the request go on after the delay. 429 is a Status with Retry-After."""
    text: bool = False
    """Whether 429 is a text, as priority and fairness answers it."""
    retry_after_s: int = 1
    drop: bool = False
    """Whether the connection is closed without an answer."""
    after: bool = False
    """Whether the request is carried out before its answer is replaced."""

    def matches(self, verb: str, resource: str, path: str, agent: str) -> bool:
        """Return whether the fault is for a request."""
        return (
            self.count != 0
            and (not self.verbs or verb in self.verbs)
            and (not self.resource or self.resource == resource)
            and self.path in path
            and self.user_agent in agent
        )

    def text_answer(self) -> Answer:
        """Return 429 as priority and fairness answers it."""
        headers = {"Retry-After": str(self.retry_after_s), "X-Content-Type-Options": "nosniff"}
        text = "Too many requests, please try again later.\n"
        return Answer(429, text, headers, "text/plain; charset=utf-8")

    def error(self) -> ApiError:
        """Return the answer of the fault."""
        if self.code == 429:
            return throttled(
                "the server has received too many requests and has asked us to try again later", self.retry_after_s
            )
        if self.code == 504:
            return ApiError(504, "Timeout", "Timeout: request did not complete within requested timeout", {})
        if self.code == 409:
            return ApiError(409, "Conflict", f"Operation cannot be fulfilled: {CONFLICT_TEXT}", {})
        reasons = {500: "InternalError", 503: "ServiceUnavailable", 401: "Unauthorized", 403: "Forbidden"}
        return ApiError(self.code, reasons.get(self.code, ""), f"injected fault {self.code}", {})


class TextAnswer(Exception):
    """An answer that is no Status object."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Dropped(Exception):
    """The connection of this request is closed without an answer."""


@dataclass(slots=True)
class Faults:
    """The faults in force."""

    waiting: list[Fault] = field(default_factory=list)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)
    frozen_timeout_s: float = FROZEN_TIMEOUT_S

    def __post_init__(self) -> None:
        self.thawed.set()

    def clear(self) -> None:
        """Remove all faults."""
        self.waiting.clear()
        self.thawed.set()

    def take(self, verb: str, resource: str, path: str, agent: str) -> Fault | None:
        """Return the fault for a request, and count it."""
        found = next((fault for fault in self.waiting if fault.matches(verb, resource, path, agent)), None)
        if found is not None and found.skip:
            found.skip -= 1
            return None
        if found is not None and found.count > 0:
            found.count -= 1
        return found

    async def pass_storage(self, cached: bool) -> None:
        """Wait while the storage is frozen; raise ApiError 504 at the limit. Cached reads do not need it."""
        if cached or self.thawed.is_set():
            return
        try:
            async with asyncio.timeout(self.frozen_timeout_s):
                await self.thawed.wait()
        except TimeoutError:
            text = "Timeout: request did not complete within requested timeout - context deadline exceeded"
            raise ApiError(504, "Timeout", text, {}) from None

    def state(self) -> list[Object]:
        """Return the faults in force as JSON."""
        return [msgspec.to_builtins(fault) for fault in self.waiting if fault.count]
