"""Compiles a gateway's kernels in a process of its own.

The memory of the compiler, 150 MB, ends with that process, and requests do not wait for the compiler's locks during a
reload. The kernels come back through the cache; without one the gateway compiles them itself.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

import msgspec

from kvroute.compiled import NotCached, only_cached, release_compiler
from kvroute.control import ControlSpec, LogHeader
from kvroute.http.forwarding.stream_forwarder import StreamForwarder
from kvroute.topology import Cluster, parse


def warm_up(spec: ControlSpec, cluster: Cluster, text: str) -> None:
    """Run synthetic requests (see `ControlSpec.warm_up`); kernels that are not cached are compiled elsewhere first.

    Args: `text` of the cluster file.
    """
    try:
        with only_cached():
            spec.warm_up(cluster)
    except NotCached:
        job = msgspec.json.encode(LogHeader(cluster=text, spec=spec))
        with suppress(OSError):  # no other process can be started, so this one compiles
            subprocess.run([sys.executable, "-m", __spec__.name], input=job, capture_output=True)
        spec.warm_up(cluster)
    release_compiler()


async def _start_forwarder() -> None:
    forwarder = StreamForwarder()
    forwarder.start()
    forwarder.close()


def main() -> None:
    """Compile the kernels of the cluster and the configuration on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LogHeader)
    job.spec.warm_up(parse(job.cluster))
    asyncio.run(_start_forwarder())


if __name__ == "__main__":
    main()
