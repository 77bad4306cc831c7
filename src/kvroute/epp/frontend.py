"""The picker as a frontend of the gateway: requests come from Envoy, which also sends their decode legs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.epp.addresses import SIDECAR_RANKS, address_fault
from kvroute.epp.decode_leg import EnvoyDecodeLeg
from kvroute.epp.envoy_call import instances_in
from kvroute.epp.exchange import PickExchange
from kvroute.epp.passthrough import PassthroughPick
from kvroute.epp.server import PickerServer, PickerSpec
from kvroute.epp.sidecar_leg import SidecarDecodeLeg
from kvroute.serve.api.passthrough_paths import COMPLETIONS, OPENAI_COMPLETIONS
from kvroute.serve.proxy.completion.request import ProxiedRequest
from kvroute.serve.proxy.endpoints import MakePassthrough
from kvroute.serve.proxy.frontend import FrontendServer, ServerParts
from kvroute.types import Discovered, OwnPicker

if TYPE_CHECKING:
    from kvroute.http.client_exchange import ClientExchange
    from kvroute.serve.api.requests import Completion
    from kvroute.serve.proxy.runtime import ClusterRuntime


class PickerFrontend:
    """See `kvroute.serve.proxy.frontend.Frontend`."""

    relayed: MakePassthrough = PassthroughPick
    metrics = False

    def __init__(self, settings: PickerSpec | None = None) -> None:
        self._settings = settings or PickerSpec()
        # A sidecar of an engine orders prefills for the first two kinds only.
        self.routed = OPENAI_COMPLETIONS if self._settings.sidecar else COMPLETIONS

    def proxied(
        self,
        runtime: ClusterRuntime,
        exchange: ClientExchange,
        completion: Completion,
        request_id: bytes,
        received_at: float,
    ) -> ProxiedRequest:
        """Make the request of a completion."""
        assert isinstance(exchange, PickExchange), "a picker gets requests from Envoy"
        return ProxiedRequest(
            runtime,
            exchange,
            completion,
            request_id,
            received_at,
            decode_leg=SidecarDecodeLeg if self._settings.sidecar else EnvoyDecodeLeg,
            only=instances_in(exchange.subsets, runtime),
            both_on_arrival=self._settings.sidecar,
        )

    def server(self, parts: ServerParts) -> FrontendServer:
        """See `Frontend`."""
        return PickerServer(parts, self._settings)

    def engine_fault(self, engine: Discovered) -> str:
        """See `Frontend`. Envoy connects to addresses, not to names."""
        if self._settings.sidecar and engine.engine:
            return f"{SIDECAR_RANKS}; with 1 as its number of ranks (`dp`) the engine divides requests itself"
        return address_fault(engine.endpoint.url)

    def picker(self, port: int) -> OwnPicker | None:
        """See `Frontend`."""
        return OwnPicker(port, self._settings.fails_open)
