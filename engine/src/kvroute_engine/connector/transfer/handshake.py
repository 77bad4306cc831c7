"""Both sides of a handshake: they check the token, the address and the layout of the KV cache."""

from __future__ import annotations

import socket
from collections.abc import Callable

from msgspec.structs import replace

from kvroute_engine.connector.blocks import BlockLayout
from kvroute_engine.connector.options import ConnectorSettings
from kvroute_engine.connector.transfer.authentication import address_of, fresh_nonce, session, verify_proof
from kvroute_engine.connector.transfer.channel import FramedSocket, tune
from kvroute_engine.connector.transfer.wire import VERSION, Challenge, Hello, Welcome, WireError, WireRefusal

_REASON_CHARACTERS_MAX = 500
"""Maximum length of a reason, so that a refusal fits into a frame of the handshake."""


def greet(channel: FramedSocket, token: str, layout: BlockLayout, traffic_class: str, instance: str) -> None:
    """Perform the handshake with the server that `channel` is connected to.

    Args:
        layout: layout of the local KV cache.
        traffic_class: class with which the server marks its packets.
        instance: name of this instance.

    Raises:
        WireError: the server does not have the token, or refuses.
        OSError: the connection broke, or the handshake was not complete in time.
    """
    challenge = channel.expect(Challenge)
    if challenge.version != VERSION:
        raise WireError("version", f"this side has protocol version {VERSION}, the peer {challenge.version}")
    host, port = address_of(channel.sock.getpeername())
    hello = Hello(
        version=VERSION,
        nonce=fresh_nonce(),
        host=host,
        port=port,
        layout=layout,
        traffic_class=traffic_class,
        instance=instance,
    )
    keys = session(token, challenge, hello)
    channel.send(replace(hello, proof=keys.client_proof))
    welcome = channel.expect(Welcome)
    if not verify_proof(welcome.proof, keys.server_proof):
        raise WireError("token", "the peer has a different token")
    channel.secure(send_key=keys.client_key, receive_key=keys.server_key)


def accept_handshake(
    channel: FramedSocket,
    token: str,
    options: ConnectorSettings,
    room: Callable[[], bool],
    mismatch: Callable[[BlockLayout], str],
) -> Hello:
    """Perform the handshake with a peer and prepare its connection for sending KV.

    Args:
        room: called once the peer has proved the token; returns whether one more connection is accepted.
        mismatch: called after that with the peer's layout; returns why it does not fit, or an empty text.

    Raises:
        WireError: the peer was refused and has received the reason.
        OSError: the connection broke, or the handshake was not complete in time.
    """
    challenge = Challenge(VERSION, fresh_nonce())
    channel.send(challenge)
    hello = channel.expect(Hello)
    if hello.version != VERSION:
        raise _refused(
            channel, WireRefusal("version", f"this side has protocol version {VERSION}, the peer {hello.version}")
        )
    keys = session(token, challenge, hello)
    if not verify_proof(hello.proof, keys.client_proof):
        raise _refused(channel, WireRefusal("token", "the peer has a different token"))
    refusal = _refusal(channel, hello, options) if room() else WireRefusal("busy", "too many KV connections")
    if refusal is None and (reason := mismatch(hello.layout)):
        refusal = WireRefusal("layout", reason)
    if refusal:
        raise _refused(channel, refusal)
    tune(
        channel.sock,
        options.dscp.get(hello.traffic_class, 0),
        control=options.congestion_control,
        buffer_bytes=options.buffer_bytes,
    )
    channel.send(Welcome(keys.server_proof))
    channel.secure(send_key=keys.server_key, receive_key=keys.client_key)
    return hello


def _refused(channel: FramedSocket, refusal: WireRefusal) -> WireError:
    channel.send(replace(refusal, reason=refusal.reason[:_REASON_CHARACTERS_MAX]))
    return WireError(refusal.code, refusal.reason)


def _refusal(channel: FramedSocket, hello: Hello, options: ConnectorSettings) -> WireRefusal | None:
    here = address_of(channel.sock.getsockname())
    if options.protected and (hello.host, hello.port) != here and not _advertised(hello, here[1], options):
        return WireRefusal(
            "address",
            f"the peer has connected to {hello.host} port {hello.port}, but this server is {here[0]} port {here[1]}: "
            "where addresses are translated, advertised_host must name the address that peers connect to",
        )
    return None


def _advertised(hello: Hello, port: int, options: ConnectorSettings) -> bool:
    """Return whether the peer connected to the advertised address, even if the network translates it to another one."""
    try:
        found = socket.getaddrinfo(options.advertised(), port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(address_of((str(address[0]), port)) == (hello.host, hello.port) for *_, address in found)


def difference(ours: BlockLayout, theirs: BlockLayout) -> str:
    """Describe the first field in which two layouts differ; empty if they are equal."""
    for field in ours.__struct_fields__:
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            return f"KV caches differ: {field} is {here} here and {there} there"
    return ""
