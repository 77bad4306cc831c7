"""The switch's data plane in the kernel: an XDP program that sums packets before they reach the network stack."""

from kvroute_engine.switch.xdp.libbpf import XdpUnavailable
from kvroute_engine.switch.xdp.offload import PacketSource, XdpOffload

__all__ = ["PacketSource", "XdpOffload", "XdpUnavailable"]
