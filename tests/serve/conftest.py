"""Gateways of one process share their rehearsals."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvroute.control import ControlSpec
from kvroute.serve.lifecycle import deployment
from kvroute.serve.lifecycle.compilation import warm_up
from kvroute.topology import Cluster


@pytest.fixture(scope="session", autouse=True)
def _rehearsed_once() -> Iterator[None]:
    """Rehearse each configuration of the core once: kernels that this process has loaded stay loaded, and a rehearsal
    takes half of the time of a short test."""
    done: set[bytes] = set()

    def once(spec: ControlSpec, cluster: Cluster, text: str) -> None:
        if (name := msgspec.json.encode(spec)) not in done:
            warm_up(spec, cluster, text)
            done.add(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deployment, "warm_up", once)
        yield
