"""Validates a cluster file before a gateway serves it: all faults at once, each with its line and its fix.

It checks the file, the files that it names and the environment; health checks show whether engines respond.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path

from msgspec.structs import fields, replace

from kvroute.control.log import check_can_create
from kvroute.serve.config.autoscaling_checks import scaled_cluster_faults
from kvroute.serve.config.instance_checks import live_faults, model_faults, places_of
from kvroute.serve.config.offload_checks import site_faults
from kvroute.serve.config.policy import with_policy_name
from kvroute.serve.config.settings import SECTION, GatewaySettings, TlsSettings
from kvroute.serve.config.settings_checks import settings_faults
from kvroute.topology import Cluster, FileError
from kvroute.topology.reading.assembly import examine
from kvroute.types import InputError, InputErrors, cannot_listen
from kvroute_engine.addresses import bound, host_port
from kvroute_engine.files.document import Overlay, salvage_section
from kvroute_engine.files.form import Lines

_CROSSING = ("models", "adapters", "prompt", "offload", "autoscaling", "layerwise", "prefix")
"""Parts of the section that are checked against the instances."""


def deployment_of(
    text: str,
    source: str,
    *,
    embedded: bool | None = False,
    environ: Mapping[str, str] | None = os.environ,
    overlay: Overlay = lambda plain: plain,
) -> tuple[Cluster, GatewaySettings]:
    """Return the cluster and the gateway settings of a cluster file's text; `source` is its path.

    Args:
        text: the whole file.
        source: its path, used in errors; relative paths inside start at its folder.
        embedded: the engines are emulated, so that instances need no `endpoint`; None: they are if none has one.
        environ: environment variables; None: another machine will serve the file, so neither the variables nor the
            files that the section names are checked.
        overlay: adds values of the command line to the file; not to the section `gateway`.

    Raises:
        InputErrors: every fault.
    """
    problems: list[InputError] = []
    cluster = None
    try:
        cluster, faults = examine(text, source, overlay)
        problems += faults
    except InputErrors as errors:
        problems += errors.problems
    settings, lines, wrong = _examined(text, source, environ)
    problems += wrong
    if cluster is not None:
        lines = dataclasses.replace(lines, written_at=cluster.lines.written_at)
    if cluster is not None and all(lines.sure(SECTION, part, whole=True) for part in _CROSSING):
        problems += model_faults(cluster, settings, lines)
        problems += site_faults(cluster, settings, lines, places_of(cluster, lines))
        problems += scaled_cluster_faults(cluster, settings, lines)
        if embedded is None:
            embedded = cluster.file.discovery is None and not any(instance.endpoint for instance in cluster.instances)
        if not embedded:
            problems += live_faults(cluster, settings, lines)
    if cluster is None or problems:
        raise _errors(problems)
    return cluster, settings


def faults_here(text: str, source: str) -> tuple[InputError, ...]:
    """Return why a gateway on this machine would refuse a file that is otherwise valid: missing files that its section
    names, and environment variables."""
    try:
        deployment_of(text, source, embedded=None)
    except InputErrors as errors:
        return errors.problems
    return ()


def settings_of(text: str, source: str, environ: Mapping[str, str] | None = os.environ) -> GatewaySettings:
    """Return the `gateway:` section of a cluster file's text, or the defaults if there is none; paths become absolute.
    `environ` as for `deployment_of`.

    Raises:
        InputErrors: every fault of the section, and of the key file that it names.
    """
    settings, _, problems = _examined(text, source, environ)
    if problems:
        raise _errors(problems)
    return settings


def _examined(
    text: str, source: str, environ: Mapping[str, str] | None
) -> tuple[GatewaySettings, Lines, list[InputError]]:
    """Return the section, with defaults for parts that cannot be read, and every fault of it."""
    try:
        written, lines, faults = salvage_section(
            text, source, SECTION, GatewaySettings, partial(with_policy_name, SECTION)
        )
    except InputErrors as errors:
        return GatewaySettings(), Lines(source, unread_keys={(SECTION,)}), list(errors.problems)
    unread_keys = {str(key[1]) if len(key) > 1 else "*" for key in lines.unread_keys}
    plain = GatewaySettings()
    unread = {
        entry.name: getattr(plain, entry.name)
        for entry in fields(plain)
        if entry.encode_name in unread_keys or "*" in unread_keys
    }
    settings = _placed(replace(written, **unread), Path(source).parent)
    found = settings_faults(settings, lines, environ)
    return settings, lines, [*faults, *(fault for fault in found if not _may_be_unread(fault, unread_keys))]


def _may_be_unread(fault: InputError, unread_keys: Set[str]) -> bool:
    """Whether a fault may result from a part of the section that could not be read."""
    part = fault.field.removeprefix(f"{SECTION}.").split(".")[0] if isinstance(fault, FileError) else "keys"
    others = {"parameters": "policy", "upstream_key_env": "keys", "admin": "listen"}
    return bool(unread_keys & {"*", part, others.get(part, part)})


def check_places(settings: GatewaySettings) -> None:
    """Raise InputError if the log cannot be created or an address cannot be listened on at present."""
    if settings.log.events is not None:
        check_can_create(Path(settings.log.events))
    listen, admin = settings.listen, settings.admin
    for host, port, where in ((listen.host, listen.port, "listen"), (admin.host, admin.port, "admin")):
        try:
            _try(host, port)
        except OSError as error:
            why = error.strerror or str(error)
            raise cannot_listen(host_port(host, port), error.errno, why, where=f"{SECTION}.{where}") from None


def _try(host: str, port: int) -> None:
    """Bind an address and release it; for a name, every address of it, as the server does. Raises OSError."""
    if (held := bound(host, port)) is not None:
        held.close()
        return
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:
        raise OSError("the host name is not valid") from None
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in places))
    for address in addresses:
        try:
            _try(address, port)
        except OSError as error:
            # A machine without IPv6 listens on the other addresses of a name.
            if error.errno != errno.EAFNOSUPPORT or len(addresses) == 1:
                raise


def _errors(problems: list[InputError]) -> InputErrors:
    once = {str(problem): problem for problem in problems}
    return InputErrors(sorted(once.values(), key=lambda problem: getattr(problem, "line", 0)))


def _placed(settings: GatewaySettings, folder: Path) -> GatewaySettings:
    """Return the same settings with every path made absolute, relative to `folder`."""

    def path(text: str | None) -> str | None:
        return text if text is None else os.path.abspath(folder / Path(text).expanduser())

    listen, admin, offload = settings.listen, settings.admin, settings.offload

    def files(tls: TlsSettings | None) -> TlsSettings | None:
        return tls and replace(tls, certificate=path(tls.certificate), key=path(tls.key))

    def program_of(command: list[str]) -> list[str]:
        program, *rest = command
        return [str(path(program)) if os.sep in program else program, *rest]

    hook = offload.role_switch if offload is not None else None
    if offload is not None and hook is not None and hook.command:
        offload = replace(offload, role_switch=replace(hook, command=program_of(hook.command)))
    scaling = settings.autoscaling
    if scaling is not None and scaling.hook is not None and scaling.hook.command:
        scaling = replace(scaling, hook=replace(scaling.hook, command=program_of(scaling.hook.command)))
    if scaling is not None and scaling.role_switch is not None and scaling.role_switch.command:
        command = program_of(scaling.role_switch.command)
        scaling = replace(scaling, role_switch=replace(scaling.role_switch, command=command))
    shared = settings.replication
    return replace(
        settings,
        listen=replace(listen, tls=files(listen.tls)),
        admin=replace(admin, tls=files(admin.tls)),
        prompt=replace(
            settings.prompt,
            tokenizer=path(settings.prompt.tokenizer),
            tokenizers={model: str(path(text)) for model, text in settings.prompt.tokenizers.items()},
        ),
        keys=replace(settings.keys, file=path(settings.keys.file)),
        log=replace(settings.log, events=path(settings.log.events)),
        offload=offload,
        autoscaling=scaling,
        replication=shared and replace(shared, password_file=path(shared.password_file)),
    )
