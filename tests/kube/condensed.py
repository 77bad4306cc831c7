"""Answers as the recorder shortened them."""

from __future__ import annotations

import re
from typing import Any

TRIMMED = "<trimmed>"


def without_omitted(value: Any) -> Any:
    """Return a recorded body without managers that the recorder left out."""
    if isinstance(value, dict):
        return {
            name: without_omitted(part)
            for name, part in value.items()
            if not (name == "managedFields" and isinstance(part, str))
        }
    return [without_omitted(item) for item in value] if isinstance(value, list) else value


def condensed(wanted: Any, found: Any) -> Any:
    """Return an answer as the recorder shortened it: names instead of items, or items' metadata alone."""
    if not isinstance(wanted, dict) or not isinstance(found, dict):
        return found
    if found.get("kind") == "Status" or "items" not in wanted or not isinstance(found.get("items"), list):
        return found
    items, held = wanted["items"], found["items"]
    if isinstance(items, int):
        return {**found, "items": len(held)}
    if items and isinstance(items[0], str):
        return {**found, "items": [item["metadata"]["name"] for item in held]}
    if items and isinstance(items[0], dict) and "metadata" not in items[0]:
        return {**found, "items": [item["metadata"] for item in held]}
    return found


def ageless(event: Any) -> Any:
    """Return a recorded event without the ages in its table, which depend on when it was recorded."""
    found = event.get("object") if isinstance(event, dict) else None
    if not isinstance(found, dict) or found.get("kind") != "Table":
        return event
    rows = [{**row, "cells": [_ageless_cell(cell) for cell in row["cells"]]} for row in found["rows"]]
    return {**event, "object": {**found, "rows": rows}}


def _ageless_cell(cell: Any) -> Any:
    return "<age>" if isinstance(cell, str) and re.fullmatch(r"\d+m\d+s", cell) else cell


def condensed_event(wanted: Any, found: Any) -> Any:
    """Return an event as the recorder shortened it: metadata and status of a pod alone, or the name alone."""
    held = wanted.get("object") if isinstance(wanted, dict) else None
    if held == TRIMMED:
        return {"type": found["type"], "name": found["object"]["metadata"]["name"], "object": TRIMMED}
    if isinstance(held, dict) and held.keys() == {"metadata", "status"} and found["object"].get("kind") == "Pod":
        return {**found, "object": {name: found["object"][name] for name in ("metadata", "status")}}
    return found
