"""Models of one cluster: their names for clients, and what the protocols of their instances can split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvroute.serve.api.json_fields import RequestError
from kvroute.serve.api.requests import LATER_SPLIT, Completion, Kind
from kvroute.topology import Cluster
from kvroute.types import TRAITS, KvProtocol

if TYPE_CHECKING:
    from kvroute.serve.config.settings import AdapterSettings

_UNSPLIT_S = 600.0
"""Time until it is tried again whether engines return transfer parameters, which a new version may do."""


class UnsplitKinds:
    """Kinds of requests that one instance serves for a while, because a prefill engine has returned no transfer
    parameters for such a request."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, Kind], float] = {}

    def add(self, model: str, kind: Kind, now: float) -> None:
        """Record a response without transfer parameters."""
        self._until[model, kind] = now + _UNSPLIT_S

    def has(self, model: str, kind: Kind, now: float) -> bool:
        """Whether one instance must serve such requests."""
        return bool(self._until) and self._until.get((model, kind), now) > now


class ServedModels:
    """Translates between clients' and the cluster's names of models."""

    def __init__(
        self, cluster: Cluster, aliases: Mapping[str, str], adapters: Mapping[str, AdapterSettings] | None = None
    ) -> None:
        """
        Args:
            cluster: as it is now.
            aliases: the cluster's name of each model, by its name for clients; empty: the names are the same.
            adapters: LoRA adapters, by their names; None: there are none.
        """
        self._adapters = adapters or {}
        self._aliases = aliases
        self._protocols: dict[str, set[KvProtocol]] = {}
        if cluster.file.discovery is not None and cluster.file.defaults.model:
            self._protocols[cluster.file.defaults.model] = set()  # known before its first engine has been found
        for instance in cluster.instances:
            self._protocols.setdefault(instance.model, set()).add(instance.protocol)
        self._any_protocol = {protocol for known in self._protocols.values() for protocol in known}
        self._one_model = len(self._protocols) == 1

    def name(self, served: str) -> str:
        """Return the cluster's name of a model. With a single model it may be empty: engines then check the name.

        Raises:
            RequestError: the name is missing or unknown, and there are several models; or no engine has told its model
                yet.
        """
        if not self._protocols:
            what = "no engine has been discovered, so no model is served yet; try again later"
            raise RequestError(what, status=503, type="service_unavailable")
        name = self._base(served, "" if self._one_model else served)
        if self._one_model or name in self._protocols:
            return name
        if not served:
            hint = "give one that GET /v1/models lists"
            raise RequestError(f"model: is missing, and several models are served; {hint}", param="model")
        what = f"the model {served[:200]!r} does not exist; GET /v1/models lists the models"
        raise RequestError(what, status=404, param="model", code="model_not_found")

    def full_name(self, name: str) -> str:
        """Return the cluster's name of a model, given what `name` has returned."""
        return name or (next(iter(self._protocols)) if self._one_model else "")

    def adapter(self, served: str) -> str:
        """Return the LoRA adapter that a client's name of a model means; empty: none."""
        return served if served in self._adapters else ""

    def _base(self, served: str, default: str) -> str:
        """Return the cluster's name of a model, or of the base model of an adapter; `default` for any other name."""
        adapter = self._adapters.get(served)
        return self._aliases.get(served, default) if adapter is None else adapter.model or ""

    def names(self) -> list[str]:
        """Return the names for clients; empty if there is one model without an alias: its engine knows the name."""
        names = sorted(self._aliases)
        if not names and self._one_model:
            return []
        return [*(names or sorted(self._protocols)), *sorted(self._adapters)]

    def splits(self, completion: Completion) -> bool:
        """Whether the engines of its model accept transfer parameters in this kind of request. An unknown model is
        rejected later."""
        if completion.kind not in LATER_SPLIT:
            return True
        name = self._base(completion.model, completion.model)
        protocols = self._protocols.get(name, self._any_protocol)
        return all(TRAITS[protocol].splits_every_format for protocol in protocols)

    def one_instance_only(self, completion: Completion) -> bool:
        """Whether some protocol of its model cannot transfer this request's KV: one instance must then do both
        phases."""
        protocols = self._protocols.get(self.name(completion.model), self._any_protocol)
        return not all(TRAITS[protocol].splits_every_request for protocol in protocols)
