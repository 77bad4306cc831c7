"""Checks of the `gateway.offload:` section, by itself and against its cluster: every fault with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvroute.serve.config.offload import written
from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology import Cluster, FileError
from kvroute.types import InputError
from kvroute_engine.files.form import Key, Lines


def offload_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield values that contradict each other or that live engines do not support."""
    offload = settings.offload
    if offload is None:
        return
    try:
        offload.spec()
    except InputError as error:
        yield lines.error(error.what, (SECTION, *written(error.where)), error.hint)
    hook = offload.role_switch
    if hook is not None and (hook.url is None) == (hook.command is None):
        what = "`role_switch` requires a URL or a command" + (", not both" if hook.url else ", but has neither")
        hint = "give `url: http://...` or `command: [PROGRAM, ...]`"
        yield lines.error(what, (SECTION, "offload", "role_switch"), hint)


def site_faults(
    cluster: Cluster, settings: GatewaySettings, lines: Lines, places: Mapping[str, Key]
) -> Iterator[FileError]:
    """Yield what prevents offloading of prefills in this cluster. Args: `places` of its instances in the file."""
    yield from _early_faults(cluster, settings, lines, places)
    yield from _copy_faults(cluster, settings, lines, places)
    if settings.offload is None:
        return
    if cluster.file.discovery is not None:
        what = "`offload` and `discovery` cannot be given together"
        yield lines.error(what, (SECTION, "offload"), "list the instances of a cluster that offloads prefills")
        return
    try:
        settings.control_spec().build(cluster)
    except InputError as error:
        yield lines.error(error.what, (SECTION, "offload"), error.hint)
    if settings.offload.role_switch is None:
        return
    for instance in cluster.instances:
        endpoint = instance.endpoint
        if instance.engine:
            what = f"a role switch restarts an engine, and {instance.engine} has several data-parallel ranks"
            hint = "remove `role_switch`, or start a server for each rank"
            yield lines.error(what, places[instance.name], hint)
        if endpoint is None or endpoint.bootstrap:
            continue
        if instance.role == "decode" and instance.traits.needs_bootstrap:
            what = f"{instance.name} may switch to prefill, and {endpoint.protocol} then needs its bootstrap server"
            yield lines.error(what, (*places[instance.name], "endpoint"), "add `bootstrap: HOST:PORT`")


def _early_faults(
    cluster: Cluster, settings: GatewaySettings, lines: Lines, places: Mapping[str, Key]
) -> Iterator[FileError]:
    """Yield instances whose KV cache cannot be requested before it is computed, although `layerwise` requires it."""
    homes = {instance.datacenter for instance in cluster.instances if instance.role != "prefill"}
    offload = settings.offload
    switches_roles = offload is not None and offload.role_switch is not None
    for instance in cluster.instances:
        at_home, endpoint = instance.datacenter in homes, instance.endpoint
        early = settings.layerwise if at_home else settings.layerwise or (offload is not None and offload.layerwise)
        if (
            endpoint is None
            or not early
            or not (instance.role == "prefill" or (switches_roles and instance.role == "decode"))
        ):
            continue
        place, traits = (*places[instance.name], "endpoint"), instance.traits
        if traits.concurrent_legs:
            continue
        if not traits.early_pull:
            what = f"`layerwise` requests the KV cache of {instance.name} early"
            what += f", which {endpoint.protocol} does not support"
            yield lines.error(what, place, "leave `layerwise` out, or use kvroute's connector")
        elif not endpoint.bootstrap:
            what = f"`layerwise` requests the KV cache of {instance.name} early, which needs its connector's address"
            yield lines.error(what, place, "add `bootstrap: HOST:PORT`, its connector's `advertised_host` and `port`")


def _copy_faults(
    cluster: Cluster, settings: GatewaySettings, lines: Lines, places: Mapping[str, Key]
) -> Iterator[FileError]:
    """Yield instances that cannot send or receive a copy of a cached prefix, although `rule` requires it."""
    if settings.offload is None or not settings.offload.copy_s:
        return
    rule = settings.offload.rule
    for instance in cluster.instances:
        endpoint = instance.endpoint
        if endpoint is not None and not instance.traits.prefix_copies and instance.role != "decode":
            what = f"`rule: {rule}` copies prefixes of {instance.name}, which {endpoint.protocol} does not support"
            yield lines.error(what, (*places[instance.name], "endpoint"), "write `rule: scarce`, or use protocol vllm")
