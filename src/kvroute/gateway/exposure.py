"""Which ports the settings open to other machines without asking who they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from kvroute.gateway.logs import note
from kvroute.gateway.settings import GatewaySettings
from kvroute.origins import is_loopback


@dataclass(frozen=True, slots=True)
class Exposure:
    """A port that every machine which reaches it may use."""

    field: str
    """The section that says where it listens."""
    host: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.field}.host is {self.host}: {self.why}; {self.mend}"


def exposures(settings: GatewaySettings) -> Iterator[Exposure]:
    """Every port that listens beyond loopback without keys or a token."""
    listen, admin = settings.listen, settings.admin
    if not (is_loopback(listen.host) or settings.keys.file or settings.keys.known):
        why = "every machine that reaches this port may use the engines"
        yield Exposure("gateway.listen", listen.host, why, "set gateway.keys, or listen on 127.0.0.1")
    if not (is_loopback(admin.host) or admin.read_token):
        why = "every machine that reaches this port may read the state, metrics and settings of the gateway"
        yield Exposure("gateway.admin", admin.host, why, "set gateway.admin.read_token, or listen on 127.0.0.1")


def log_exposures(settings: GatewaySettings, started: GatewaySettings, before: GatewaySettings | None = None) -> None:
    """Log a warning for each port that is open to all.

    Args:
        settings: that hold from now on.
        started: at the start of the process; a reload does not change where a port listens.
        before: the settings before a reload: a port that was open with them is left out.
    """
    known = set(_listening(before, started)) if before is not None else set()
    for exposure in _listening(settings, started):
        if exposure not in known:
            note("warning", "port_open_to_all", address=exposure.host, field=exposure.field, reason=exposure.why)


def _listening(settings: GatewaySettings, started: GatewaySettings) -> Iterator[Exposure]:
    listen = replace(settings.listen, host=started.listen.host)
    return exposures(replace(settings, listen=listen, admin=replace(settings.admin, host=started.admin.host)))
