"""Options of `kvroute epp` for the configuration of Envoy that it writes."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer

from kvroute.types import InputError
from kvroute_engine.addresses import host_port

if TYPE_CHECKING:
    from kvroute.serve.lifecycle.deployment import Deployment

ENVOY = "Envoy"
EnvoyListen: TypeAlias = Annotated[
    str, typer.Option(metavar="IP:PORT", help="Address of Envoy for clients.", rich_help_panel=ENVOY)
]
EnvoyAdmin: TypeAlias = Annotated[
    str, typer.Option(metavar="IP:PORT", help="Address of Envoy's admin interface.", rich_help_panel=ENVOY)
]
Fail: TypeAlias = Annotated[
    str,
    typer.Option(
        help="While no picker responds: `closed`, status 503, or `open`, engines in turn with a warning.",
        rich_help_panel=ENVOY,
    ),
]
EnvoyFallback: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT,...",
        help="With --fail open and discovered engines: those in turn, such as a headless Service of decode engines.",
        rich_help_panel=ENVOY,
    ),
]
Body: TypeAlias = Annotated[
    str,
    typer.Option(help="How Envoy sends request bodies: `streamed` or `buffered`.", rich_help_panel=ENVOY),
]
_HOST = re.compile(r"(?!-)[A-Za-z0-9._-]{1,253}", re.ASCII)


@dataclass(frozen=True, slots=True)
class EnvoyChoices:
    """The options, checked."""

    listen: str
    admin: str
    fail_open: bool
    buffered: bool
    fallback: tuple[str, ...]

    @classmethod
    def of(cls, listen: str, admin: str, fail: str, body: str, fallback: str) -> EnvoyChoices:
        """Return the options of the command line; raise InputError if one has a wrong value."""
        one_of("--fail", fail, ("closed", "open"))
        one_of("--body", body, ("streamed", "buffered"))
        places = tuple(_named_place(part.strip()) for part in fallback.split(",")) if fallback.strip() else ()
        admin = admin and _place(admin, "--envoy-admin")
        return cls(_place(listen, "--envoy-listen"), admin, fail == "open", body == "buffered", places)

    def config_text(self, deployment: Deployment, picker_port: int) -> str:
        """Return Envoy's configuration as JSON. Raises InputError if it cannot be made: see `envoy_config`."""
        from kvroute.epp.envoy_config import EnvoySpec, envoy_config

        options = EnvoySpec(
            reachable(deployment.settings.listen.host, picker_port),
            self.listen,
            self.admin,
            fail_open=self.fail_open,
            buffered=self.buffered,
            fallback=self.fallback,
        )
        config = envoy_config(deployment.cluster, deployment.settings, options, deployment.source)
        return msgspec.json.format(msgspec.json.encode(config), indent=2).decode()


def one_of(option: str, value: str, known: tuple[str, str]) -> None:
    """Check the value of an option that has two.

    Raises:
        InputError: it is another one.
    """
    if value not in known:
        raise InputError(f"unknown value {value!r}", where=option, hint=f"use {known[0]} or {known[1]}")


def reachable(host: str, port: int) -> str:
    """Return the `host:port` at which an Envoy on this machine reaches a picker that listens at `host`."""
    found = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(host, host)
    return host_port(found, port)


def _place(text: str, option: str) -> str:
    if _is_ip(text.rpartition(":")[0]) and _is_port(text.rpartition(":")[2]):
        return text
    raise InputError(f"{text!r} is not an address", where=option, hint="write IP:PORT")


def _named_place(text: str) -> str:
    host, _, port = text.rpartition(":")
    if (_HOST.fullmatch(host) or _is_ip(host)) and _is_port(port):
        return text
    hint = "write HOST:PORT, several separated by commas"
    raise InputError(f"{text!r} is not an address", where="--envoy-fallback", hint=hint)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < 65536
