"""A webhook server with an answer of its own on each path: every form of refusal and failure that was recorded."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.kube import certificates

SHOWN_HEADERS = ("User-Agent", "Accept", "Content-Type", "Accept-Encoding")
INJECT: list[Mapping[str, Any]] = [{"op": "add", "path": "/data/injected", "value": "1"}]
DENIED = "no such level 'block'"
STATUSES: Mapping[str, Mapping[str, Any] | None] = {
    "deny": {"message": DENIED},
    "deny-code": {"code": 422, "reason": "Invalid", "message": "bad topology"},
    "deny-418": {"code": 418, "message": "teapot"},
    "deny-200": {"code": 200, "message": "code below 400"},
    "deny-details": {
        "code": 422, "reason": "Invalid", "message": "m",
        "details": {
            "causes": [{"reason": "FieldValueInvalid", "message": "unknown", "field": "spec.level"}],
            "retryAfterSeconds": 3,
        },
    },
    "deny-empty": None,
    "warn-deny": None,
}  # fmt: skip
WARNINGS: Mapping[str, list[str]] = {
    "warn": ["first warning", "x" * 300, 'third "quoted"'], "warn-deny": ["denied with warning"],
}  # fmt: skip
PATCHES: Mapping[str, list[Mapping[str, Any]]] = {
    "patch": INJECT,
    "patch-notype": INJECT,
    "patch-badop": [{"op": "replace", "path": "/nope/x", "value": 1}],
    "patch-invalid": [{"op": "add", "path": "/metadata/labels", "value": {"a": "a b"}}],
    "patch-unknown-field": [{"op": "add", "path": "/nope", "value": 1}],
    "patch-rename": [{"op": "replace", "path": "/metadata/name", "value": "renamed"}],
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call: path with parameters, headers, and the review."""

    url: str
    headers: Mapping[str, str]
    review: Any


class WebhookReplies:
    """The server. `start` returns what recorded configurations need: port and authority."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._folder = tempfile.TemporaryDirectory()
        self._runner: web.AppRunner | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> dict[str, str]:
        """Listen; return the values of `<port>`, `<caBundle>`, and `<other>`, an authority that is not the server's."""
        folder = Path(self._folder.name)
        own = await asyncio.to_thread(certificates.make, folder)
        other = await asyncio.to_thread(certificates.make, folder, "other")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(own.certificate, own.key)
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        port = str(self._runner.addresses[0][1])
        authorities = {"caBundle": own, "other": other}
        return {"port": port} | {name: base64.b64encode(made.pem()).decode() for name, made in authorities.items()}

    async def stop(self) -> None:
        """Stop listening."""
        self._stopped.set()
        assert self._runner is not None
        await self._runner.cleanup()
        self._folder.cleanup()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        review = await http.json()
        path = http.match_info["path"]
        headers = {name: http.headers[name] for name in SHOWN_HEADERS if name in http.headers}
        self.calls.append(Call(http.path_qs, headers, review))
        match path:
            case "http500":
                return web.Response(status=500, text="broken")
            case "garbage":
                return web.json_response("garbage")
            case "slow":
                await self._stopped.wait()
            case "close":
                assert http.transport is not None
                http.transport.close()
        return web.json_response(self._review(path, review))

    def _review(self, path: str, review: Any) -> Any:
        response = self._response(path, review)
        versions = {"no-version": None, "wrong-version": "admission.k8s.io/v1beta1"}
        version = versions.get(path, "admission.k8s.io/v1")
        made: dict[str, Any] = {"apiVersion": version, "kind": "AdmissionReview"} if version else {}
        return made if path == "no-response" else {**made, "response": response}

    def _response(self, path: str, review: Any) -> Any:
        uid = "nope" if path == "wrong-uid" else review["request"]["uid"]
        made: dict[str, Any] = {"uid": uid, "allowed": path not in STATUSES}
        if STATUSES.get(path) is not None:
            made["status"] = STATUSES[path]
        if path in WARNINGS:
            made["warnings"] = WARNINGS[path]
        patch = PATCHES.get(path)
        if path == "patch2":
            seen = "injected" in review["request"]["object"].get("data", {})
            patch = [{"op": "add", "path": "/data/second", "value": "saw-injected" if seen else "first"}]
        if patch is not None:
            made["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
            if path != "patch-notype":
                made["patchType"] = "JSONPatch"
        if path == "patch-not-base64":
            made |= {"patch": "!!!", "patchType": "JSONPatch"}
        return made
