"""Checks the service classes of the gateway's settings beyond their types."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvroute.serve.config.service_classes import DEFAULT_CLASS
from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology import FileError
from kvroute_engine.files.form import Lines, nearest


def service_class_faults(settings: GatewaySettings, keys: Collection[str], lines: Lines) -> Iterator[FileError]:
    """Yield every fault. Args: `keys`: names of all keys."""
    for key, name in settings.keys.classes.items():
        place = (SECTION, "keys", "classes", key)
        if key not in keys:
            hint = nearest(key, sorted(keys)) or "there are no keys: add `file` or `known`"
            yield lines.error(f"there is no key {key!r}", place, hint)
        known = name in settings.classes or name == DEFAULT_CLASS
        if not known and lines.sure(SECTION, "classes", name, whole=True):  # otherwise the class itself has a fault
            hint = nearest(name, sorted(settings.classes)) or f"add it: `classes: {{{name}: {{...}}}}`"
            yield lines.error(f"there is no class {name!r}", place, hint)
    for name, found in settings.classes.items():
        section = (SECTION, "classes", name)
        if found.rated and not keys:
            field = "requests_per_minute" if found.requests_per_minute is not None else "tokens_per_minute"
            what = "rates are limited for each API key, but none are configured"
            yield lines.error(what, (*section, field), "add `keys`, or leave the rate out")
        if found.priority_max is not None and found.priority_max < found.priority:
            what = f"`priority_max` ({found.priority_max}) is below `priority` ({found.priority})"
            yield lines.error(what, (*section, "priority_max"), f"give {found.priority} or more, or leave it out")
        slo = found.slo
        if slo is not None and slo.ttft_s is None and not slo.header:
            what = "the section `slo` sets no limit"
            yield lines.error(what, (*section, "slo"), "add `ttft: 2 s`, or `header: true`")
