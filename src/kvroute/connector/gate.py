"""The prefill instance's side of a greeting: who may talk, and with what KV cache of their own."""

from __future__ import annotations

import logging

from kvroute.connector.blocks import Layout
from kvroute.connector.options import Options
from kvroute.connector.wire import (
    VERSION,
    Challenge,
    Channel,
    Hello,
    Refused,
    Welcome,
    fresh_nonce,
    mark,
    proof,
    proven,
    tune,
)

log = logging.getLogger(__name__)


def admitted(channel: Channel, token: str, layout: Layout, options: Options) -> Hello | None:
    """Greet a peer and make its connection ready to send KV on; None if it was refused, and told why."""
    tune(channel.sock, 0, control=options.congestion_control, buffer_bytes=options.buffer_bytes)
    nonce = fresh_nonce()
    channel.send(Challenge(VERSION, nonce))
    hello = channel.expect(Hello)
    refusal = _refusal(hello, nonce, token, layout)
    if refusal:
        log.warning("refused KV connection of %s: %s", hello.instance or "a peer without a name", refusal.reason)
        channel.send(refusal)
        return None
    mark(channel.sock, options.dscp.get(hello.traffic_class, 0))
    channel.send(Welcome(proof(token, "server", nonce, hello.nonce)))
    return hello


def _refusal(hello: Hello, nonce: bytes, token: str, layout: Layout) -> Refused | None:
    if hello.version != VERSION:
        return Refused("version", f"this side speaks version {VERSION}, the peer {hello.version}")
    if not proven(hello.proof, proof(token, "client", nonce, hello.nonce)):
        return Refused("token", "the peer has another token")
    if hello.layout != layout:
        return Refused("layout", f"KV caches differ: {_difference(layout, hello.layout)}")
    return None


def _difference(ours: Layout, theirs: Layout) -> str:
    """The first field in which two layouts differ, in words."""
    for field in ours.__struct_fields__:
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            return f"{field} is {here} here and {there} there"
    return "nothing"
