"""Counters of network cards from a folder like sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute_engine.agent.counters import PortCounters, WatchedNic, default_nics
from kvroute_engine.errors import InputError


def interface(sysfs: Path, name: str, tx: int, rx: int, *, hardware: bool = True, rdma: str = "") -> None:
    folder = sysfs / "class/net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "statistics/tx_bytes").write_text(f"{tx}\n")
    (folder / "statistics/rx_bytes").write_text(f"{rx}\n")
    if hardware:
        (folder / "device").mkdir(exist_ok=True)
    if rdma:
        (folder / "device/infiniband" / rdma).mkdir(parents=True, exist_ok=True)


def rdma_device(sysfs: Path, name: str, tx_words: int, rx_words: int, port: int = 1) -> None:
    folder = sysfs / "class/infiniband" / name / "ports" / str(port) / "counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "port_xmit_data").write_text(f"{tx_words}\n")
    (folder / "port_rcv_data").write_text(f"{rx_words}\n")


def test_counts_begin_with_0_and_go_on(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", 10**15, 7)
    counters = PortCounters(tmp_path, [WatchedNic("eth0", 2)])
    assert counters.read() == {2: (0, 0)}
    interface(tmp_path, "eth0", 10**15 + 500, 10)
    assert counters.read() == {2: (500, 3)}


def test_rdma_counts_in_words_and_belongs_to_its_interface(tmp_path: Path) -> None:
    """RoCE: the interface counts 100 bytes, its RDMA device 1,000 words on two ports."""
    interface(tmp_path, "eth0", 0, 0, rdma="mlx5_0")
    rdma_device(tmp_path, "mlx5_0", 0, 0)
    rdma_device(tmp_path, "mlx5_0", 0, 0, port=2)
    counters = PortCounters(tmp_path, [WatchedNic("eth0", 0)])
    counters.read()
    interface(tmp_path, "eth0", 100, 0, rdma="mlx5_0")
    rdma_device(tmp_path, "mlx5_0", 600, 5)
    rdma_device(tmp_path, "mlx5_0", 400, 0, port=2)
    assert counters.read() == {0: (4100, 20)}


def test_an_infiniband_device_needs_no_interface(tmp_path: Path) -> None:
    rdma_device(tmp_path, "mlx5_3", 0, 0)
    counters = PortCounters(tmp_path, [WatchedNic("mlx5_3", 1)])
    counters.read()
    rdma_device(tmp_path, "mlx5_3", 10, 20)
    assert counters.read() == {1: (40, 80)}


def test_devices_of_one_port_are_added_up_and_wrap_around_one_by_one(tmp_path: Path) -> None:
    """eth0 has 32 bits and wraps around, eth1 begins again."""
    interface(tmp_path, "eth0", 2**32 - 100, 0)
    interface(tmp_path, "eth1", 5000, 0)
    counters = PortCounters(tmp_path, [WatchedNic("eth0", 0), WatchedNic("eth1", 0)])
    counters.read()
    interface(tmp_path, "eth0", 50, 0)
    interface(tmp_path, "eth1", 30, 0)
    assert counters.read() == {0: (180, 0)}


def test_a_card_that_disappears_keeps_its_counts(tmp_path: Path) -> None:
    """And is counted again when it is back."""
    interface(tmp_path, "eth0", 0, 0)
    counters = PortCounters(tmp_path, [WatchedNic("eth0", 0)])
    counters.read()
    interface(tmp_path, "eth0", 100, 100)
    counters.read()
    path = tmp_path / "class/net/eth0/statistics/tx_bytes"
    path.unlink()
    assert counters.read() == {0: (100, 100)}
    assert counters.failed == {path}
    interface(tmp_path, "eth0", 150, 100)
    assert counters.read() == {0: (150, 100)}
    assert not counters.failed


def test_default_order_is_that_of_the_names_with_their_numbers(tmp_path: Path) -> None:
    """Interfaces without hardware, such as bridges, are left out."""
    for name in ("eth10", "eth2", "ens1f1", "ens1f0"):
        interface(tmp_path, name, 0, 0)
    interface(tmp_path, "docker0", 0, 0, hardware=False)
    assert default_nics(tmp_path) == (
        WatchedNic("ens1f0", 0),
        WatchedNic("ens1f1", 1),
        WatchedNic("eth2", 2),
        WatchedNic("eth10", 3),
    )
    assert default_nics(tmp_path / "absent") == ()


@pytest.mark.parametrize("text", ["eth0", "=1", "eth0=x", "eth0=-1", "a/b=1", ""])
def test_a_nic_is_a_device_and_a_port(text: str) -> None:
    with pytest.raises(InputError, match="is not a device and a port; write eth0=0"):
        WatchedNic.parse(text)


def test_devices_that_do_not_exist_are_an_error(tmp_path: Path) -> None:
    assert WatchedNic.parse("eth0.100=3") == WatchedNic("eth0.100", 3)
    with pytest.raises(InputError, match=r"eth9 is neither in .*/class/net nor in .*/class/infiniband"):
        PortCounters(tmp_path, [WatchedNic("eth9", 0)])
