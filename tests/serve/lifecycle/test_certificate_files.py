"""Renewed certificates of the gateway's own ports: they are served without a reload."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest
import uvloop
from tests.serve.rig import CLUSTER, rig

from kvroute.serve.config.settings import TlsSettings
from kvroute.serve.lifecycle.certificates import PortCertificate


def _pair(folder: Path, name: str) -> TlsSettings:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    files = TlsSettings(certificate=f"{folder}/{name}.pem", key=f"{folder}/{name}.key")
    command = ["openssl", "req", "-x509", *curve, "-keyout", files.key, "-out", files.certificate]
    subprocess.run(command, check=True, capture_output=True)
    return files


def _replace(part: str, served: TlsSettings, new: TlsSettings) -> None:
    Path(getattr(new, part)).replace(getattr(served, part))


def test_both_ports_serve_a_renewed_certificate(tmp_path: Path) -> None:
    """Nobody sends SIGHUP when a mounted Secret changes."""
    served, new = _pair(tmp_path, "served"), _pair(tmp_path, "new")
    text = Path(new.certificate).read_text()
    tls = f"{{port: 0, tls: {{certificate: {served.certificate}, key: {served.key}}}}}"
    cluster = CLUSTER.replace("{port: 0}", tls)
    assert cluster.count(served.key) == 2

    async def run() -> None:
        async with rig("", cluster) as gate:
            ports = (gate.gateway.port, gate.gateway.admin_port)
            for part in ("key", "certificate"):
                _replace(part, served, new)
            for port in ports:
                while await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) != text:
                    await asyncio.sleep(0.05)

    uvloop.run(asyncio.wait_for(run(), 240))


def test_files_that_are_replaced_one_after_the_other_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong pair is an error only when the files have not changed since the check before, and once."""
    caplog.set_level("INFO", logger="kvroute")
    served, new = _pair(tmp_path, "served"), _pair(tmp_path, "new")
    certificate = PortCertificate(served, "gateway.listen.tls")
    old, pair = certificate.pair, (Path(new.key).read_bytes(), Path(new.certificate).read_bytes())

    async def run() -> None:
        _replace("certificate", served, new)
        await certificate.check()
        assert certificate.pair == old
        _replace("key", served, new)
        await certificate.check()
        assert certificate.pair == pair
        assert [record.message for record in caplog.records] == ["certificate_renewed"]
        Path(served.key).write_bytes(old[0])
        for _ in range(4):
            await certificate.check()
        assert certificate.pair == pair
        assert [record.message for record in caplog.records[1:]] == ["certificate_refused"]

    asyncio.run(run())
