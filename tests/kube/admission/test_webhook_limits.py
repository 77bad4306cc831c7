"""The webhook against other clients than the API server: slow connections, and reviews with values of other types."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kube.admission.reviews import NAME, SETTINGS, answers, engine_pod, review
from tests.kube.event_loop import scenario
from tests.kube.resources.router_examples import Manifest, constrained, topology
from tests.waiting import PATIENCE_S

from kvroute.kube.admission.certificates import issue
from kvroute.kube.admission.injection import inject
from kvroute.kube.admission.review import read_review, response_body
from kvroute.kube.admission.server import WebhookServer
from kvroute.kube.admission.validation import AdmissionView, validate
from kvroute.kube.resources import ClusterTopologySpec, read_spec
from kvroute.kube.resources.resolution import Catalog
from kvroute.types import InputError
from kvroute_engine.timed_connection import ConnectionLimits

VIEW = AdmissionView(Catalog(own={"cluster": read_spec(topology(), ClusterTopologySpec)}), (constrained("rack"),))
BODY = json.dumps(review("CREATE", constrained())).encode()
HEAD = b"POST /validate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(BODY)
QUICK = ConnectionLimits(request_s=0.2, idle_s=0.2)
PATIENT = ConnectionLimits(request_s=PATIENCE_S, idle_s=0.2)


@contextlib.asynccontextmanager
async def connected(limits: ConnectionLimits, *, tls: bool = True) -> AsyncIterator[tuple[Any, Any]]:
    """Connect to a webhook with these limits; return the streams."""
    pair = issue([NAME], time.time())
    server = WebhookServer(lambda: VIEW, SETTINGS, pair, limits)
    port = await server.start("127.0.0.1", 0)
    context = ssl.create_default_context(cadata=pair.ca.decode()) if tls else None
    try:
        reader, writer = await asyncio.open_connection(NAME, port, ssl=context)
        yield reader, writer
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
    finally:
        await server.stop()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the server closes the connection."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return await reader.read()
    return b""


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD, HEAD + b"\r\n", HEAD + b"\r\n" + BODY[:-1]])
def test_a_request_that_does_not_end_is_closed(sent: bytes) -> None:
    """Nothing sent, half of the headers, and a body without its last byte."""

    async def run() -> None:
        async with connected(QUICK) as (reader, writer):
            writer.write(sent)
            assert b"200 OK" not in await rest_of(reader)

    scenario(run())


def test_a_connection_without_a_handshake_is_closed() -> None:
    async def run() -> None:
        async with connected(QUICK, tls=False) as (reader, _):
            assert await rest_of(reader) == b""

    scenario(run())


def test_a_slow_second_request_is_closed() -> None:
    """A connection that has been used has the same limit for its next request."""

    async def run() -> None:
        async with connected(ConnectionLimits(request_s=0.2, idle_s=PATIENCE_S * 2)) as (reader, writer):
            writer.write(HEAD + b"\r\n" + BODY)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            assert b"200 OK" not in await rest_of(reader)

    scenario(run())


def test_an_idle_connection_is_closed_after_its_response() -> None:
    async def run() -> None:
        async with connected(PATIENT) as (reader, writer):
            for _ in range(2):
                writer.write(HEAD + b"\r\n" + BODY)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"200 OK" in head
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
            assert await rest_of(reader) == b""

    scenario(run())


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=4)
ANY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn) -> Manifest:
    """Return a review with a value of any type at any place of its object."""
    deployment = {"template": {"metadata": {"labels": {"kvroute.io/role": "decode"}, "annotations": {}}, "spec": {}}}
    obj = draw(
        st.sampled_from(
            [
                constrained("rack"),
                topology(),
                engine_pod(labels={"app": "llama", "kvroute.io/role": "decode"}, annotations={"a": "b"}),
                {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": deployment},
            ]
        )
    )
    body: Manifest = json.loads(json.dumps(review(draw(st.sampled_from(["CREATE", "UPDATE", "DELETE"])), obj)))
    key = "oldObject" if body["request"]["operation"] == "DELETE" else "object"
    *path, last = draw(st.sampled_from(places(body["request"][key])))
    place = body["request"][key]
    for part in path:
        place = place[part]
    place[last] = draw(ANY)
    return body


@settings(max_examples=200)
@given(damaged())
def test_a_value_of_another_type_is_no_failure(body: Manifest) -> None:
    """The review is answered, or refused with one sentence that names the field."""
    refusal, request = "", None
    try:
        request = read_review(json.dumps(body).encode())
    except InputError as error:
        refusal = str(error)
    assert (request is None) == ("request." in refusal)
    assert "\n" not in refusal
    if request is None:
        return
    for verdict in (validate(request, VIEW), inject(request, VIEW, SETTINGS)):
        assert json.loads(response_body(request, verdict))["response"]["uid"] == body["request"]["uid"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"metadata": "x"}, "request.object.metadata"),
        ({"metadata": {"labels": []}}, "request.object.metadata.labels"),
        ({"metadata": {"labels": {"kvroute.io/role": 1}}}, "request.object.metadata.labels"),
        ({"spec": {"containers": {}}}, "request.object.spec.containers"),
        ({"spec": {"containers": [{"env": ["A"]}]}}, "request.object.spec.containers[0].env[0]"),
        ({"kind": []}, "request.object.kind"),
    ],
)
def test_a_wrong_type_gets_400_and_its_field(change: Manifest, field: str) -> None:
    body = review("CREATE", engine_pod() | {"metadata": {"name": "a"}})
    body["request"]["object"] |= change
    for response in asyncio.run(answers(VIEW, ("mutate", body), ("validate", body))):
        assert (response["http"], field in response["text"]) == (400, True), response


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"request": ' * 100_000, b'{"kind": "\xff"}', b"", b"null"])
def test_bodies_that_are_no_review_are_one_sentence(body: bytes) -> None:
    with pytest.raises(InputError, match="the body is no AdmissionReview"):
        read_review(body)
