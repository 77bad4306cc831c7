"""HTTPS server of the webhooks: `/validate` and `/mutate` for the API server, `/healthz` and `/readyz` for probes."""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from kvroute.kube.admission.certificates import CertificatePair
from kvroute.kube.admission.injection import InjectionSpec, inject
from kvroute.kube.admission.review import AdmissionRequest, ReviewResponse, read_review, response_body
from kvroute.kube.admission.validation import AdmissionView, validate
from kvroute.types import InputError, cannot_listen
from kvroute_engine.addresses import host_port
from kvroute_engine.timed_connection import ConnectionLimits, answer_whole, listen

_LONGEST_BODY = 8 * 2**20
"""The API server accepts objects of 3 MiB; a review has two of them."""
_CONTENT_TYPE = "application/json"


class WebhookServer:
    """Serves admission reviews over HTTPS. `view` returns what is known of the cluster, or None before that is
    complete; until then reviews get status 503, so that the API server follows the webhook's failurePolicy."""

    def __init__(
        self,
        view: Callable[[], AdmissionView | None],
        settings: InjectionSpec,
        pair: CertificatePair,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Args: `limits` of connections, other than the defaults."""
        self._view, self._settings, self._limits = view, settings, limits or ConnectionLimits()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.use(pair)
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    def use(self, pair: CertificatePair) -> None:
        """Serve new connections with this certificate; open connections keep theirs."""
        with tempfile.TemporaryDirectory() as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_bytes(pair.certificate)
            with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(pair.key)
            self._context.load_cert_chain(certificate, key)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            InputError: the address cannot be used.
        """
        app = web.Application(client_max_size=_LONGEST_BODY, middlewares=[_timed])
        app.router.add_post("/validate", self._validate)
        app.router.add_post("/mutate", self._mutate)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        handlers = self._runner.server
        assert handlers is not None, "set up"
        try:
            self._listening = await listen(handlers, host, port, self._limits, self._context)
        except OSError as error:
            raise cannot_listen(host_port(host, port), error.errno, error.strerror or str(error)) from error
        drawn: int = self._listening.sockets[0].getsockname()[1]
        return drawn

    async def stop(self) -> None:
        """Finish open reviews and close the port."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _validate(self, request: web.Request) -> web.Response:
        return await self._answer(request, validate)

    async def _mutate(self, request: web.Request) -> web.Response:
        return await self._answer(request, lambda review, view: inject(review, view, self._settings))

    async def _answer(
        self, request: web.Request, judge: Callable[[AdmissionRequest, AdmissionView], ReviewResponse]
    ) -> web.Response:
        view = self._view()
        if view is None:
            return web.Response(status=503, text="the operator has not read the cluster yet\n")
        try:
            review = read_review(await request.read())
        except InputError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=response_body(review, judge(review, view)), content_type=_CONTENT_TYPE)

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._view() is not None
        return web.Response(status=200 if ready else 503, text="ok\n" if ready else "the cluster is not read yet\n")


@web.middleware
async def _timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Read the whole request before it is answered, within the limits of its connection."""
    return await answer_whole(request, handler)
