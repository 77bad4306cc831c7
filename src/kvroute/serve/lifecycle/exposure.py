"""Finds the ports that the settings open to other machines without authentication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.observe.logs import log_event
from kvroute_engine.origins import is_loopback


@dataclass(frozen=True, slots=True)
class Exposure:
    """A port that any machine may use without authentication."""

    field: str
    """The settings section of the port."""
    host: str
    why: str
    hint: str

    def __str__(self) -> str:
        return f"{self.field}.host is {self.host}: {self.why}; {self.hint}"


def exposures(settings: GatewaySettings) -> Iterator[Exposure]:
    """Yield every port that listens on more than loopback without keys or a token."""
    listen, admin = settings.listen, settings.admin
    if not (is_loopback(listen.host) or settings.keys.file or settings.keys.known):
        why = "every machine that reaches this port may use the engines"
        yield Exposure("gateway.listen", listen.host, why, "set gateway.keys, or listen on 127.0.0.1")
    if not (is_loopback(admin.host) or admin.read_token):
        why = "every machine that reaches this port may read the state, metrics and settings of the gateway"
        yield Exposure("gateway.admin", admin.host, why, "set gateway.admin.read_token, or listen on 127.0.0.1")


def log_exposures(settings: GatewaySettings, started: GatewaySettings, before: GatewaySettings | None = None) -> None:
    """Log a warning for each port that is open to all machines.

    Args:
        settings: the settings in effect from now on.
        started: the settings at the start of the process; a reload does not change the address of a port.
        before: the settings before a reload; ports that were open with them are not logged again.
    """
    known = set(_listening(before, started)) if before is not None else set()
    for exposure in _listening(settings, started):
        if exposure not in known:
            log_event("warning", "port_open_to_all", address=exposure.host, field=exposure.field, reason=exposure.why)


def _listening(settings: GatewaySettings, started: GatewaySettings) -> Iterator[Exposure]:
    listen = replace(settings.listen, host=started.listen.host)
    return exposures(replace(settings, listen=listen, admin=replace(settings.admin, host=started.admin.host)))
