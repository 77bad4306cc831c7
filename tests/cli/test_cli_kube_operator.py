"""`kvroute kube operator` as a process: it leads until SIGTERM, gives up its Lease, and rejects wrong options."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.operator.operator_rig import NAMESPACE, Rig, installed

OPTIONS = ["kube", "operator", "--image", "example/kvroute:1"]


def test_it_leads_until_sigterm(tmp_path: Path) -> None:
    """It ends with exit code 0, and the Lease has no holder then."""

    async def holder(rig: Rig) -> str:
        lease = await rig.get("Lease", "kvroute-operator", NAMESPACE)
        return str(lease["spec"].get("holderIdentity") or "") if lease else "none yet"

    async def leads(rig: Rig) -> bool:
        return await holder(rig) == "me"

    async def run() -> None:
        async with installed() as rig:
            config = kubeconfig(tmp_path, rig.server.url, {"token": "operator"})
            options = ["--kubeconfig", str(config), "--no-webhook", "--identity", "me"]
            process = await asyncio.create_subprocess_exec(*kvroute_command(*OPTIONS, *options), stderr=subprocess.PIPE)
            try:
                await rig.until(lambda: leads(rig))
            finally:
                process.send_signal(signal.SIGTERM)
                _, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            assert await holder(rig) == ""

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--log-level", "loud"], "--log-level: 'loud' is no level; write one of debug, info, warning, error"),
        (["--kubeconfig", "/none/kubeconfig"], "give a kubeconfig with --kubeconfig or KUBECONFIG"),
    ],
)
def test_wrong_options(options: list[str], sentence: str) -> None:
    done = subprocess.run(kvroute_command(*OPTIONS, *options), capture_output=True, text=True)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_missing_certificate_is_one_sentence(tmp_path: Path) -> None:
    """The folder is that of cert-manager's Secret."""
    config = kubeconfig(tmp_path, "http://127.0.0.1:9", {"token": "operator"})
    options = ["--kubeconfig", str(config), "--port", "0", "--certificates", str(tmp_path)]
    done = subprocess.run(kvroute_command(*OPTIONS, *options), capture_output=True, text=True)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "cannot be read" in line]
    assert "mount the Secret with the certificate" in line
    assert "Traceback" not in done.stderr
