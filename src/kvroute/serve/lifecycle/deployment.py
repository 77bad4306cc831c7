"""One loaded cluster file: its text, the cluster and settings it defines, and the limits that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvroute.control import Control, ControlSpec, LogHeader
from kvroute.http.server.request_parser import RequestLimits
from kvroute.serve.api.prompt import Prompts
from kvroute.serve.config.offload import EMULATED_HOOK, RoleSwitchSection
from kvroute.serve.config.preflight import check_places, deployment_of
from kvroute.serve.config.settings import GatewaySettings
from kvroute.serve.lifecycle.compilation import warm_up
from kvroute.serve.observe.event_log import LogBounds
from kvroute.serve.observe.redaction import redacted_file
from kvroute.serve.proxy.admission.admission import AdmissionLimits
from kvroute.topology import Cluster
from kvroute.topology.reading.assembly import read_text
from kvroute.topology.schema import yaml_text
from kvroute.types import Endpoint, InputError
from kvroute_engine.files.document import Overlay, read_plain

_NEEDS_RESTART: tuple[tuple[str, Callable[[GatewaySettings], object]], ...] = (
    ("listen.host", lambda settings: settings.listen.host),
    ("listen.port", lambda settings: settings.listen.port),
    ("listen.metrics", lambda settings: settings.listen.metrics),
    ("listen.tls", lambda settings: settings.listen.tls is None),
    ("admin.host", lambda settings: settings.admin.host),
    ("admin.port", lambda settings: settings.admin.port),
    ("admin.tls", lambda settings: settings.admin.tls is None),
    ("tracing.otlp", lambda settings: settings.tracing.otlp),
    ("tracing.share", lambda settings: settings.tracing.share),
    ("forwarding_thread", lambda settings: settings.forwarding_thread),
    ("replication", lambda settings: settings.replication),
)
"""Settings that a running gateway cannot change."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The cluster file's text, and the cluster and settings that it defines."""

    text: str
    """With the values of the command line, if there are any."""
    cluster: Cluster
    settings: GatewaySettings
    source: str = ""
    """Path of the file."""

    @property
    def folder(self) -> Path:
        """Where relative paths of the file start."""
        return Path(self.source).parent

    @classmethod
    def read(
        cls,
        path: Path,
        adjust: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings,
        endpoints: Mapping[str, Endpoint] | None = None,
        overlay: Overlay | None = None,
    ) -> Deployment:
        """Read a cluster file.

        Args:
            path: the file.
            adjust: applies the options of the command line to the settings.
            endpoints: endpoints of emulated engines, which replace those in the file.
            overlay: adds values of the command line to the file.

        Raises:
            InputErrors: all errors in the file.
        """
        return cls.of(read_text(path), str(path), adjust, endpoints, overlay)

    @classmethod
    def of(
        cls,
        text: str,
        source: str,
        adjust: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings,
        endpoints: Mapping[str, Endpoint] | None = None,
        overlay: Overlay | None = None,
    ) -> Deployment:
        """Do the same from the file's text; `source` is its name in errors."""
        embedded = endpoints is not None
        if overlay is None:
            cluster, settings = deployment_of(text, source, embedded=embedded)
        else:
            cluster, settings = deployment_of(text, source, embedded=embedded, overlay=overlay)
            text = yaml_text(overlay(read_plain(text, source)))
        if endpoints is not None:
            cluster, settings = _emulated(cluster, endpoints, source), _switchable(settings)
        return cls(text, cluster, adjust(settings), source)

    @classmethod
    def check_embedded(
        cls, path: Path, adjust: Callable[[GatewaySettings], GatewaySettings] = lambda settings: settings
    ) -> None:
        """Check all that can be checked before emulated engines are started: the file, the settings, the log, the
        ports.

        Raises:
            InputError: the settings, the log or a port cannot be used; InputErrors: all errors in the file.
        """
        cluster, settings = deployment_of(read_text(path), str(path), embedded=True)
        _check_emulated(cluster, str(path))
        check_places(adjust(_switchable(settings)))

    @property
    def control_spec(self) -> ControlSpec:
        """Specification of a control core for these settings."""
        return self.settings.control_spec()

    def core(self) -> Control:
        """Return a new control core; its warm-up ensures that its first decision takes no longer than later ones."""
        spec = self.control_spec
        warm_up(spec, self.cluster, self.text)
        return spec.build(self.cluster)

    @property
    def log_header(self) -> LogHeader:
        """The event log's first line: the cluster file without its secrets. A large file takes about a second."""
        return LogHeader(cluster=redacted_file(self.text, "the cluster file"), spec=self.control_spec)

    @property
    def log_bounds(self) -> LogBounds:
        """Size limits of the event log."""
        log = self.settings.log
        return LogBounds(file_bytes=float(log.file_bytes), total_bytes=float(log.total_bytes))

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Limits of the admission queue."""
        limits = self.settings.limits
        return AdmissionLimits(
            in_flight=limits.in_flight,
            queue=limits.queue,
            queue_wait_s=float(limits.queue_wait_s),
            per_key=limits.per_key,
            of_key=self.settings.keys.concurrency,
        )

    @property
    def http_limits(self) -> RequestLimits:
        """Limits for clients of the HTTP server."""
        limits = self.settings.limits
        return RequestLimits(
            header_bytes=int(limits.header_bytes),
            body_bytes=int(limits.body_bytes),
            bodies_bytes=int(limits.bodies_bytes),
            header_s=float(limits.header_s),
            body_s=float(limits.body_s),
            keep_alive_s=float(limits.keep_alive_s),
            connections=limits.connections,
            connections_per_address=limits.connections_per_address or max(1, 3 * limits.connections // 4),
            stall_s=float(limits.stall_s),
        )

    def prompts(self) -> Prompts:
        """Return a reader of prompts; the caller closes it. Raises InputError if the tokenizer cannot be read."""
        prompt = self.settings.prompt
        tokenizer = Path(prompt.tokenizer) if prompt.tokenizer else None
        return Prompts(
            tokenizer,
            tokenizers={model: Path(path) for model, path in prompt.tokenizers.items()},
            ask_engines=prompt.without_tokenizer == "engine",
            block_tokens=prompt.block_tokens,
            bytes_per_token=prompt.bytes_per_token,
            context_tokens=prompt.context,
            memory_bytes=float(prompt.memory_bytes),
            wait_max_s=float(self.settings.limits.queue_wait_s),
        )

    def needs_restart(self, before: Deployment) -> Iterator[str]:
        """Yield the settings that differ from those in `before` and take effect only in a new process."""
        for name, value in _NEEDS_RESTART:
            if value(self.settings) != value(before.settings):
                yield name


def _switchable(settings: GatewaySettings) -> GatewaySettings:
    """Return the settings with the emulated engines' own hook for role switches, unless the file names a hook."""
    offload = settings.offload
    if offload is None or offload.role_switch is not None:
        return settings
    role_switch = RoleSwitchSection(url=EMULATED_HOOK)
    return msgspec.structs.replace(settings, offload=msgspec.structs.replace(offload, role_switch=role_switch))


def _check_emulated(cluster: Cluster, source: str) -> None:
    if cluster.file.discovery is not None:
        what = "emulated engines are the instances that a file lists, and `discovery` finds others"
        raise InputError(what, where=source, hint="list the instances and leave `discovery` out")
    for instance in cluster.instances:
        if not instance.traits.emulated:
            what = f"instance {instance.name} uses protocol {instance.protocol}, but emulated engines only support vllm"
            raise InputError(what, where=source, hint="leave `protocol` out")


def _emulated(cluster: Cluster, endpoints: Mapping[str, Endpoint], source: str) -> Cluster:
    _check_emulated(cluster, source)
    for instance in cluster.instances:
        if instance.name not in endpoints:
            what = f"instance {instance.name} has no emulated engine: they are only created at startup"
            raise InputError(what, where=source, hint="restart the command")
    instances = tuple(msgspec.structs.replace(i, endpoint=endpoints[i.name]) for i in cluster.instances)
    return replace(cluster, instances=instances)
