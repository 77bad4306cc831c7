"""Runs the calls of kvroute's Kubernetes code against any API server: `python -m tests.kube.conformance --server URL`.

It makes a namespace, nodes, pods, definitions and roles of its own, and removes them. It needs no kubelet, no scheduler
and no controllers: it reports pods as ready itself. The user of the token must be an administrator. It needs the
packages of requirements/dev.txt (`make .venv/.dev`). Exit code: 0 all checks pass, 1 one fails, 2 kvroute is installed
already, the server does not answer, or a package is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

try:
    import httpx2
    from tests.kube.conformance_checks import CHECKS, Check
    from tests.kube.remote_cluster import CLUSTER_ROLES, DEFINITIONS, RemoteCluster
except ModuleNotFoundError as absent:
    module = (absent.name or "").partition(".")[0]
    where = "`make .venv/.dev` in a checkout of the repository installs it for .venv/bin/python"
    sys.stderr.write(f"error: the module {module} is missing; {where}\n")
    sys.exit(2)


async def conform(cluster: RemoteCluster, webhook_host: str) -> int:
    """Run all checks, print one line for each, remove everything, and return the exit code."""
    try:
        if reason := await _unusable(cluster):
            sys.stderr.write(f"error: {reason}\n")
            return 2
        failures = 0
        try:
            for title, check in CHECKS:
                failures += await _fails(title, check, cluster, webhook_host)
        finally:
            left = await cluster.remove()
        _tell(f"FAIL  everything is removed: {', '.join(left)} remain" if left else "ok    everything is removed")
        return 1 if failures or left else 0
    finally:
        await cluster.admin.aclose()


async def _fails(title: str, check: Check, cluster: RemoteCluster, webhook_host: str) -> bool:
    try:
        await check(cluster, webhook_host)
    except Exception as error:  # the other checks run, and everything is removed
        _tell(f"FAIL  {title}: {type(error).__name__}: {' '.join(str(error).split())}"[:1000])
        return True
    _tell(f"ok    {title}")
    return False


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _unusable(cluster: RemoteCluster) -> str:
    """Return why the checks cannot run; empty: they can."""
    try:
        version = await cluster.admin.get("version")
    except httpx2.HTTPError as error:
        return f"{cluster.url} does not answer ({error}); check --server, --ca and --insecure"
    if version.status_code != 200:
        return f"{cluster.url} answers {version.status_code}; check --token"
    _tell(f"      {cluster.url} is {version.json().get('gitVersion')}; namespace {cluster.namespace}")
    for kind, name in ((DEFINITIONS, "kvrouters.kvroute.io"), (CLUSTER_ROLES, "kvroute-operator")):
        if (await cluster.admin.get(kind.path("", name))).status_code == 200:
            return f"{kind.kind} {name} exists: kvroute is installed; use another cluster"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="tests.kube.conformance", description=__doc__)
    parser.add_argument("--server", required=True, help="URL of the API server")
    parser.add_argument("--token", required=True, help="bearer token of an administrator")
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--insecure", action="store_true", help="accept any certificate")
    trust.add_argument("--ca", type=Path, help="PEM file with the certificates of CAs that are trusted")
    parser.add_argument(
        "--webhook-host", default="localhost", help="name of this machine as the server sees it; empty: no webhook"
    )
    given = parser.parse_args(arguments)
    if given.ca is not None and not given.ca.is_file():
        parser.error(f"--ca: {given.ca} is no file; give the PEM file with the CA of the server")
    namespace = f"kvroute-conformance-{secrets.token_hex(3)}"
    ca = given.ca and given.ca.resolve()  # a kubeconfig in another folder names it
    cluster = RemoteCluster(given.server.rstrip("/"), given.token, namespace, given.insecure, ca)
    return asyncio.run(conform(cluster, given.webhook_host))


if __name__ == "__main__":
    sys.exit(main())
