"""`kvroute serve`: the live gateway, in front of real or emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvroute.cli.emulate import shares_by_tier
from kvroute.cli.output import check_writable, console, remarks, tell, write_whole
from kvroute.types import Endpoint, InputError

if TYPE_CHECKING:
    from kvroute.gateway.config.settings import GatewaySettings
    from kvroute.gateway.gateway import Gateway
    from kvroute.gateway.lifecycle.deployment import Deployment

ROUTING, PLACE, ENGINES = "Routing", "Addresses", "Emulated engines"
_READY_S = 300.0


def serve(
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file (YAML), with an endpoint for each instance.", show_default=False)
    ],
    policy: Annotated[
        str | None, typer.Option(help="Decode policy; default: the file's, else foresight.", rich_help_panel=ROUTING)
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            help="Evaluate this decode policy without acting on it, and report where it differs.",
            rich_help_panel=ROUTING,
        ),
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(help="Prefill policy; default: the file's.", rich_help_panel=ROUTING)
    ] = None,
    constraint: Annotated[
        str | None,
        typer.Option(help="Topology constraint, e.g. pod:fail or rack:fallback.", rich_help_panel=ROUTING),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Listen address for clients.", rich_help_panel=PLACE)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for clients; 0: any free port.", rich_help_panel=PLACE)
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of dashboard and metrics; 0: any free port.", rich_help_panel=PLACE),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write every event and decision to this file, for replay and explain.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="Format of the messages on stderr: text or json.")] = None,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Also emulate the engines of the file; no GPU needed.", rich_help_panel=ENGINES
        ),
    ] = False,
    kv_scale: Annotated[
        float,
        typer.Option(min=0, max=1, help="Real bytes per modelled byte of KV.", rich_help_panel=ENGINES),
    ] = 1e-3,
    background: Annotated[
        str,
        typer.Option(
            help="Share of link capacity that other traffic uses, see `kvroute emulate`.", rich_help_panel=ENGINES
        ),
    ] = "0",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of emulated engines and random ids.", rich_help_panel=ENGINES)
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write the addresses to this file as JSON when the gateway is ready.", rich_help_panel=PLACE),
    ] = None,
    until_eof: Annotated[
        bool, typer.Option("--until-eof", help="Exit when standard input is closed, e.g. when the parent process ends.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible API in front of prefill and decode engines, with the cost of each KV transfer.

    SIGTERM drains, SIGHUP reloads the cluster file. The settings are in the file's `gateway:` section.

    Example: [bold]kvroute serve --embedded examples/small.yaml[/bold]
    """
    # Ignore SIGHUP until the file is read. This is a handler because child processes would inherit SIG_IGN.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        import uvloop
    except ImportError as error:
        raise InputError(f"{error.name} is not installed", hint="pip install 'kvroute[serve]'") from None
    if log_format not in (None, "text", "json"):
        raise InputError(f"unknown format {log_format!r}", where="--log-format", hint="use text or json")

    def adjust(settings: GatewaySettings) -> GatewaySettings:
        if shadow is not None:
            settings = msgspec.structs.replace(settings, shadow=shadow)
        adjusted = _adjusted(settings, policy, prefill, constraint, host, port, admin_port, log, log_format)
        if embedded and adjusted.measure == "auto":
            # Emulated engines report their transfers. Timing by first bytes too would count the first transfers twice.
            return msgspec.structs.replace(adjusted, measure="engine")
        return adjusted

    from kvroute.gateway.lifecycle.deployment import Deployment

    if ready_file is not None:
        check_writable(ready_file, "--ready-file")
    if embedded:
        shares_by_tier(background)
        Deployment.check_embedded(cluster, adjust)
    with _engines(cluster, kv_scale, background, seed) if embedded else contextlib.nullcontext() as endpoints:

        def read() -> Deployment:
            deployment = Deployment.read(cluster, adjust, endpoints)
            tell(deployment.cluster.remarks)
            return deployment

        uvloop.run(_serve(read, ready_file, seed, until_eof))


def _adjusted(
    settings: GatewaySettings,
    policy: str | None,
    prefill: str | None,
    constraint: str | None,
    host: str | None,
    port: int | None,
    admin_port: int | None,
    log: Path | None,
    log_format: str | None,
) -> GatewaySettings:
    """Return the file's settings, overridden by the command line."""
    replace = msgspec.structs.replace
    listen, admin, logs = settings.listen, settings.admin, settings.log
    listen = replace(listen, host=host or listen.host, port=listen.port if port is None else port)
    admin = replace(admin, port=admin.port if admin_port is None else admin_port)
    if listen.port == admin.port != 0:
        hint = "give --port and --admin-port different numbers"
        raise InputError(f"clients and the admin endpoints would share port {admin.port}", hint=hint)
    logs = replace(logs, events=str(log) if log else logs.events, format=log_format or logs.format)
    changed = replace(
        settings,
        listen=listen,
        admin=admin,
        log=logs,
        policy=policy or settings.policy,
        parameters=settings.parameters if policy in (None, settings.policy) else {},
        prefill=prefill or settings.prefill,
        constraint=settings.constraint if constraint is None else constraint,
    )
    changed.control_spec().check()
    return changed


