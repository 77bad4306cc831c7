"""The list of the dispatcher's features, in their order."""

from __future__ import annotations

from typing import Any

from kvroute.control.choice.forecast import Forecaster
from kvroute.control.choice.kv_loads import KvLoads
from kvroute.control.choice.partners import LayerwiseTransfers, Partners
from kvroute.control.choice.read_paths import ReadPaths
from kvroute.control.offers import Feature
from kvroute.control.offload.offloader import Offloader
from kvroute.control.prefix_copies.source import PrefixCopies
from kvroute.control.view import ClusterView


def features_of(
    view: ClusterView,
    offloader: Offloader | None,
    prefixes: PrefixCopies,
    partners: Partners,
    forecaster: Forecaster,
) -> tuple[Feature[Any], ...]:
    """Return the features that a core uses. The first one is offered first and attached last.

    Times build on those before: a candidate fetches a prefix if that is faster than loading its own, and a site is
    chosen by the times of its instances with all of these. What depends on the decision of others is attached after
    them: a read from the store, on whether the prefix is copied from another instance. The forecast may reject a
    request, so it is attached first.
    """
    options = view.options
    copies = offloader is not None or options.prefix_pool or options.copies is not None
    layerwise = options.layerwise or (offloader is not None and offloader.spec.layerwise)
    features: tuple[Feature[Any] | None, ...] = (
        ReadPaths(view, partners) if view.reads is not None else None,
        LayerwiseTransfers(partners) if layerwise else None,
        KvLoads(view),
        prefixes if copies else None,
        view.adapters,
        offloader,
        view.sessions if view.sessions.bonus_s else None,
        forecaster,
    )
    return tuple([feature for feature in features if feature is not None])
