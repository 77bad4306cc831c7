"""Certificates of the webhook: valid for its names, renewed in time, and no moment at which a call would fail."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kube.admission.reviews import NAME, SETTINGS, trusting

from kvroute.kube.admission.certificates import (
    LIFETIME_S,
    PUBLISH_S,
    RENEW_BEFORE_S,
    Certificates,
    advance,
    issue,
    read_secret,
    secret_data,
    webhook_names,
)
from kvroute.kube.admission.server import WebhookServer
from kvroute.kube.admission.validation import AdmissionView
from kvroute.types import InputError

NAMES = webhook_names("kvroute-webhook", "kvroute-system")
START_S = 1.8e9


@given(waits_s=st.lists(st.sampled_from([1.0, PUBLISH_S / 2, PUBLISH_S, 86400.0, 29 * 86400.0]), max_size=8))
def test_what_is_served_was_trusted_before(waits_s: list[float]) -> None:
    """The served certificate never expires unless nobody looked for a month, and its CA was in the bundle of the step
    before, so an API server that has read only that bundle accepts it."""
    now = START_S
    stored = advance(None, NAMES, now)
    for wait_s in waits_s:
        now += wait_s
        bundle = stored.ca_bundle
        expired = now >= stored.current.ends_s
        stored = advance(stored, NAMES, now)
        assert stored.current.ends_s > now
        assert expired or stored.current.ca in bundle
        assert stored.current.ca in stored.ca_bundle


def test_the_steps_of_a_renewal() -> None:
    first = advance(None, NAMES, START_S)
    assert first.current.ends_s == START_S + LIFETIME_S
    assert advance(first, NAMES, START_S + 86400) is first
    renew_s = START_S + LIFETIME_S - RENEW_BEFORE_S
    both = advance(first, NAMES, renew_s)
    assert both.current == first.current
    assert both.following is not None
    assert both.ca_bundle == first.current.ca + both.following.ca
    assert advance(both, NAMES, renew_s + PUBLISH_S - 1) is both
    assert advance(both, NAMES, renew_s + PUBLISH_S) == Certificates(both.following)


def test_another_name_or_an_expired_certificate_starts_anew() -> None:
    first = advance(None, NAMES, START_S)
    assert (
        advance(first, webhook_names("other", "kvroute-system"), START_S).current.names[0] == "other.kvroute-system.svc"
    )
    assert advance(first, NAMES, START_S + LIFETIME_S).current.begins_s == START_S + LIFETIME_S


def test_a_secret_holds_all_of_it() -> None:
    stored = Certificates(issue(NAMES, START_S), issue(NAMES, START_S))
    assert read_secret(secret_data(stored)) == stored
    only = Certificates(issue(NAMES, START_S))
    assert read_secret(secret_data(only)) == only


@pytest.mark.parametrize(
    "damage",
    [
        {"tls.crt": "%"},
        {"tls.key": base64.b64encode(b"no key").decode()},
        {"tls.key": base64.b64encode(issue(NAMES, START_S).key).decode()},
        {"ca.crt": ""},
    ],
)
def test_a_damaged_secret_counts_as_empty(damage: dict[str, str]) -> None:
    data = secret_data(Certificates(issue(NAMES, START_S)))
    assert read_secret(data | damage) is None
    assert read_secret({}) is None


@pytest.mark.parametrize(("service", "namespace"), [("", "a"), ("a", "b c"), ("a.b", "c"), ("é", "c")])
def test_names_of_services_are_checked(service: str, namespace: str) -> None:
    with pytest.raises(InputError, match="is no DNS label"):
        webhook_names(service, namespace)


def test_a_server_changes_its_certificate_without_a_restart() -> None:
    """New connections get the new certificate; a client that trusts the old CA only is refused."""

    async def scenario() -> None:
        old, new = issue([NAME], time.time()), issue([NAME], time.time())
        server = WebhookServer(AdmissionView, SETTINGS, old)
        port = await server.start("127.0.0.1", 0)
        url = f"https://{NAME}:{port}/readyz"
        try:
            async with trusting(old) as client, client.get(url) as response:
                assert response.status == 200
            server.use(new)
            async with trusting(new) as client, client.get(url) as response:
                assert response.status == 200
            async with trusting(old) as client:
                with pytest.raises(aiohttp.ClientConnectorCertificateError) as refused:
                    await client.get(url)
                assert isinstance(refused.value.certificate_error, ssl.SSLCertVerificationError)
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_readiness_follows_the_view() -> None:
    async def scenario() -> list[int]:
        pair = issue([NAME], time.time())
        server = WebhookServer(lambda: None, SETTINGS, pair)
        port = await server.start("127.0.0.1", 0)
        try:
            async with trusting(pair) as client:
                return [(await client.get(f"https://{NAME}:{port}/{path}")).status for path in ("healthz", "readyz")]
        finally:
            await server.stop()

    assert asyncio.run(scenario()) == [200, 503]


def test_a_port_in_use_is_one_sentence() -> None:
    async def scenario() -> None:
        pair = issue([NAME], time.time())
        first, second = (WebhookServer(lambda: None, SETTINGS, pair) for _ in range(2))
        port = await first.start("127.0.0.1", 0)
        try:
            with pytest.raises(InputError, match="cannot listen on"):
                await second.start("127.0.0.1", port)
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(scenario())
