"""Checks a cluster's instances against the `gateway:` section: models, endpoints and partners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology import Cluster, FileError, InstanceEntry
from kvroute.types import TRAITS, Discovered, Instance
from kvroute_engine.files.form import Key, Lines, nearest


def model_faults(cluster: Cluster, settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield aliases of models that the cluster does not have."""
    if cluster.file.discovery is not None:
        return  # the models of the engines are not known yet
    known = sorted({instance.model for instance in cluster.instances})
    for alias, model in settings.models.items():
        if model not in known:
            yield lines.error(f"no instance serves {model!r}", (SECTION, "models", alias), nearest(model, known))
    for model in settings.prompt.tokenizers:
        if model not in known:
            hint = nearest(model, known)
            yield lines.error(f"no instance serves {model!r}", (SECTION, "prompt", "tokenizers", model), hint)
    for name, adapter in settings.adapters.items():
        place = (SECTION, "adapters", name)
        if adapter.model and adapter.model not in known:
            what, hint = f"no instance serves {adapter.model!r}", nearest(adapter.model, known)
            yield lines.error(what, (*place, "model"), hint)
        elif not adapter.model and len(known) > 1:
            yield lines.error("the base model is missing", place, f"add `model:` with one of {', '.join(known)}")
        if name in known or name in settings.models:
            hint = "name the adapter as the engines do (`--lora-modules NAME=PATH`)"
            yield lines.error(f"{name!r} is also the name of a model", place, hint)


def live_faults(cluster: Cluster, settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield what prevents real engines from being served: endpoints, bootstrap servers, partners for each protocol."""
    places = places_of(cluster, lines)
    if cluster.file.discovery is not None and not cluster.instances:
        return
    if ("instances", 0) not in lines.of and not any(instance.endpoint for instance in cluster.instances):
        hint = "list the instances, each with `endpoint: {url: ...}`, or serve emulated engines with --embedded"
        yield lines.error("instances made by a shorthand have no endpoint", ("instances",), hint)
        return
    first: dict[str, str] = {}
    for instance in sorted(cluster.instances, key=lambda instance: places[instance.name][1:]):
        yield from _endpoint_faults(instance, settings, places[instance.name], first, lines)
    if cluster.file.discovery is None:
        yield from _partner_faults(cluster, places, lines)


def places_of(cluster: Cluster, lines: Lines) -> dict[str, Key]:
    """Return the position of each instance in the file, by name."""
    entries = cluster.file.instances
    assert isinstance(entries, list), "a Cluster keeps its file without shorthands"
    return {entry.name: ("instances", index) for index, entry in enumerate(entries) if isinstance(entry, InstanceEntry)}


def _endpoint_faults(
    instance: Instance, settings: GatewaySettings, key: Key, first: dict[str, str], lines: Lines
) -> Iterator[FileError]:
    endpoint, place = instance.endpoint, (*key, "endpoint")
    if endpoint is None:
        hint = "add `endpoint: {url: http://HOST:PORT}`, or serve emulated engines with --embedded"
        yield lines.error(f"{instance.name} has no endpoint", key, hint)
        return
    other = first.setdefault(endpoint.url.rstrip("/").lower(), instance.server)
    if other != instance.server:
        yield lines.error(
            f"{endpoint.url} is already the endpoint of {other}", (*place, "url"), "give each instance its own endpoint"
        )
    if instance.role == "prefill" and instance.traits.needs_bootstrap and not endpoint.bootstrap:
        what = f"{endpoint.protocol} needs the prefill engine's bootstrap server"
        yield lines.error(what, place, "add `bootstrap: HOST:PORT`")
    if endpoint.kv_replay and not endpoint.kv_events:
        yield lines.error("`kv_replay` requires `kv_events`", (*place, "kv_replay"), "add `kv_events: tcp://...`")
    if settings.prefix == "events" and not endpoint.kv_events:
        hint = "add `kv_events: tcp://HOST:PORT`, or write `prefix: auto`"
        yield lines.error(f"`prefix: events` needs the KV events of {instance.name}", place, hint)


def discovered_fault(engine: Discovered, settings: GatewaySettings) -> str:
    """Return why the settings exclude a discovered engine; empty if they do not."""
    endpoint, traits = engine.endpoint, TRAITS[engine.endpoint.protocol]
    if settings.prefix == "events" and not endpoint.kv_events:
        return "`prefix: events` needs its KV events"
    if settings.layerwise and engine.role == "prefill" and not traits.concurrent_legs:
        if not traits.early_pull:
            return f"`layerwise` requests its KV cache early, which {endpoint.protocol} does not support"
        if not endpoint.bootstrap:
            return "`layerwise` requests its KV cache early, which needs its connector's address in `bootstrap`"
    return ""


def _partner_faults(cluster: Cluster, places: Mapping[str, Key], lines: Lines) -> Iterator[FileError]:
    """Yield prefill without decode and decode without prefill, once for each model and protocol."""
    groups: dict[tuple[str, str, str], list[Instance]] = {}
    for instance in cluster.instances:
        groups.setdefault((instance.model, instance.protocol, instance.role), []).append(instance)
    for (model, protocol, role), members in groups.items():
        partner = {"prefill": "decode", "decode": "prefill"}.get(role)
        if partner is not None and (model, protocol, partner) not in groups:
            what = f"{members[0].name} has no {partner} instance to work with: none for {model} uses {protocol}"
            hint = f"give it a partner with `protocol: {protocol}`, or make it `role: both`"
            yield lines.error(what, places[members[0].name], hint)
