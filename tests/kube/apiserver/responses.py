"""Answers as HTTP responses: JSON, YAML or text, with warnings, compressed where the API server compresses."""

from __future__ import annotations

import gzip
import uuid

import msgspec
import yaml
from aiohttp import web
from tests.kube.apiserver.requests import Answer
from tests.kube.apiserver.views import Form

COMPRESS_MIN_BYTES = 128 * 1024
CHUNK_MIN_BYTES = 2 * 1024


def respond(http: web.Request, answer: Answer, form: Form, warnings: list[str]) -> web.StreamResponse:
    """Return the HTTP response of an answer."""
    headers = {**common_headers(), **answer.headers}
    if warnings:
        headers["Warning"] = ", ".join(f'299 - "{_escaped(text)}"' for text in dict.fromkeys(warnings))
    kind = answer.content_type
    if answer.body is None:
        body = b""
    elif isinstance(answer.body, str):
        body = answer.body.encode()
    elif isinstance(answer.body, bytes):
        body = answer.body
    elif form.media == "yaml":
        kind = "application/yaml"
        body = yaml.safe_dump(answer.body, sort_keys=True).encode()
    else:
        body = msgspec.json.encode(answer.body) + b"\n"
    if answer.status != 304:  # a cache would take it for that of the body that it keeps
        headers["Content-Type"] = kind
    chunked = len(body) > CHUNK_MIN_BYTES
    if len(body) > COMPRESS_MIN_BYTES and _accepts_gzip(http.headers.get("Accept-Encoding", "")):
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        body = gzip.compress(body, compresslevel=1)
    response = web.Response(status=answer.status, body=body, headers=headers)
    if chunked:
        response.enable_chunked_encoding()
    return response


def _accepts_gzip(accepted: str) -> bool:
    """Return whether a client takes compressed answers."""
    parts = (part.replace(" ", "") for part in accepted.split(","))
    return any(part.startswith("gzip") and not part.endswith("q=0") for part in parts)


def common_headers() -> dict[str, str]:
    """Return the headers of every answer."""
    return {"Audit-Id": str(uuid.uuid4()), "Cache-Control": "no-cache, private"}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
