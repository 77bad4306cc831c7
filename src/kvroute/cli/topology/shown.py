"""What `kvroute topology show` prints of a cluster: a tree, the links of each tier and the tier of each pair."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvroute.topology import Cluster, bandwidth_text, duration_text, size_text
from kvroute.topology.reading.assembly import NO_INSTANCES
from kvroute.topology.tree import ROLE_COLOURS, TIER_NAMES, Domain, domain_tree, tier_rows, uplinks_text
from kvroute_engine.files.units import about_bandwidth, about_size

_SHOWN_CHILDREN = 8
"""Number of children listed for a domain with more children; the rest is counted."""
_SHOWN_NODES = 64
"""Maximum number of nodes for which the tree is complete."""
_MATRIX = (40, 64)
"""Largest tier matrix printed: rows (prefill), columns (decode)."""
_TIER_STYLES = ("green", "cyan", "yellow", "dark_orange", "red")


def print_cluster(out: Console, cluster: Cluster) -> None:
    """Print the cluster for people."""
    out.print(_tree(cluster))
    out.print(_tier_table(cluster))
    if cluster.instances:
        _print_matrix(out, cluster)
    else:
        out.print(f"\n{NO_INSTANCES[0].upper()}{NO_INSTANCES[1:]}.", soft_wrap=True)


def counts(cluster: Cluster) -> dict[str, int]:
    """Return how many of each kind of thing the cluster has."""
    roles = [instance.role for instance in cluster.instances]
    found = {
        "datacenters": len(set(cluster.places.datacenters)),
        "pods": len(cluster.file.pods),
        "racks": len(cluster.file.racks),
        "nodes": len(cluster.places.nodes),
        "GPUs": sum(node.gpus for node in cluster.places.nodes),
        "links": len(cluster.links),
        "instances": len(roles),
    }
    return found | {role: roles.count(role) for role in ROLE_COLOURS if role in roles}


def document(cluster: Cluster) -> dict[str, Any]:
    """Return what `kvroute topology show --json` prints."""
    prefill, decode = _sides(cluster)
    tiers = [
        {"tier": tier, "name": name, "bytes_per_s": bytes_per_s, "latency_s": latency_s, "pairs": pairs}
        for tier, (name, pairs, bytes_per_s, latency_s) in enumerate(tier_rows(cluster))
    ]
    return {
        "name": cluster.name,
        "counts": counts(cluster),
        "ecmp": cluster.ecmp,
        "tiers": tiers,
        "instances": msgspec.to_builtins(cluster.instances),
        "links": msgspec.to_builtins(cluster.links),
        "tier_matrix": {
            "prefill": [cluster.instances[i].name for i in prefill],
            "decode": [cluster.instances[i].name for i in decode],
            "tier": cluster.tier[prefill][:, decode].tolist(),
        },
    }


def _sides(cluster: Cluster) -> tuple[list[int], list[int]]:
    prefill = [i for i, instance in enumerate(cluster.instances) if instance.role != "decode"]
    decode = [i for i, instance in enumerate(cluster.instances) if instance.role != "prefill"]
    return prefill, decode


def _tree(cluster: Cluster) -> Tree:
    root = domain_tree(cluster)
    tree = Tree(Text(cluster.name, style="bold"), guide_style="dim")
    _grow(tree, root, whole=len(cluster.places.nodes) <= _SHOWN_NODES)
    for wan in cluster.file.wan:
        capacity = (
            bandwidth_text(wan.bytes_per_s) if wan.count == 1 else f"{wan.count} x {bandwidth_text(wan.bytes_per_s)}"
        )
        tree.add(Text(f"{wan.source} - {wan.target}: {capacity}, {duration_text(wan.latency_s)}"))
    return tree


def _grow(tree: Tree, domain: Domain, whole: bool) -> None:
    shown = domain.children if whole else domain.children[:_SHOWN_CHILDREN]
    for child in shown:
        _grow(tree.add(_label(child)) if child.name else tree, child, whole)
    rest = domain.children[len(shown) :]
    if rest:
        instances = sum(1 for child in rest for _ in child.all_instances())
        tree.add(Text(f"... and {len(rest)} more {rest[0].kind}s with {instances} instances", style="dim"))


def _label(domain: Domain) -> Text:
    text = Text(domain.name, style="" if domain.kind == "node" else "bold")
    if domain.uplinks:
        text.append(f"  up {uplinks_text(domain.uplinks)}", style="dim")
    for instance in domain.instances:
        gpus = instance.gpus[0].rpartition("/")[2], instance.gpus[-1].rpartition("/")[2]
        span = gpus[0] if len(instance.gpus) == 1 else f"{gpus[0]}-{gpus[1]}"
        text.append("  ")
        text.append(instance.name, style=ROLE_COLOURS[instance.role])
        text.append(f" [{span}]", style="dim")
        text.append(f" {size_text(instance.kv_capacity_bytes)}", style="dim")
    return text


def _tier_table(cluster: Cluster) -> Table:
    headings = ("tier", "prefill to decode", "bandwidth", "in bytes", "latency", "pairs")
    table = Table(*headings, box=None, header_style="bold")
    for tier, (name, pairs, bytes_per_s, latency_s) in enumerate(tier_rows(cluster)):
        bandwidth = (about_bandwidth(bytes_per_s), f"{about_size(bytes_per_s)}/s")
        table.add_row(
            str(tier),
            name,
            *bandwidth,
            duration_text(latency_s),
            str(pairs),
            style=_TIER_STYLES[tier] if pairs else "dim",
        )
    return table


def _print_matrix(out: Console, cluster: Cluster) -> None:
    prefill, decode = _sides(cluster)
    names = [cluster.instances[i].name for i in prefill]
    width = max(map(len, names))
    too_wide = width + 1 + 2 * len(decode) > out.width
    if len(prefill) > _MATRIX[0] or len(decode) > _MATRIX[1] or too_wide:
        out.print(f"\nThe tier matrix ({len(prefill)} x {len(decode)}) is in --json.", style="dim")
        return
    out.print(f"\nTier of each prefill (row) and decode (column) instance: {', '.join(_legend(cluster))}")
    for row, name in zip(cluster.tier[prefill][:, decode].tolist(), names, strict=True):
        line = Text(f"{name:<{width}} ")
        for tier in row:
            line.append(f" {tier}", style=_TIER_STYLES[tier])
        out.print(line, soft_wrap=True)
    columns = f"{cluster.instances[decode[0]].name} ... {cluster.instances[decode[-1]].name}"
    out.print(Text(f"{'':<{width}}  {columns if len(decode) > 1 else columns.split()[0]}", style="dim"))


def _legend(cluster: Cluster) -> list[str]:
    return [f"{tier} {name}" for tier, name in enumerate(TIER_NAMES) if tier_rows(cluster)[tier][1]]