async def _serve(read: Callable[[], Deployment], ready_file: Path | None, seed: int | None, until_eof: bool) -> None:
    from kvroute.gateway.config.preflight import check_places
    from kvroute.gateway.gateway import Gateway
    from kvroute.gateway.http.open_files import raise_limit
    from kvroute.gateway.observe.logs import Logs

    signals = _Signals(until_eof)
    deployment = read()
    settings = deployment.settings
    check_places(settings)  # only a gateway that can listen rotates an older log
    logs = Logs(settings.log.format, settings.log.level, access=settings.log.access)
    raise_limit()
    _check_files(deployment)
    gateway = Gateway(deployment, seed=seed, logs=logs)

    def read_again() -> Deployment:
        again = read()
        _check_files(again)
        return again

    try:
        await gateway.start()
        # Existing objects live as long as the gateway: exclude them from collection, and collect new ones less often.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        _announce(gateway, deployment, ready_file)
        await _until_told(gateway, read_again, signals)
    finally:
        await gateway.close()
        logs.close()


def _check_files(deployment: Deployment) -> None:
    """Warn if the settings need more open files than the system allows."""
    from kvroute.gateway.observe.file_descriptors import warn_if_too_low

    warn_if_too_low(deployment.settings.limits.connections, len(deployment.cluster.instances))


def _announce(gateway: Gateway, deployment: Deployment, ready_file: Path | None) -> None:
    from kvroute.gateway.lifecycle.exposure import exposures

    settings = deployment.settings
    scheme = "https" if settings.listen.tls else "http"
    url, admin = (
        f"{scheme}://{settings.listen.host}:{gateway.port}",
        f"{'https' if settings.admin.tls else 'http'}://{settings.admin.host}:{gateway.admin_port}",
    )
    for exposure in exposures(settings):
        remarks().print(f"warning: {exposure}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out = console()
    out.print(f"kvroute serves {len(deployment.cluster.instances)} instances of {deployment.cluster.name}: {url}/v1")
    out.print(f"dashboard and metrics: {admin}")
    if ready_file is not None:
        write_whole(ready_file, msgspec.json.encode({"url": url, "admin": admin}).decode(), "--ready-file")


class _Signals:
    """Signals received by the process; handlers are installed before the gateway starts, so no signal is lost."""

    def __init__(self, until_eof: bool) -> None:
        self.reload, self.end, self.end_now = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)
        if until_eof:
            loop.add_reader(sys.stdin.fileno(), self._listen)

    def _told_to_end(self) -> None:
        (self.end_now if self.end.is_set() else self.end).set()

    def _listen(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.end.set()
            self.end_now.set()


async def _until_told(gateway: Gateway, read: Callable[[], Deployment], signals: _Signals) -> None:
    """Serve until SIGTERM or SIGINT and until all requests are finished. A second signal ends at once. The end of
    standard input, if enabled, also ends at once, because the parent process is gone."""

    async def reload() -> None:
        while True:
            await signals.reload.wait()
            signals.reload.clear()
            await gateway.reload(read)

    loop = asyncio.get_running_loop()
    reloads = loop.create_task(reload())
    await signals.end.wait()
    waits = [loop.create_task(gateway.drain()), loop.create_task(signals.end_now.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in (*waits, reloads):
        task.cancel()
    await asyncio.gather(*waits, reloads, return_exceptions=True)


@contextlib.contextmanager
def _engines(cluster: Path, kv_scale: float, background: str, seed: int | None) -> Iterator[dict[str, Endpoint]]:
    """Run emulated engines in a separate process, which ends with this one."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kvroute-")
    except OSError as error:
        hint = "set TMPDIR to a writable folder"
        raise InputError(f"no temporary folder is writable ({error.strerror})", where="--embedded", hint=hint) from None
    with temporary as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "kvroute.cli.app", "emulate", str(cluster), "--ready-file", str(ready)]
        command += ["--kv-scale", str(kv_scale), "--background", background, "--seed", str(seed or 0)]
        # The new session keeps Ctrl-C from the engines: the gateway finishes its requests before the engines stop.
        command.append("--until-eof")
        process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            # This process imports its modules while the other one starts.
            import kvroute.gateway.gateway  # noqa: F401

            yield _wait_for(process, ready)
        finally:
            process.terminate()
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], ready: Path) -> dict[str, Endpoint]:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            # The process has already printed the error.
            raise typer.Exit(process.returncode or 1)
        if ready.exists() and (text := ready.read_bytes()).endswith(b"\n"):
            return msgspec.json.decode(text, type=dict[str, dict[str, Endpoint]])["instances"]
        time.sleep(0.02)
    raise InputError(f"the emulated engines were not ready within {_READY_S:g} s", hint="try a smaller cluster")
