"""`kvroute topology new --kubernetes`: a cluster file from the pods and nodes of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kvroute.cli.output import tell
from kvroute.types import InputError

if TYPE_CHECKING:
    from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay


def kubernetes_draft(
    overlay: KubernetesOverlay, name: str, *, model: str, tp: int, gpus_per_node: int, nic_bytes_per_s: float
) -> str:
    """Return the text of a cluster file; engines that are left out and values to check are listed on stderr.

    Raises:
        InputError: the extra `kube` is not installed, the API server is not reachable or refuses, or no engine can be
            used.
    """
    from kvroute.topology.drafts.discovered import draft_discovered

    try:
        from kvroute.kube.api.client import Access
        from kvroute.kube.discovery.engines import DiscoverySpec, read_once
        from kvroute.kube.preflight.gateway import check_access
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[kube]'") from None
    given = overlay.given
    access = Access(None if given.kubeconfig is None else Path(given.kubeconfig), given.context)
    options = DiscoverySpec("" if given.namespace == "*" else given.namespace, given.selector)
    asyncio.run(check_access(access, options))
    listing = asyncio.run(read_once(access, options))
    reading, failure = listing.reading, listing.nodes_failure
    text, refused = draft_discovered(
        name, reading.engines, model=model, tp=tp, gpus_per_node=gpus_per_node, nic_bytes_per_s=nic_bytes_per_s
    )
    tell([finding.sentence for finding in reading.findings])
    tell([f"{failure}; places come from labels of pods alone"] if failure else [])
    tell([f"{engine.name}: it is not ready" for engine in reading.engines if not engine.ready])
    tell([f"{engine}: it is left out: {why}" for engine, why in sorted(refused.items())])
    return text
