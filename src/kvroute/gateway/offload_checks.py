"""What is wrong with the `gateway.offload:` section, by itself and in its cluster: each fault with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvroute.gateway.offload_settings import written
from kvroute.gateway.settings import GatewaySettings
from kvroute.topology import Cluster, FileError
from kvroute.topology.form import Key, Lines
from kvroute.types import InputError

_SECTION = "gateway"


def offload_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Values that do not go together, or that live engines cannot do."""
    offload = settings.offload
    if offload is None:
        return
    try:
        offload.spec()
    except InputError as error:
        yield lines.error(error.what, (_SECTION, *written(error.where)), error.mend)
    conversion = offload.conversion
    if conversion is not None and (conversion.url is None) == (conversion.command is None):
        what = "a conversion has a URL or a command" + (", not both" if conversion.url else ", and neither is given")
        mend = "give `url: http://...` or `command: [PROGRAM, ...]`"
        yield lines.error(what, (_SECTION, "offload", "conversion"), mend)


def site_faults(
    cluster: Cluster, settings: GatewaySettings, lines: Lines, places: Mapping[str, Key]
) -> Iterator[FileError]:
    """What keeps prefills from being offloaded in this cluster. Args: `places` of its instances in the file."""
    if settings.offload is None:
        return
    try:
        settings.control_spec().build(cluster)
    except InputError as error:
        yield lines.error(error.what, (_SECTION, "offload"), error.mend)
    if settings.offload.conversion is None:
        return
    for instance in cluster.instances:
        endpoint = instance.endpoint
        if endpoint is None or endpoint.protocol == "vllm" or endpoint.bootstrap:
            continue
        if instance.role == "decode":
            what = f"{instance.name} may come to prefill, and {endpoint.protocol} needs its bootstrap server then"
            yield lines.error(what, (*places[instance.name], "endpoint"), "add `bootstrap: HOST:PORT`")
