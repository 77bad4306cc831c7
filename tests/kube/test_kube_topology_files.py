"""Label files of a Downward API volume, as the kubelet writes and swaps them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.kube.label_volume import Volume

from kvroute_engine.topology_labels import read_labels


def test_files_and_versions(tmp_path: Path) -> None:
    """Each file is a label; an empty one is a label that the pod does not have."""
    volume = Volume(tmp_path / "topology")
    assert read_labels(volume.folder) == {}
    volume.write(zone="us-east-1a\n", rack="", block="b 1")
    assert read_labels(volume.folder) == {"zone": "us-east-1a", "block": "b 1"}
    volume.write(zone="us-east-1b", rack="r1", block="")
    assert read_labels(volume.folder) == {"zone": "us-east-1b", "rack": "r1"}


def test_a_folder_without_versions(tmp_path: Path) -> None:
    """Plain files count; hidden files, folders, binary and oversized files do not."""
    (tmp_path / "zone").write_text("z1")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("x" * 5000)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert read_labels(tmp_path) == {"zone": "z1"}
    assert read_labels(tmp_path / "missing") == {}
    with pytest.raises(OSError, match="Not a directory"):
        read_labels(tmp_path / "zone")


def test_no_read_mixes_two_versions(tmp_path: Path) -> None:
    """While another thread swaps versions all the time."""
    volume = Volume(tmp_path / "topology")
    volume.write(zone="0", rack="0", block="0")
    done = threading.Event()

    def swap() -> None:
        for number in range(1, 300):
            volume.write(zone=str(number), rack=str(number), block=str(number))
        done.set()

    thread = threading.Thread(target=swap)
    thread.start()
    seen = []
    while not done.is_set():
        labels = read_labels(volume.folder)
        assert len(labels) == 3
        assert len(set(labels.values())) == 1, labels
        seen.append(int(labels["zone"]))
    thread.join()
    assert seen == sorted(seen)
    assert read_labels(volume.folder)["rack"] == "299"
