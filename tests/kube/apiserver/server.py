"""The API server over HTTP: routing, access, faults, representations, and its own endpoints for tests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web
from tests.kube.apiserver.access import ADMIN, Access, Attributes
from tests.kube.apiserver.api import Api
from tests.kube.apiserver.control import Control
from tests.kube.apiserver.controllers import DeploymentController
from tests.kube.apiserver.discovery import Discovery, page_not_found
from tests.kube.apiserver.faults import Dropped, Fault, Faults, TextAnswer
from tests.kube.apiserver.requests import Answer, Request, User
from tests.kube.apiserver.responses import common_headers, respond
from tests.kube.apiserver.routing import Target, check_method, parse_path, right_scope, verb_of
from tests.kube.apiserver.status import ApiError, Object, Where, unknown_path
from tests.kube.apiserver.status import forbidden as refused
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.views import Form, negotiate
from tests.kube.apiserver.writes import Clock

CONTROL = "_control"
"""First part of the paths that only tests use."""
BODY_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server is started."""

    host: str = "127.0.0.1"
    port: int = 0
    tokens: Mapping[str, User] = field(default_factory=lambda: {"admin": ADMIN})
    journal: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    clock: Clock = lambda: datetime.now(UTC)
    cleanup_s: float = 0.0
    """Time from the deletion of a definition to that of its objects and its own, in seconds."""
    controllers: bool = False
    """Whether the controller of Deployments runs."""


class Server:
    """A running API server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.store = Store(settings.journal)
        self.access = Access(self.store, dict(settings.tokens))
        self.api = Api(self.store, self.access, settings.clock, settings.cleanup_s)
        if settings.controllers:
            DeploymentController(self.store)
        self.faults = Faults()
        self.discovery = Discovery(self.api.catalogue)
        self._control = Control(self.store, self.access, self.faults, self.discovery)
        self.audit = self._control.audit
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> str:
        """Listen; return the URL."""
        app = web.Application(client_max_size=BODY_MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
        await self._runner.setup()
        context = None
        if self._settings.certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._settings.certificate, self._settings.key)
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, ssl_context=context)
        await site.start()
        self.api.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if context else 'http'}://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        """Stop listening, and end all watches."""
        self.api.close()
        self.store.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        parts = [unquote(part) for part in http.rel_url.raw_path.split("/") if part]
        body = await http.read()
        headers = {name.lower(): value for name, value in http.headers.items()}
        warnings: list[str] = []
        form = Form()
        try:
            if parts[:1] == [CONTROL]:
                answer = self._control.answer(parts[1:], body)
            else:
                user = self.access.authenticate(headers)
                target = parse_path(parts)
                if target is None:
                    answer = self._about(http, parts, headers, user)
                else:
                    form = negotiate(headers)
                    return await self._resource(http, target, headers, user, body, form, warnings)
        except ApiError as error:
            answer = Answer(error.code, error.body(), dict(error.headers))
        except TextAnswer as error:
            answer = error.answer
        except Dropped:
            return self._drop(http)
        return respond(http, answer, form, warnings)

    def _about(self, http: web.Request, parts: list[str], headers: Mapping[str, str], user: User) -> Answer:
        path = "/" + "/".join(parts)
        if not self.access.allows_path(user, path):
            text = f'forbidden: User "{user.name}" cannot get path "{path}"'
            raise ApiError(403, "Forbidden", text, {})
        form = negotiate(headers) if parts[:1] in (["api"], ["apis"]) else Form()
        query = {name: http.query.getall(name) for name in http.query}
        return self.discovery.answer(http.method, parts, form, headers.get("if-none-match", ""), query)

    async def _resource(
        self, http: web.Request, target: Target, headers: Mapping[str, str], user: User, body: bytes, form: Form,
        warnings: list[str],
    ) -> web.StreamResponse:  # fmt: skip
        query = {name: http.query.getall(name) for name in http.query}
        verb = verb_of(http.method, target, query)
        wanted = Attributes(
            verb, target.group, target.plural, target.subresource,
            target.namespace or (target.name if target.plural == "namespaces" else ""), target.name,
        )  # fmt: skip
        user = self.access.impersonate(user, headers, wanted)
        self._record(user, wanted, http)
        fault = await self._inject(http, wanted, query)
        if not self.access.allows(user, wanted):
            raise refused(Where(target.group, target.plural, target.name), wanted.sentence(user))
        resource = self.api.catalogue.find(target.group, target.version, target.plural)
        if resource is None or not right_scope(resource, target):
            return respond(http, self._unknown(target), form, warnings)
        request = Request(
            http.method, query, headers, body, user, verb, resource, target.namespace, target.name,
            target.subresource, warnings,
        )  # fmt: skip
        check_method(request)
        if verb == "watch":
            return await self._watch(http, request, form)
        answer = await self.api.answer(request, form)
        if fault is not None and fault.after:
            _break(fault)
        return respond(http, answer, form, warnings)

    def _unknown(self, target: Target) -> Answer:
        if target.group == "" or self.api.catalogue.has_built_in_group(target.group):
            raise unknown_path()
        return page_not_found()

    def _record(self, user: User, wanted: Attributes, http: web.Request) -> None:
        entry: Object = {"user": user.name, "verb": wanted.verb, "group": wanted.group, "resource": wanted.resource}
        entry |= {"namespace": wanted.namespace, "name": wanted.name, "agent": http.headers.get("User-Agent", "")}
        entry["time_s"] = time.time()
        self.audit.append(entry)

    async def _inject(self, http: web.Request, wanted: Attributes, query: Mapping[str, list[str]]) -> Fault | None:
        """Return the fault of a request, which has happened unless it is to follow the request."""
        fault = self.faults.take(wanted.verb, wanted.resource, http.path_qs, http.headers.get("User-Agent", ""))
        if fault is not None:
            await asyncio.sleep(fault.delay_s)
            if not fault.after:
                _break(fault)
        cached = wanted.verb == "watch" or query.get("resourceVersion") == ["0"]
        await self.faults.pass_storage(cached and wanted.verb in ("get", "list", "watch"))
        return fault

    async def _watch(self, http: web.Request, request: Request, form: Form) -> web.StreamResponse:
        if form.media != "json":
            raise ApiError(406, "NotAcceptable", "406: Not Acceptable", {})
        watch = self.api.watch(request, form)
        response = web.StreamResponse(headers={"Content-Type": "application/json", **common_headers()})
        await response.prepare(http)
        self._control.watches[id(http)] = http
        try:
            async for chunk in watch.lines():
                await response.write(chunk)
            await response.write_eof()
        except ConnectionError:
            pass
        finally:
            self._control.watches.pop(id(http), None)
        return response

    def _drop(self, http: web.Request) -> web.StreamResponse:
        if http.transport is not None:
            http.transport.abort()
        return web.Response(status=500)


def _break(fault: Fault) -> None:
    """Raise what a fault answers, if it answers."""
    if fault.drop:
        raise Dropped
    if fault.code == 429 and fault.text:
        raise TextAnswer(fault.text_answer())
    if fault.code:
        raise fault.error()
