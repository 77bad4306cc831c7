"""Fields between engines reach no engine, whatever content type a body has, and however it is written."""

from __future__ import annotations

import json
import re
from email import message_from_bytes
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import pytest
from aiohttp import FormData, web
from tests.serve.rig import MODEL, GatewayResponse, RunningGateway
from tests.serve.stub_engines import Engine, ReceivedRequest, run, stub_rig

from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.api.json_fields import ENGINE_FIELDS

ANY_TYPE = ("/v2/embed", "/v1/audio/transcriptions", "/v1/responses/x")
PATHS = [*ANY_TYPE, "/v1/embeddings", "/v1/messages", "/v1/completions"]
TYPES = ["application/json", "text/plain", "application/json-patch", "", "multipart/form-data; boundary=x"]
TYPES += ["APPLICATION/JSON ; x=y", "application/vnd.api+json", "application/octet-stream", "application/jsonl", "*/*"]
TYPES += ["application/x-www-form-urlencoded", "multipart/mixed; boundary=x", "text/plain, application/json", "json"]
EVIL = {"kv_transfer_params": {"do_remote_prefill": True}, "bootstrap_host": "192.0.2.1", "rid": "a"}
FIELDS = {"model": MODEL, "input": "a", "prompt": "a", "messages": [], "max_tokens": 1}
SECTION = "  passthrough: [/v2/embed, /inference/*]\n"
KEYS = f"  keys: {{known: {{a: '{hash_text('one')}'}}}}\n  cache_salt: per-key\n"


