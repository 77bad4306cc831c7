"""Replay of recorded cases against the API server of the tests, over HTTP, in the order of a file."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import yaml
from tests.kube.apiserver.access import ADMIN, AUTHENTICATED
from tests.kube.apiserver.requests import User
from tests.kube.apiserver.server import Server, Settings
from tests.kube.condensed import TRIMMED, ageless, condensed, condensed_event, without_omitted
from tests.kube.scenario import Scenario, Step
from tests.kube.transcripts import HEADERS, Bindings, Case, Mismatch, unordered
from tests.kube.webhook_replies import WebhookReplies
from yarl import URL

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
USERS = {
    "admin": ADMIN,
    "nobody": User("nobody", "u3", ("nobodies", AUTHENTICATED)),
    "viewer": User("viewer", "u2", ("viewers", AUTHENTICATED)),
}
QUIET_S = 0.15
"""How long a watch must stay silent where the recording was silent for seconds."""
EVENT_LIMIT_S = 60.0


def split_path(path: str) -> tuple[str, list[tuple[str, str]]]:
    """Return path and parameters of a recorded path, which is not escaped."""
    bare, _, query = path.partition("?")
    pairs = []
    for part in _pieces(query):
        name, _, value = part.partition("=")
        pairs.append((name, value))
    return bare, pairs


def _pieces(query: str) -> list[str]:
    return query.split("&") if query else []


class Replay:
    """One file against one server."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._folder = tempfile.TemporaryDirectory()
        self.server = self._made()
        self.bindings = Bindings()
        self._session: aiohttp.ClientSession | None = None
        self.tokens: dict[str, str] = {}
        self.fresh = dict(scenario.fresh)
        self.webhooks = WebhookReplies() if scenario.webhooks else None

    def _made(self) -> Server:
        """Return a server on the journal of this replay, at noon."""
        journal = Path(self._folder.name) / "journal"
        return Server(Settings(tokens=dict(USERS), clock=lambda: NOON, journal=journal))

    async def start(self) -> None:
        """Start the server and a client."""
        await self.server.start()
        if self.webhooks is not None:
            self.fresh |= await self.webhooks.start()
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def stop(self) -> None:
        """Stop both."""
        assert self._session is not None
        await self._session.close()
        if self.webhooks is not None:
            await self.webhooks.stop()
        await self.server.stop()
        self._folder.cleanup()

    async def observe(self, case: Case) -> bool:
        """Make an observation again, and compare it; return whether the scenario knows how."""
        observe = self._scenario.observations.get(case.name)
        if observe is None:
            return False
        text = json.dumps(case.fact)
        for generated, placeholder in self._scenario.substitutes.items():
            text = text.replace(generated, placeholder)
        self.bindings.compare(json.loads(text), await observe(self))
        return True

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and answer of a request of the administrator."""
        assert self._session is not None
        sent = {"Authorization": "Bearer admin", "User-Agent": "recorder/1", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._url(path), data=data, headers={**sent, **(headers or {})}
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def head(self, path: str, headers: Mapping[str, str]) -> tuple[dict[str, str], int]:
        """Return the headers of an answer, and its size when it is not compressed."""
        assert self._session is not None
        sent = {"Authorization": "Bearer admin", **headers}
        async with self._session.get(self._url(path), headers=sent) as answer:
            body = await answer.read()
            found = {name.lower(): value for name, value in answer.headers.items()}
            return found, len(gzip.decompress(body) if found.get("content-encoding") == "gzip" else body)

    def _url(self, path: str) -> URL:
        bare, pairs = split_path(path)
        text = quote(bare, safe="/:")
        if pairs or "?" in path:
            text += "?" + "&".join(f"{quote(name)}={quote(value, safe='')}" for name, value in pairs)
        return URL(self.server.url + text, encoded=True)

    async def step(self, step: Step) -> Any:
        """Make a request that was not recorded; raise AssertionError if it fails."""
        assert self._session is not None
        if step.method == "RESTART":
            await self.server.stop()
            self.server = self._made()
            return await self.server.start()
        path = self.bindings.fill(step.path, self.fresh)
        headers = {"Authorization": "Bearer admin", "User-Agent": "recorder/1", "Content-Type": step.media}
        data = None if step.body is None else self.bindings.fill(json.dumps(step.body), self.fresh)
        while True:
            async with self._session.request(step.method, self._url(path), data=data, headers=headers) as answer:
                text = await answer.text()
                found: Any = json.loads(text) if text.startswith(("{", "[")) else text
            if step.until is None:
                assert answer.status < 300, f"{step.method} {path}: {answer.status} {text[:500]}"
                break
            if step.until(found):
                break
            await asyncio.sleep(0.01)
        if step.token:
            self.tokens[step.token] = found["status"]["token"]
        for name, where in step.binds.items():
            value: Any = found
            for part in where.split("."):
                value = value[part]
            self.bindings.bind(name, str(value))
        return found

    async def prepare(self, case: Case) -> None:
        """Make the unrecorded requests before a case."""
        for step in self._scenario.before.get(case.name, ()):
            await self.step(step)

    async def run(self, case: Case) -> None:
        """Replay a case; raise Mismatch if the answer is another one."""
        assert case.request is not None
        before = self.bindings.copy()
        try:
            if case.watch:
                await self._run_watch(case)
            else:
                await self._run_request(case)
        except Mismatch:
            self._learn(case, before)
            raise

    def _learn(self, case: Case, before: Bindings) -> None:
        """Keep what a mismatched answer still tells: without its uid and versions later cases could not be made."""
        self.bindings = before

    def _headers(self, case: Case) -> dict[str, str]:
        assert case.request is not None
        recorded = dict(case.request.get("headers", {}))
        headers = {"Accept": "application/json", "User-Agent": "recorder/1", "Authorization": "Bearer admin"}
        if "body" in case.request and case.name not in self._scenario.without_media:
            headers["Content-Type"] = "application/json"
        for name, value in recorded.items():
            headers[name.title()] = self.bindings.fill(value, self.fresh)
        authorization = headers["Authorization"]
        if authorization == "(none)":
            del headers["Authorization"]
        elif "<" in authorization:
            name = authorization.partition("<")[2].rstrip(">")
            headers["Authorization"] = f"Bearer {self.tokens.get(name, name)}"
        return headers

    def _body(self, case: Case) -> bytes | None:
        assert case.request is not None
        if case.name in self._scenario.bodies:
            return self._scenario.bodies[case.name]
        if case.name in self._scenario.texts:
            return self.bindings.fill(self._scenario.texts[case.name], self.fresh).encode()
        if "body" not in case.request:
            return None
        body = case.request["body"]
        if isinstance(body, dict) and body.keys() == {"raw"}:
            return str(body["raw"]).encode()
        text = json.dumps(without_omitted(body))
        return self.bindings.fill(text, self.fresh).encode()

    async def _run_request(self, case: Case) -> None:
        assert self._session is not None
        assert case.request is not None
        path = self.bindings.fill(case.request["path"], self.fresh)
        async with self._session.request(
            case.request["method"], self._url(path), data=_stream(self._body(case)), headers=self._headers(case),
            allow_redirects=False, skip_auto_headers=("Content-Type", "Accept", "User-Agent"),
        ) as answer:  # fmt: skip
            text = (await answer.read()).decode(errors="replace")
            self._compare_head(case, answer)
        wanted = case.response.get("body")
        if wanted == TRIMMED or wanted is None:
            return
        if isinstance(wanted, dict) and wanted.keys() == {"raw"}:
            self._compare_raw(str(wanted["raw"]), text)
            return
        found = json.loads(text)
        project = self._scenario.projections.get(case.name)
        found = condensed(wanted, project(found) if project else found)
        self.bindings.compare(unordered(wanted), unordered(found))

    def _compare_raw(self, wanted: str, text: str) -> None:
        """Compare a text; YAML by its value, because writers differ in quotes and indentation."""
        if wanted.startswith("apiVersion:"):
            loaded = yaml.load(wanted, Loader=yaml.BaseLoader)
            self.bindings.compare(loaded, yaml.load(text, Loader=yaml.BaseLoader))
            return
        self.bindings.compare(wanted, text)

    def _compare_head(self, case: Case, answer: aiohttp.ClientResponse) -> None:
        if answer.status != case.response["status"]:
            raise Mismatch(f"status {answer.status} instead of {case.response['status']}")
        recorded = case.response.get("headers", {})
        for name in HEADERS:
            found, wanted = answer.headers.get(name), recorded.get(name)
            if (found is None) != (wanted is None):
                raise Mismatch(f"header {name}: {found!r} instead of {wanted!r}")
            if wanted is not None:
                self.bindings.compare(wanted, found, f"header {name}")
        kind = recorded.get("content-type", "application/json")
        if case.response.get("body") is not None and answer.headers.get("content-type") != kind:
            raise Mismatch(f"content type {answer.headers.get('content-type')!r} instead of {kind!r}")

    async def _run_watch(self, case: Case) -> None:
        assert self._session is not None
        assert case.request is not None
        path = self.bindings.fill(case.request["path"], self.fresh)
        async with self._session.get(self._url(path), headers=self._headers(case)) as answer:
            self._compare_head(case, answer)
            lines = Lines(answer)
            steps = self._scenario.during.get(case.name, ())
            wanted = [ageless(event) for event in case.response["events"]]
            end = str(case.response["end"])
            await self._compare_events(wanted, lines, steps)
            if end.startswith("server ended"):
                extra = await lines.take(EVENT_LIMIT_S)
                if extra is not None:
                    raise Mismatch(f"one more event: {extra}")
                if not lines.ended:
                    raise Mismatch("the server did not end the stream")
            elif end.startswith("still open"):
                extra = await lines.take(QUIET_S)
                if extra is not None or lines.ended:
                    raise Mismatch(f"the stream ended, or one more event: {extra}")

    async def _compare_events(self, wanted: list[Any], lines: Lines, steps: Sequence[Step]) -> None:
        made = False
        for number, event in enumerate(wanted):
            line = await lines.take(QUIET_S if steps and not made else EVENT_LIMIT_S)
            if line is None and not made:
                for step in steps:
                    await self.step(step)
                made = True
                line = await lines.take(EVENT_LIMIT_S)
            if line is None:
                raise Mismatch(f"no event {number}")
            found = line if isinstance(event, dict) and event.keys() == {"raw"} else json.loads(line)
            if isinstance(found, str):
                self.bindings.compare(event["raw"], found, f"event {number}")
            else:
                self.bindings.compare(event, condensed_event(event, found), f"event {number}")
        if not made:
            for step in steps:
                await self.step(step)


class Lines:
    """The lines of a stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.ended = False

    async def take(self, limit_s: float) -> str | None:
        """Return the next line, or None at the limit or the end."""
        try:
            line = await asyncio.wait_for(self._answer.content.readline(), limit_s)
        except TimeoutError:
            return None
        if not line:
            self.ended = True
            return None
        return line.decode().rstrip("\n")


def _stream(body: bytes | None) -> io.BytesIO | None:
    """Return a body as a stream, because the client warns of large bytes."""
    return None if body is None else io.BytesIO(body)
