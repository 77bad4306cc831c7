"""The `qos` section of a cluster file as msgspec Structs: link type and traffic classes, as the user wrote them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from kvroute.topology.schema import Entry, Name

LinkType: TypeAlias = Literal["infiniband", "roce"]
Dscp: TypeAlias = Annotated[int, Meta(ge=0, le=63)]


class TrafficClassEntry(Entry, frozen=True, kw_only=True):
    """A class of traffic."""

    name: Name
    share: Annotated[int, Meta(ge=0, le=100)]
    """Percent of the link that the class has if all classes send. The shares of all classes add up to 100."""
    default: bool = False
    """Whether the class takes all traffic that no other class takes. One class does."""
    high: bool = False
    """InfiniBand: whether the high-priority table serves the class."""
    service_level: Annotated[int, Meta(ge=0, le=15)] | None = None
    """InfiniBand: service level that senders set. Default: 0 for the default class, then 1, 2, ..."""
    vl: Annotated[int, Meta(ge=0, le=14)] | None = None
    """InfiniBand: virtual lane. Default: 0 for the default class, then 1, 2, ..."""
    dscp: list[Dscp] = field(default_factory=list)
    """RoCE: DSCP values that senders set; the first is the one that kvroute prints for them."""
    priority: Annotated[int, Meta(ge=0, le=7)] | None = None
    """RoCE: priority and hardware traffic class. Default: that of its first DSCP value (an eighth of it), else 0."""
    lossless: bool = True
    """RoCE: whether packets of the class may not be dropped."""
    pfc: bool | None = None
    """RoCE: whether priority flow control pauses the class. Default: as `lossless`."""
    library: Literal["nccl", "ucx"] | None = None
    """Library that sends this traffic; kvroute prints its environment variable."""


class QosEntry(Entry, frozen=True, kw_only=True):
    """Traffic classes of the compute network, for `kvroute plan qos`."""

    link: LinkType | None = None
    """Type of the compute network; `--link` overrides it."""
    vls: Literal[1, 2, 4, 8, 15] = 4
    """InfiniBand: data virtual lanes of every port."""
    mtu: Literal[256, 512, 1024, 2048, 4096] = 4096
    """InfiniBand: bytes of a full packet."""
    table_entries: Annotated[int, Meta(ge=1, le=64)] = 8
    """InfiniBand: entries of a port's arbitration table."""
    interface: Name = "eth0"
    """RoCE: network interface of the NIC in the printed commands."""
    classes: list[TrafficClassEntry] = field(default_factory=list)
    """Default: `model` (98 %, high), `kv` (1 %) and `other` (1 %)."""


DEFAULT_CLASSES = (
    TrafficClassEntry(name="model", share=98, high=True, dscp=[26], library="nccl"),
    TrafficClassEntry(name="kv", share=1, dscp=[18], library="ucx"),
    TrafficClassEntry(name="other", share=1, default=True, lossless=False),
)
"""Collectives of the model take almost everything, as in DualPath (5 and A.1); KV transfers use what is left."""
