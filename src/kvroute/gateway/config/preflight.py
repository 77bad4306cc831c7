"""Validates a cluster file before a gateway serves it: all faults at once, each with its line and its fix.

It checks the file, the files that it names and the environment; health checks show whether engines respond.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from msgspec.structs import fields, replace

from kvroute.event_log import check_can_create
from kvroute.gateway.config.field_types import LogSize
from kvroute.gateway.config.offload_checks import offload_faults, site_faults
from kvroute.gateway.config.settings import GatewaySettings, TlsSettings
from kvroute.gateway.http.headers import OUR_OWN
from kvroute.gateway.http.listener import bound
from kvroute.gateway.openai_api.api_keys import Keys
from kvroute.policies import DECODE_POLICIES, TopologyConstraint, decode_policy, prefill_policy
from kvroute.topology import Cluster, FileError, InstanceEntry
from kvroute.topology.assembly import examine
from kvroute.topology.document import salvage_section
from kvroute.topology.form import Key, Lines, nearest
from kvroute.topology.units import quantity_text
from kvroute.types import InputError, InputErrors, Instance, cannot_listen

SECTION = "gateway"
SECRET_MIN = 16
"""Minimum length of a secret in characters."""
_KEY = re.compile(r"[!-~]+")
"""Characters that a header can contain without escaping."""
_CROSSING = ("models", "offload", "layerwise", "prefix")
"""Parts of the section that are checked against the instances."""


def deployment_of(
    text: str, source: str, *, embedded: bool = False, environ: Mapping[str, str] | None = os.environ
) -> tuple[Cluster, GatewaySettings]:
    """Return the cluster and the gateway settings of a cluster file's text; `source` is its path.

    Args:
        text: the whole file.
        source: its path, used in errors; relative paths inside start at its folder.
        embedded: the engines are emulated, so that instances need no `endpoint`.
        environ: environment variables; None: another machine will serve the file, so neither the variables nor the
            files that the section names are checked.

    Raises:
        InputErrors: every fault.
    """
    problems: list[InputError] = []
    cluster = None
    try:
        cluster, faults = examine(text, source)
        problems += faults
    except InputErrors as errors:
        problems += errors.problems
    settings, lines, wrong = _examined(text, source, environ)
    problems += wrong
    if cluster is not None and all(lines.sure(SECTION, part, whole=True) for part in _CROSSING):
        problems += model_faults(cluster, settings, lines)
        problems += site_faults(cluster, settings, lines, _places(cluster, lines))
        if not embedded:
            problems += live_faults(cluster, settings, lines)
    if cluster is None or problems:
        raise _errors(problems)
    return cluster, settings


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
        written, lines, faults = salvage_section(text, source, SECTION, GatewaySettings)
    except InputErrors as errors:
        return GatewaySettings(), Lines(source, doubts={(SECTION,)}), list(errors.problems)
    doubts = {str(doubt[1]) if len(doubt) > 1 else "*" for doubt in lines.doubts}
    plain = GatewaySettings()
    unread = {
        entry.name: getattr(plain, entry.name)
        for entry in fields(plain)
        if entry.encode_name in doubts or "*" in doubts
    }
    settings = _placed(replace(written, **unread), Path(source).parent)
    found = _faults(settings, lines, environ)
    return settings, lines, [*faults, *(fault for fault in found if not _doubtful(fault, doubts))]


def _doubtful(fault: InputError, doubts: Set[str]) -> bool:
    """Whether a fault may result from a part of the section that could not be read."""
    part = fault.field.removeprefix(f"{SECTION}.").split(".")[0] if isinstance(fault, FileError) else "keys"
    others = {"parameters": "policy", "upstream_key_env": "keys", "admin": "listen"}
    return bool(doubts & {"*", part, others.get(part, part)})


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
            raise cannot_listen(f"{host}:{port}", error.errno, why, where=f"{SECTION}.{where}") from None


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


def tls_context(tls: TlsSettings, context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """Return the TLS context of a server; an existing `context` uses the certificate of the files from now on. Raises
    InputError if certificate and key cannot be used together."""
    if context is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
    try:
        # A key with a pass phrase must not prompt for it on a terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not readable"
        hint = "give a certificate and its own key, both PEM and without a pass phrase"
        raise InputError(f"certificate and key cannot be used: {why}", where=tls.certificate, hint=hint) from error
    return context


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

    hook = offload.role_switch if offload is not None else None
    if offload is not None and hook is not None and hook.command and os.sep in hook.command[0]:
        program, *rest = hook.command
        offload = replace(offload, role_switch=replace(hook, command=[path(program), *rest]))
    return replace(
        settings,
        listen=replace(listen, tls=files(listen.tls)),
        admin=replace(admin, tls=files(admin.tls)),
        prompt=replace(settings.prompt, tokenizer=path(settings.prompt.tokenizer)),
        keys=replace(settings.keys, file=path(settings.keys.file)),
        log=replace(settings.log, events=path(settings.log.events)),
        offload=offload,
    )


def _faults(settings: GatewaySettings, lines: Lines, environ: Mapping[str, str] | None) -> Iterator[InputError]:
    yield from _policy_faults(settings, lines)
    yield from _oracle_faults(settings, lines)
    yield from _log_faults(settings, lines)
    yield from offload_faults(settings, lines)
    if environ is not None:
        yield from _file_faults(settings, lines)
    yield from _key_faults(settings, lines, environ)
    listen, admin = settings.listen, settings.admin
    if listen.port == admin.port != 0:
        what = f"`listen` and `admin` both use port {admin.port}"
        yield lines.error(what, (SECTION, "admin", "port"), "give each its own port")
    for index, name in enumerate(settings.forward_headers):
        if name.lower().encode() in OUR_OWN:
            what = f"the gateway sets {name} itself and cannot forward the client's"
            yield lines.error(what, (SECTION, "forward_headers", index), "leave it out")


def _policy_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    try:
        decode_policy(settings.policy, **settings.parameters)
    except InputError as error:
        field = "parameters" if settings.policy in DECODE_POLICIES else "policy"
        yield lines.error(error.what, (SECTION, field), error.hint)
    if settings.shadow:
        try:
            decode_policy(settings.shadow)
        except InputError as error:
            yield lines.error(error.what, (SECTION, "shadow"), error.hint)
    try:
        prefill_policy(settings.prefill)
    except InputError as error:
        yield lines.error(error.what, (SECTION, "prefill"), error.hint)
    if settings.constraint:
        try:
            TopologyConstraint.parse(settings.constraint)
        except InputError as error:
            yield lines.error(error.what, (SECTION, "constraint"), error.hint)


def _log_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    log = settings.log
    if log.total_bytes < 2 * log.file_bytes:
        what = f"`total_size` ({quantity_text(log.total_bytes)}) is less than twice `file_size`"
        hint = f"make `total_size` {quantity_text(LogSize(2 * log.file_bytes))} or more, or `file_size` smaller"
        yield lines.error(what, (SECTION, "log", "total_size"), hint)


def _oracle_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    oracle, key = settings.oracle, (SECTION, "oracle")
    prometheus = oracle.prometheus
    if oracle.source == "prometheus" and prometheus is None:
        yield lines.error("`source: prometheus` requires a `prometheus` section", key, "add `prometheus: {url: ...}`")
    if prometheus is None:
        return
    if oracle.source != "prometheus":
        hint = "write `source: prometheus`, or leave `prometheus` out"
        yield lines.error(f"`prometheus` is not used with `source: {oracle.source}`", (*key, "prometheus"), hint)
    if bool(prometheus.per_tier) == (prometheus.per_link is not None):
        hint = "give `per_tier: {rack: QUERY, ...}` or `per_link: {query: QUERY, label: link}`"
        what = "both `per_tier` and `per_link` are given" if prometheus.per_link else "no query is given"
        yield lines.error(what, (*key, "prometheus"), hint)


def _file_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    tokenizer, events = settings.prompt.tokenizer, settings.log.events
    if tokenizer is not None and not (Path(tokenizer).is_file() or Path(tokenizer, "tokenizer.json").is_file()):
        hint = "give a tokenizer.json, or the folder that contains it"
        yield lines.error(f"there is no tokenizer at {tokenizer}", (SECTION, "prompt", "tokenizer"), hint)
    if events is not None and not Path(events).parent.is_dir():
        what = f"there is no folder {Path(events).parent}"
        yield lines.error(what, (SECTION, "log", "events"), "create it, or name a file in an existing folder")
    for port, tls in (("listen", settings.listen.tls), ("admin", settings.admin.tls)):
        if tls is not None:
            yield from _tls_faults(tls, (SECTION, port, "tls"), lines)


def _tls_faults(tls: TlsSettings, key: Key, lines: Lines) -> Iterator[FileError]:
    parts = {"certificate": tls.certificate, "key": tls.key}
    missing = {part: path for part, path in parts.items() if not Path(path).is_file()}
    for part, path in missing.items():
        yield lines.error(f"there is no file {path}", (*key, part), "paths are relative to the cluster file")
    if not missing:
        try:
            tls_context(tls)
        except InputError as error:
            yield lines.error(error.what, key, error.hint)


def _key_faults(settings: GatewaySettings, lines: Lines, environ: Mapping[str, str] | None) -> Iterator[InputError]:
    if environ is None and settings.keys.file is not None:
        return
    try:
        keys = Keys.of(settings.keys)
    except InputErrors as errors:
        yield from errors.problems
        return
    except InputError as error:
        yield lines.error(str(error), (SECTION, "keys", "file"))
        return
    for name in settings.keys.concurrency:
        if name not in keys.names:
            hint = nearest(name, keys.names) or "there are no keys: add `file` or `known`"
            yield lines.error(f"there is no key {name!r}", (SECTION, "keys", "concurrency", name), hint)
    for name in settings.keys.tenants:
        if name not in keys.names:
            hint = nearest(name, keys.names) or "there are no keys: add `file` or `known`"
            yield lines.error(f"there is no key {name!r}", (SECTION, "keys", "tenants", name), hint)
    yield from _salt_faults(settings, keys.required, lines, environ)
    variable, key = settings.upstream_key_env, (SECTION, "upstream_key_env")
    if variable is not None and not keys.required:
        hint = "add `keys`, or leave this out to forward the clients' own keys"
        yield lines.error("all clients would use the engines' key, because no client keys are required", key, hint)
    elif variable is not None and environ is not None and not environ.get(variable):
        yield lines.error(f"the environment variable {variable} is not set", key, f"export {variable}=...")
    elif variable is not None and environ is not None and not _KEY.fullmatch(environ[variable]):
        what = f"the environment variable {variable} contains a character that is not valid in a key"
        yield lines.error(what, key, "set it to the key alone: printable ASCII characters without spaces")


def _salt_faults(
    settings: GatewaySettings, has_keys: bool, lines: Lines, environ: Mapping[str, str] | None
) -> Iterator[FileError]:
    mode, variable = settings.cache_salt, settings.cache_salt_secret_env
    if mode != "none" and not has_keys:
        what = f"`cache_salt: {mode}` requires client keys, but none are configured"
        yield lines.error(what, (SECTION, "cache_salt"), "add `keys`, or write `cache_salt: none`")
    if mode == "per-tenant" and not settings.keys.tenants:
        hint = "add `keys: {tenants: {KEY: TENANT}}`, or write `cache_salt: per-key`"
        yield lines.error("no key has a tenant", (SECTION, "cache_salt"), hint)
    if variable is None:
        return
    key = (SECTION, "cache_salt_secret_env")
    if mode == "none":
        hint = "write `cache_salt: per-key` or `per-tenant`, or leave this out"
        yield lines.error("the secret is not used with `cache_salt: none`", key, hint)
    elif environ is not None and len(environ.get(variable, "")) < SECRET_MIN:
        hint = f"export {variable}=... with {SECRET_MIN} or more random characters"
        yield lines.error(f"the environment variable {variable} is not set, or too short", key, hint)


def model_faults(cluster: Cluster, settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield aliases of models that the cluster does not have."""
    known = sorted({instance.model for instance in cluster.instances})
    for alias, model in settings.models.items():
        if model not in known:
            yield lines.error(f"no instance serves {model!r}", (SECTION, "models", alias), nearest(model, known))


