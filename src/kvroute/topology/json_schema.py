"""JSON Schema of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvroute.files.json_schema import Schema, file_json_schema
from kvroute.topology.schema import ClusterFile


def cluster_json_schema(sections: Mapping[str, type[msgspec.Struct]]) -> Schema:
    """Return the schema as plain values; `sections` has the types of top-level mappings that the cluster file leaves
    open, by key (`gateway`)."""
    return file_json_schema(ClusterFile, "kvroute cluster file", sections)
