"""What tests tell the server on paths of their own: faults, watches, history, audit, tokens."""

from __future__ import annotations

from collections import deque

import msgspec
from aiohttp import web
from tests.kube.apiserver.access import Access
from tests.kube.apiserver.discovery import TEXT, Discovery, page_not_found
from tests.kube.apiserver.faults import Fault, Faults
from tests.kube.apiserver.requests import Answer, User
from tests.kube.apiserver.status import Object
from tests.kube.apiserver.store import Store

AUDIT_MAX = 200_000


class Control:
    """Answers the requests of tests."""

    def __init__(self, store: Store, access: Access, faults: Faults, discovery: Discovery) -> None:
        self.store = store
        self.access = access
        self.faults = faults
        self.discovery = discovery
        self.audit: deque[Object] = deque(maxlen=AUDIT_MAX)
        self.watches: dict[int, web.Request] = {}
        """Requests whose watch is open, by their identity."""

    def answer(self, parts: list[str], body: bytes) -> Answer:
        """Answer one; a body of another form is 400 with a text that names the field."""
        try:
            return self._answer(parts, body)
        except (msgspec.DecodeError, KeyError) as error:
            return Answer(400, f"/_control/{'/'.join(parts)}: {error}\n", content_type=TEXT)

    def _answer(self, parts: list[str], body: bytes) -> Answer:
        """Answer a test's own request: faults, watches, history, audit, tokens."""
        found: Object = msgspec.json.decode(body) if body else {}
        match parts:
            case ["faults"]:
                self.faults.waiting.append(msgspec.convert(found, Fault))
            case ["clear"]:
                self.faults.clear()
            case ["freeze"]:
                self.faults.frozen_timeout_s = float(found.get("timeout_s", self.faults.frozen_timeout_s))
                self.faults.thawed.clear()
                self.discovery.healthy = False
            case ["thaw"]:
                self.faults.thawed.set()
                self.discovery.healthy = True
            case ["compact"]:
                self.store.compact(cached=bool(found.get("cached", True)))
            case ["drop-watches"]:
                for watch in list(self.watches.values()):
                    if watch.transport is not None:
                        watch.transport.abort()
            case ["end-watches"]:
                self.store.end_watches()
            case ["audit"]:
                return Answer(200, {"requests": list(self.audit)})
            case ["clear-audit"]:
                self.audit.clear()
            case ["tokens"]:
                groups = tuple(found.get("groups", ("system:authenticated",)))
                self.access.tokens[found["token"]] = User(found["user"], found.get("uid", ""), groups)
            case ["state"]:
                pass
            case _:
                return page_not_found()
        state = {"version": self.store.version, "watches": self.store.watchers, "faults": self.faults.state()}
        return Answer(200, state)
