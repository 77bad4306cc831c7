"""Where the commands that run a gateway find its engines: a cluster file, emulated engines of it, or Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvroute.types import Endpoint, InputError

if TYPE_CHECKING:
    from kvroute.serve.config.settings import GatewaySettings
    from kvroute.serve.lifecycle.deployment import Deployment
    from kvroute.topology.drafts.kubernetes_overlay import KubernetesOverlay


@dataclass(frozen=True, slots=True)
class EngineSource:
    """The options that name the engines, checked."""

    cluster: Path | None
    """Cluster file; None: the one that Kubernetes needs."""
    overlay: KubernetesOverlay | None
    """What the options of Kubernetes add to the file; None: --kubernetes is not given."""
    embedded: bool
    """Whether the engines of the file are emulated."""

    @classmethod
    def of(cls, cluster: Path | None, overlay: KubernetesOverlay | None, *, embedded: bool) -> EngineSource:
        """Return the source; raise InputError if the options name none, or two."""
        if cluster is None and overlay is None:
            hint = "give a YAML file, or discover the engines with --kubernetes"
            raise InputError("no cluster file is given", hint=hint)
        if embedded and overlay is not None:
            raise InputError("--embedded and --kubernetes exclude each other", where="--embedded")
        return cls(cluster, overlay, embedded)

    def read(
        self, adjust: Callable[[GatewaySettings], GatewaySettings], endpoints: Mapping[str, Endpoint] | None = None
    ) -> Deployment:
        """Return the deployment of the file as it is now.

        Args:
            adjust: changes the settings of the file.
            endpoints: endpoints of emulated engines; None: those in the file.

        Raises:
            InputError: the file has errors.
        """
        from kvroute.serve.lifecycle.deployment import Deployment
        from kvroute.topology.drafts.kubernetes_overlay import kubernetes_file

        if self.cluster is None:
            return Deployment.of(kubernetes_file().to_yaml(), "--kubernetes", adjust, overlay=self.overlay)
        return Deployment.read(self.cluster, adjust, endpoints, self.overlay)

    @contextmanager
    def engines(
        self,
        adjust: Callable[[GatewaySettings], GatewaySettings],
        kv_scale: float,
        background: str,
        seed: int | None,
    ) -> Iterator[dict[str, Endpoint] | None]:
        """Run the emulated engines and yield their endpoints; None: there are none.

        Raises:
            InputError: the file or an option has errors.
        """
        from kvroute.cli.serve.process import emulated_engines
        from kvroute.cli.trial.emulate import shares_by_tier

        if not self.embedded or self.cluster is None:
            yield None
            return
        from kvroute.serve.lifecycle.deployment import Deployment

        shares_by_tier(background)
        Deployment.check_embedded(self.cluster, adjust)
        with emulated_engines(self.cluster, kv_scale, background, seed) as endpoints:
            yield endpoints


def measured_by_engines(settings: GatewaySettings) -> GatewaySettings:
    """Return the settings for emulated engines. They report their transfers; timing by first bytes too would count the
    first transfers twice."""
    return msgspec.structs.replace(settings, measure="engine") if settings.measure == "auto" else settings
