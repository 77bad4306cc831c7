"""TLS on both sides of the gateway: engines behind HTTPS, and clients over HTTPS."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from tests.serve.rig import COMPLETIONS
from tests.serve.stub_engines import completion, engines_of, run, stub_rig

from kvroute.types import KvProtocol

STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with cert.pem and key.pem for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "unknown"])
def test_engines_are_reached_over_https(
    certificate: Path, trusted: bool, protocol: KvProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines whose certificate the system (or SSL_CERT_FILE) trusts get requests and health checks; other engines get
    nothing."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))

    async def main() -> None:
        prefill, decode = engines_of(protocol)
        for engine in prefill + decode:
            engine.tls = context
        async with stub_rig(prefill + decode, "  health: {interval: 20 ms, failures: 1}\n") as front:
            if trusted:
                for streams in (False, True):
                    response = await front.post(completion(stream=streams))
                    assert (response.status, len(response.text.split())) == (200, 3)
                assert all(client.availability.up for client in front.gateway.runtime.engines.values())
            else:
                assert (await front.post(completion())).status in (502, 503)
                assert await front.becomes("prefill0", False)
                assert not any(engine.received for engine in prefill + decode)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@STREAMS
def test_clients_are_served_over_tls(certificate: Path, streams: bool) -> None:
    """The whole path uses TLS, with several requests on one connection."""
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    files = f"certificate: {certificate}/cert.pem, key: {certificate}/key.pem"

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, listen=f"{{port: 0, tls: {{{files}}}}}") as front:
            url = f"https://127.0.0.1:{front.gateway.port}{COMPLETIONS}"
            for _ in range(3):
                async with front.session.post(url, json=completion(stream=streams), ssl=trusting) as response:
                    assert response.status == 200
                    assert b"decode" in await response.read()
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await front.session.post(url, json=completion())
            assert await front.becomes_idle(), front.held_resources()

    run(main())