async def answers(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Answer any request."""
    return web.json_response({"choices": [{"index": 0, "text": "a"}], "usage": {"completion_tokens": 1}})


def engine_of() -> Engine:
    return Engine("engine0", "both", serve=answers)


async def post(front: RunningGateway, path: str, body: Any, kind: str = "", **headers: str) -> GatewayResponse:
    """Send a body with this content type; empty: that of the body, or none."""
    if kind:
        headers |= {"Content-Type": kind}
    skip = () if kind or isinstance(body, FormData) else ("Content-Type",)
    url = front.url + path
    async with front.session.post(url, data=body, headers=headers, skip_auto_headers=skip) as response:
        return GatewayResponse(response.status, {}, await response.read())


@pytest.mark.parametrize("path", PATHS)
def test_json_of_any_content_type_is_stripped_or_refused(path: str) -> None:
    """Engines parse a body as JSON whatever its content type is."""
    spellings = [
        json.dumps(FIELDS | EVIL).encode(),
        b" \n\t" + json.dumps(EVIL | FIELDS).encode(),
        json.dumps(FIELDS)[:-1].encode() + rb',"\u006bv_transfer_params":{"a":1},"bootstrap_\u0068ost":"192.0.2.1"}',
        json.dumps(FIELDS)[:-1].encode() + b',"kv_transfer_params":{"a":1},"kv_transfer_params":null,"x":1}',
        b"\xef\xbb\xbf" + json.dumps(FIELDS | EVIL).encode(),
        json.dumps(FIELDS | EVIL).encode("utf-16"),
        json.dumps(FIELDS | EVIL).encode("utf-32-be"),
        json.dumps(FIELDS | EVIL | {"x": float("nan")}).encode(),
        b"[" + json.dumps(FIELDS | EVIL).encode() + b"]",
        json.dumps(FIELDS | {"vllm_xargs": EVIL}).encode(),
        json.dumps(FIELDS | {"sampling_params": {"extra_args": EVIL}}).encode(),
        json.dumps(FIELDS | {"sampling_params": [{}, {"extra_args": EVIL}]}).encode(),
        json.dumps(FIELDS | {"extra_body": EVIL}).encode(),
    ]

    async def main() -> None:
        engine = engine_of()
        async with stub_rig([engine], SECTION) as front:
            for kind in TYPES if path in ANY_TYPE else TYPES[:2]:
                for body in spellings:
                    response = await post(front, path, body, kind)
                    if response.status == 200:
                        assert not ENGINE_FIELDS & engine.received.pop().json.keys(), (kind, body)
                    else:
                        assert response.status in (400, 415), (kind, body)
                        message = json.loads(response.body)["error"]
                        assert (message if isinstance(message, str) else message["message"]).count(". ") == 0
            assert engine.received == []

    run(main())


@pytest.mark.parametrize("kind", ["multipart", "urlencoded"])
def test_fields_of_forms_are_stripped_and_salted(kind: str) -> None:
    """The rest of a form is unchanged, in its order; the client's own salt only divides its own cache."""

    async def main() -> None:
        engine = engine_of()
        engine.serve = form_back
        names = [
            "model",
            *sorted(ENGINE_FIELDS),
            "kv_transfer_params[a]",
            "kv_transfer_params.a",
            "prompt",
            "cache_salt",
        ]
        fields = [(name, "a\r\nb") for name in names]
        kept = [field for field in fields if re.split(r"[\[.]", field[0])[0] not in ENGINE_FIELDS]
        for section, key in ((SECTION, {}), (SECTION + KEYS, {"Authorization": "Bearer one"})):
            async with stub_rig([engine], section) as front:
                form = FormData(fields) if kind == "urlencoded" else FormData(default_to_multipart=True)
                if kind == "multipart":
                    for name, value in fields:
                        form.add_field(name, value)
                    form.add_field("file", b"\0\r\n--x\r\n\r\n", filename="a; name=rid.wav", content_type="audio/wav")
                got = json.loads((await post(front, "/v1/audio/transcriptions", form, **key)).body)
                if kind == "multipart":
                    got.remove(["file", "\0\r\n--x\r\n\r\n"])
                if key:
                    (name, salt) = got.pop()
                    assert (name, len(salt)) == ("cache_salt", 64)
                assert [tuple(field) for field in got] == [
                    field for field in kept if not (key and field[0] == "cache_salt")
                ]

    run(main())


async def form_back(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Return the fields of a form as parsers of the standard library read them."""
    if received.headers["content-type"].startswith("application/x-www-form-urlencoded"):
        return web.json_response(parse_qsl(received.body.decode(), keep_blank_values=True, separator="&"))
    head = f"Content-Type: {received.headers['content-type']}\r\n\r\n"
    parts = [part for part in message_from_bytes(head.encode() + received.body).walk() if not part.is_multipart()]
    names = [unquote(str(part.get_param("name", header="content-disposition"))) for part in parts]
    values = [str(part.get_payload()) for part in parts]
    return web.json_response(list(zip(names, values, strict=True)))


def part(disposition: bytes, value: bytes = b"a") -> bytes:
    return b"--x\r\nContent-Disposition: " + disposition + b"\r\n\r\n" + value + b"\r\n"


GOOD = part(b'form-data; name="model"', MODEL.encode())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("boundary=x", GOOD),
        ("boundary=x", b"preamble\r\n" + GOOD + b"--x--\r\n"),
        ("boundary=x", GOOD + b"--x--\r\n" + part(b'form-data; name="rid"') + b"--x--\r\n"),
        ("boundary=x", GOOD.replace(b"\r\n", b"\n") + b"--x--\n"),
        ("boundary=x", part(b"form-data; name*=utf-8''rid") + b"--x--\r\n"),
        ("boundary=x", part(b'form-data; name="a"; name="rid"') + b"--x--\r\n"),
        ("boundary=x", part(b'form-data; name="a\\"; x="rid"') + b"--x--\r\n"),
        ("boundary=x", part(b'form-data; name="\\rid"') + b"--x--\r\n"),
        ("boundary=x", part(b'form-data; name="a";\r\n name="rid"') + b"--x--\r\n"),
        ("boundary=x", part(b'form-data; name="a"\r\nContent-Disposition: form-data; name="rid"') + b"--x--\r\n"),
        ("boundary=x", part(b"form-data") + b"--x--\r\n"),
        ("boundary=x", part(b'attachment; name="a"') + b"--x--\r\n"),
        ("boundary=x", b'--x\r\nX: y\r\n\r\n--x\r\nContent-Disposition: form-data; name="rid"\r\n\r\n\r\n--x--\r\n'),
        ("boundary=x", part(b'form-data; name="a"', b'\r\n--xy\r\nContent-Disposition: form-data; name="rid"')),
        ("boundary=x; boundary=y", GOOD + b"--x--\r\n"),
        ("boundary=x; charset=utf-7", GOOD + b"--x--\r\n"),
        ("", GOOD + b"--x--\r\n"),
    ],
)
def test_a_form_that_parsers_may_read_in_different_ways_is_refused(kind: str, body: bytes) -> None:
    """With status 415 and one sentence."""

    async def main() -> None:
        engine = engine_of()
        async with stub_rig([engine], SECTION) as front:
            response = await post(front, "/v1/audio/transcriptions", body, f"multipart/form-data; {kind}")
            assert (response.status, engine.received) == (415, [])
            assert "multipart/form-data" in response.json["error"]["message"]

    run(main())


def test_several_content_types_are_refused() -> None:
    """An engine may use another one than the gateway."""

    async def main() -> None:
        engine = engine_of()
        async with stub_rig([engine], SECTION) as front:
            headers = [("Content-Type", "text/plain"), ("Content-Type", "multipart/form-data; boundary=x")]
            body = part(b'form-data; name="rid"') + b"--x--\r\n"
            async with front.session.post(f"{front.url}/v2/embed", data=body, headers=headers) as response:
                assert response.status == 415
            assert engine.received == []

    run(main())


def test_urlencoded_fields_are_known_by_their_decoded_names() -> None:
    """Semicolons separate fields, too, for some parsers."""

    async def main() -> None:
        engine = engine_of()
        async with stub_rig([engine], SECTION) as front:
            body = urlencode({"model": "a b"}) + "&%72id=1;rid=2&x=rid&&rid&+rid=3&kv_transfer_params%5Ba%5D=4"
            kind = "application/x-www-form-urlencoded"
            assert (await post(front, "/v2/embed", body.encode(), kind)).status == 200
            assert engine.received.pop().body == b"model=a+b&x=rid"
            body = "a=1&" * 2000
            assert (await post(front, "/v2/embed", body.encode(), kind)).status == 415

    run(main())


def test_what_is_neither_json_nor_a_form_is_forwarded_unchanged() -> None:
    """No engine can read fields from it."""

    async def main() -> None:
        engine = engine_of()
        async with stub_rig([engine], SECTION) as front:
            for kind, body in (
                ("audio/wav", b"RIFF\0{"),
                ("text/plain", b'"{}"'),
                ("application/octet-stream", b"\xff"),
            ):
                assert (await post(front, "/v2/embed", body, kind)).status == 200
                assert engine.received.pop().body == body

    run(main())
