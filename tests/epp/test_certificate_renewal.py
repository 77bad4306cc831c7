"""The picker's TLS certificate: new connections get a renewed one without a restart, and open streams go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.epp.envoy_rig import EnvoyStream, PickerRig, alone, completion_body, picking
from tests.serve.stub_engines import Engine, deployment, listening, run
from tests.waiting import until

from kvroute.serve.lifecycle.deployment import Deployment

PARTS = ("cert.pem", "key.pem")


@pytest.fixture(autouse=True)
def _informative(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvroute")


def new_pair(folder: Path) -> Path:
    """Make a certificate and its key in a folder, and return the folder."""
    folder.mkdir()
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "cert.pem", "-days", "2", *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def by_rename(mount: Path, source: Path) -> None:
    """Replace each file by an atomic rename, as certbot and many others do."""
    mount.mkdir(exist_ok=True)
    for part in PARTS:
        new = mount / f".{part}.new"
        new.write_bytes((source / part).read_bytes())
        new.replace(mount / part)


def by_symlink(mount: Path, source: Path) -> None:
    """Replace both files at once, as the kubelet does in the volume of a Secret."""
    mount.mkdir(exist_ok=True)
    new = mount / "..data_tmp"
    new.symlink_to(source, target_is_directory=True)
    os.replace(new, mount / "..data")
    for part in PARTS:
        if not (mount / part).is_symlink():
            (mount / part).symlink_to(Path("..data") / part)


Replace = Callable[[Path, Path], None]
WAYS = pytest.mark.parametrize("replace", [by_rename, by_symlink])


def deployed(engines: Sequence[Engine], mount: Path) -> Deployment:
    """Return a deployment with the certificate of a folder."""
    files = f"certificate: {mount}/cert.pem, key: {mount}/key.pem"
    return deployment(engines, listen=f"{{port: 0, tls: {{{files}}}}}")


@asynccontextmanager
async def served(mount: Path) -> AsyncIterator[PickerRig]:
    """Run an engine, and a picker with the certificate of a folder."""
    engines = alone(1)
    async with listening(engines), picking(deployed(engines, mount)) as rig:
        yield rig


@asynccontextmanager
async def trusting(rig: PickerRig, source: Path) -> AsyncIterator[Any]:
    """Open a connection that only the certificate of a folder makes possible."""
    credentials = grpc.ssl_channel_credentials((source / "cert.pem").read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{rig.gateway.port}", credentials, options) as channel:
        yield channel


async def serves(rig: PickerRig, source: Path) -> bool:
    """Return whether a new connection gets the certificate of a folder; other errors are raised."""
    async with trusting(rig, source) as channel:
        try:
            stream = EnvoyStream(channel)
            answer = await stream.ask(completion_body())
        except grpc.aio.AioRpcError as error:
            if "CERTIFICATE_VERIFY_FAILED" not in error.debug_error_string():
                raise
            return False
        assert len(answer.endpoints) == 1
        await stream.respond(200, answer.endpoints[0], ends=True)
        await stream.end()
        return True


async def until_served(rig: PickerRig, source: Path) -> None:
    """Wait until new connections get the certificate of a folder."""
    while not await serves(rig, source):
        await asyncio.sleep(0.05)


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of all log lines of an event."""
    return [record.__dict__["fields"] for record in caplog.records if record.message == event]


@WAYS
def test_a_renewed_certificate_is_served_while_streams_go_on(
    tmp_path: Path, replace: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams of open connections end as if nothing had happened, and new connections get the new certificate only."""
    old, new = new_pair(tmp_path / "old"), new_pair(tmp_path / "new")
    mount = tmp_path / "mount"
    replace(mount, old)

    async def main() -> None:
        async with served(mount) as rig, trusting(rig, old) as channel:
            waiting, streaming = EnvoyStream(channel), EnvoyStream(channel)
            answer = await streaming.ask(completion_body())
            await waiting.ask_only(completion_body())
            assert not await serves(rig, new)
            replace(mount, new)
            await until_served(rig, new)
            assert not await serves(rig, old)
            await streaming.respond(200, answer.endpoints[0])
            await streaming.end()
            late = await waiting.answer(True)
            await waiting.respond(200, late.endpoints[0])
            await waiting.end()
            again = EnvoyStream(channel)
            assert (await again.ask(completion_body())).endpoints == answer.endpoints
            again.call.cancel()
            assert await rig.becomes_idle()

    run(main())
    assert [line["field"] for line in logged(caplog, "certificate_renewed")] == ["gateway.listen.tls"]
    assert not logged(caplog, "certificate_refused")


@WAYS
@pytest.mark.parametrize("wrong", ["text", "key of another certificate", "no file"])
def test_a_wrong_new_file_keeps_the_old_certificate_and_is_logged_once(
    tmp_path: Path, replace: Replace, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next right pair is served."""
    old, bad, new = (new_pair(tmp_path / name) for name in ("old", "bad", "new"))
    match wrong:
        case "text":
            (bad / "cert.pem").write_text("not a certificate\n")
        case "key of another certificate":
            (bad / "key.pem").write_bytes((old / "key.pem").read_bytes())
        case _:
            (bad / "key.pem").write_text("")
    mount = tmp_path / "mount"
    replace(mount, old)

    async def main() -> None:
        async with served(mount) as rig:
            replace(mount, bad)
            if wrong == "no file":
                (mount / "key.pem").unlink()
            await until(lambda: bool(logged(caplog, "certificate_refused")))
            assert await serves(rig, old)
            replace(mount, new)
            await until_served(rig, new)

    run(main())
    [line] = logged(caplog, "certificate_refused")
    assert (line["field"], line["file"]) == ("gateway.listen.tls", f"{mount}/cert.pem")
    assert "certificate and key cannot be used" in line["reason"]
    assert len(logged(caplog, "certificate_renewed")) == 1


def test_a_reload_may_name_other_files(tmp_path: Path) -> None:
    """SIGHUP with other file names in `listen.tls`: they are served, and followed from then on."""
    old, new, newest = (new_pair(tmp_path / name) for name in ("old", "new", "newest"))

    async def main() -> None:
        engines = alone(1)
        async with listening(engines), picking(deployed(engines, old)) as rig:
            assert await rig.gateway.reload(lambda: deployed(engines, new))
            assert await serves(rig, new)
            by_rename(new, newest)
            await until_served(rig, newest)

    run(main())
