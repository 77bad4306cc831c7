"""Options in `kv_connector_extra_config`, validated in one place. Unknown options are rejected."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec

from kvroute_engine.errors import InputError

Dscp = Annotated[int, msgspec.Meta(ge=0, le=63)]
KV_CLASS = "kv"
"""Traffic class of a transfer whose request specifies none."""
STORAGE_CLASS = "storage"
"""Traffic class of blocks between engines and buffer servers."""
CONNECTIONS_MAX = 64


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's options; every one has a default."""

    host: str = "127.0.0.1"
    """Address on which a prefill instance listens. Any address but a loopback one requires a token."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Rank r of data-parallel replica d listens on `port + d * tp + r`; 0: the system chooses."""
    advertised_host: str = ""
    """Address that decode instances receive; empty: `host`, or this machine's own address if `host` is a wildcard."""
    data_plane: Literal["tcp", "nixl"] = "tcp"
    """`nixl`: KV bytes are read from the peer's memory by NIXL if the peer has it too, otherwise sent over TCP."""
    connections: Annotated[int, msgspec.Meta(ge=1, le=CONNECTIONS_MAX)] = 4
    """Maximum number of TCP connections of one transfer. Each chunk goes to a connection that has room."""
    congestion_control: str = ""
    """TCP congestion control by the kernel's name, `cubic` or `bbr`; empty: the system's. The sender's setting is
    used."""
    buffer_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 << 20
    """Size of each socket buffer, if the kernel allows it; 0: chosen by TCP."""
    layerwise: bool = False
    """True: a prefill instance sends a layer's blocks to waiting peers while later layers are still being computed."""
    token: str = ""
    """Secret shared by all instances. It is never sent over the network."""
    token_env: str = ""
    """Name of the environment variable that holds the token instead."""
    checksum: bool = False
    """Request a CRC-32 of every chunk."""
    dscp: dict[str, Dscp] = {}
    """DSCP code point by traffic class: `{"kv": 10}`. Other classes stay unmarked."""
    hold_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Time after which a prefill instance frees blocks that have not been fetched, in seconds."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Time without any byte moved after which a peer has failed, in seconds."""
    instance: str = ""
    """Name of this instance in the cluster file, and `source` of its transfers in metrics; empty: host and port. Ranks
    of one server (`dp` in the cluster file) add `_dp` and their number."""
    buffer: Annotated[str, msgspec.Meta(pattern=r"^(.+:\d{1,5})?\Z")] = ""
    """`host:port` of the buffer server on this node, which writes full blocks to the store. With it, prefill instances
    load stored blocks from buffer servers; empty: no store."""
    write_back_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """Memory for blocks that wait to be written; blocks that do not fit are not stored."""
    staging: bool = False
    """Copy through host buffers even if the KV cache is in host memory. Device memory always uses them."""
    fault_file: str = ""
    """For tests: a file that contains `corrupt-layer-N`, `corrupt-layer-N-block-K` (block K of the prompt) or
    `stall-layer-N` as long as the fault is active."""

    @property
    def protected(self) -> bool:
        """True if peers must prove a token."""
        return bool(self.token or self.token_env)

    def secret(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the token, given directly or in an environment variable.

        Raises:
            InputError: the named variable is missing or empty.
        """
        if not self.token_env:
            return self.token
        secret = environ.get(self.token_env, "")
        if not secret:
            raise InputError(f"{self.token_env} is not set", where="token_env", hint="export it before vllm starts")
        return secret

    def advertised(self) -> str:
        """Return the address at which decode instances reach this one."""
        if self.advertised_host:
            return self.advertised_host
        if not _wildcard(self.host):
            return self.host
        return os.environ.get("VLLM_HOST_IP") or socket.gethostbyname(socket.gethostname())


def read_options(extra: Mapping[str, Any], where: str = "kv_connector_extra_config") -> ConnectorSettings:
    """Parse the options. Args: `where` names their place in errors.

    Raises:
        InputError: an unknown option, a wrong value, or an address other than loopback without a token.
    """
    known = ConnectorSettings.__struct_fields__
    for word in extra:
        if word not in known:
            near = get_close_matches(word, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"unknown option {word!r}", where=where, hint=hint)
    try:
        options = msgspec.convert(dict(extra), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise InputError(str(error), where=where) from None
    if options.token and options.token_env:
        raise InputError("token and token_env are both given", where=where, hint="remove one")
    if not (options.token or options.token_env or _loopback(options.host)):
        raise InputError(
            f"every client that reaches {options.host} could read the KV cache",
            where=f"{where}.host",
            hint="give token_env (or token), the same on all instances",
        )
    if options.congestion_control and not _congestion_control(options.congestion_control):
        raise InputError(
            f"this system does not support congestion control {options.congestion_control!r}",
            where=f"{where}.congestion_control",
            hint="see /proc/sys/net/ipv4/tcp_available_congestion_control",
        )
    return options


def of_rank(options: ConnectorSettings, rank: int | None) -> ConnectorSettings:
    """Return the options of a data-parallel rank: its instance has the name that the cluster file's ranks have. Args:
    `rank` in its server; None: the server has only one."""
    if rank is None or not options.instance:
        return options
    return msgspec.structs.replace(options, instance=f"{options.instance}_dp{rank}")


def _congestion_control(name: str) -> bool:
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _wildcard(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")
