"""Creates the source that the section `discovery` of a cluster file names."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from kvroute.serve.discovery.engines_file import EnginesFile
from kvroute.topology.schema import Discovery
from kvroute.types import DiscoverySource, InputError, OwnPicker


def source_of(section: Discovery, folder: Path, picker: OwnPicker | None = None) -> DiscoverySource:
    """Return the source of a valid section.

    Args:
        folder: where a relative path starts.
        picker: this process as an endpoint picker; None: it is none.

    Raises:
        InputError: a package that the source needs is not installed, or there is no usable kubeconfig.
    """
    if section.dns is not None:
        from kvroute.serve.discovery.dns_records import DnsRecords

        return DnsRecords(section.dns)
    if section.kubernetes is not None:
        try:
            from kvroute.serve.discovery.kubernetes_pods import KubernetesPods
        except ImportError as error:
            raise _not_installed(error) from None
        return KubernetesPods(section.kubernetes, folder, picker)
    assert section.file is not None, "the section has one source"
    return EnginesFile(Path(os.path.abspath(folder / Path(section.file).expanduser())))


def check_source(section: Discovery, folder: Path) -> None:
    """Check what only the source itself can tell, for some seconds; call it in a thread without an event loop.

    A server that does not answer is no fault: the source goes on trying.

    Raises:
        InputError: a package is not installed, there is no usable kubeconfig, or the API server refuses what the
            section says.
    """
    if section.dns is not None:
        import kvroute.serve.discovery.dns_records  # noqa: F401  # here, because it takes a third of a second
    if section.kubernetes is None:
        return
    try:
        from kvroute.kube.preflight.gateway import check_access
        from kvroute.serve.discovery.kubernetes_pods import access_of, options_of
    except ImportError as error:
        raise _not_installed(error) from None
    kubernetes = section.kubernetes
    asyncio.run(check_access(access_of(kubernetes, folder), options_of(kubernetes), kubernetes.pool))


def _not_installed(error: ImportError) -> InputError:
    return InputError(f"{error.name} is not installed", hint="pip install 'kvroute[kube]'")
