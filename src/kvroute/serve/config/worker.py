"""Input of one worker process of `kvroute serve --workers`, from its parent process."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvroute.serve.config.settings import GatewaySettings
from kvroute.types import Endpoint


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One of several processes that serve one port of one machine. It is passed as a file, since it has secrets."""

    number: int
    """From 1."""
    workers: int
    """Number of all workers."""
    counts_file: str
    """Counts of admitted requests (`OtherWorkers`)."""
    stream_socket: str
    """Socket of the stream in which the workers share their bookings (`StreamServer`)."""
    port: int
    """Port for clients, which all workers share."""
    ready_file: str
    """Written when the worker serves."""
    salt_secret: bytes
    """Secret from which cache salts are derived, unless the settings name another one."""
    admin_token: str
    """Token of the worker's own admin port, which only the parent process uses: those of the settings may change while
    the workers and the parent process read them one after the other."""
    endpoints: dict[str, Endpoint] | None = None
    """Endpoints of emulated engines; None: those in the cluster file."""

    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        """Return the settings of this worker: the shared port, an admin port that is open to this machine only, and an
        event log of its own."""
        listen, admin, log = settings.listen, settings.admin, settings.log
        return replace(
            settings,
            listen=replace(listen, port=self.port, metrics=False),
            admin=replace(
                admin, host="127.0.0.1", port=0, tls=None, push_token=self.admin_token, read_token=self.admin_token
            ),
            log=replace(log, events=event_log_of(log.events, self.number)),
        )


def event_log_of(path: str | None, number: int) -> str | None:
    """Return the event log of a worker: `events.jsonl` is `events-1.jsonl` for the first one."""
    if path is None:
        return None
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}-{number}{whole.suffix}"))