def live_faults(cluster: Cluster, settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield what prevents real engines from being served: endpoints, bootstrap servers, partners for each protocol."""
    places = _places(cluster, lines)
    if ("instances", 0) not in lines.of and not any(instance.endpoint for instance in cluster.instances):
        hint = "list the instances, each with `endpoint: {url: ...}`, or serve emulated engines with --embedded"
        yield lines.error("instances made by a shorthand have no endpoint", ("instances",), hint)
        return
    first: dict[str, str] = {}
    for instance in sorted(cluster.instances, key=lambda instance: places[instance.name][1:]):
        yield from _endpoint_faults(instance, settings, places[instance.name], first, lines)
    yield from _partner_faults(cluster, places, lines)


def _places(cluster: Cluster, lines: Lines) -> dict[str, Key]:
    """Return the position of each instance in the file, by name."""
    entries = cluster.file.instances
    assert isinstance(entries, list), "a Cluster keeps its file without shorthands"
    return {entry.name: ("instances", index) for index, entry in enumerate(entries) if isinstance(entry, InstanceEntry)}


def _endpoint_faults(
    instance: Instance, settings: GatewaySettings, key: Key, first: dict[str, str], lines: Lines
) -> Iterator[FileError]:
    endpoint, place = instance.endpoint, (*key, "endpoint")
    if endpoint is None:
        hint = "add `endpoint: {url: http://HOST:PORT}`, or serve emulated engines with --embedded"
        yield lines.error(f"{instance.name} has no endpoint", key, hint)
        return
    other = first.setdefault(endpoint.url.rstrip("/").lower(), instance.name)
    if other != instance.name:
        yield lines.error(
            f"{endpoint.url} is already the endpoint of {other}", (*place, "url"), "give each instance its own endpoint"
        )
    if instance.role == "prefill" and instance.traits.needs_bootstrap and not endpoint.bootstrap:
        what = f"{endpoint.protocol} needs the prefill engine's bootstrap server"
        yield lines.error(what, place, "add `bootstrap: HOST:PORT`")
    if endpoint.kv_replay and not endpoint.kv_events:
        yield lines.error("`kv_replay` requires `kv_events`", (*place, "kv_replay"), "add `kv_events: tcp://...`")
    if settings.prefix == "events" and not endpoint.kv_events:
        hint = "add `kv_events: tcp://HOST:PORT`, or write `prefix: auto`"
        yield lines.error(f"`prefix: events` needs the KV events of {instance.name}", place, hint)


def _partner_faults(cluster: Cluster, places: Mapping[str, Key], lines: Lines) -> Iterator[FileError]:
    """Yield prefill without decode and decode without prefill, once for each model and protocol."""
    groups: dict[tuple[str, str, str], list[Instance]] = {}
    for instance in cluster.instances:
        groups.setdefault((instance.model, instance.protocol, instance.role), []).append(instance)
    for (model, protocol, role), members in groups.items():
        partner = {"prefill": "decode", "decode": "prefill"}.get(role)
        if partner is not None and (model, protocol, partner) not in groups:
            what = f"{members[0].name} has no {partner} instance to work with: none for {model} uses {protocol}"
            hint = f"give it a partner with `protocol: {protocol}`, or make it `role: both`"
            yield lines.error(what, places[members[0].name], hint)
