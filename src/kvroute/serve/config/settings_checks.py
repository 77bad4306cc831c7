"""Checks the `gateway:` section of a cluster file, the files that it names and the environment."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from kvroute.http.headers import OUR_OWN
from kvroute.policies import DECODE_POLICIES, TopologyConstraint, decode_policy, known_parameters, prefill_policy
from kvroute.serve.api.api_keys import Keys
from kvroute.serve.api.passthrough_paths import passthrough_fault
from kvroute.serve.config.autoscaling_checks import autoscaling_faults
from kvroute.serve.config.field_types import LogSize
from kvroute.serve.config.offload_checks import offload_faults
from kvroute.serve.config.policy import PolicyParameter, policy_parameter
from kvroute.serve.config.service_classes import DEFAULT_CLASS
from kvroute.serve.config.settings import SECTION, GatewaySettings, TlsSettings
from kvroute.topology import FileError
from kvroute.topology.place import port_fault
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.form import Key, Lines, nearest
from kvroute_engine.files.units import quantity_text

SECRET_MIN = 16
"""Minimum length of a secret in characters."""
_KEY = re.compile(r"[!-~]+")
"""Characters that a header can contain without escaping."""
_BEATS = 4
"""Number of reports per lease, at least; see `Replica`."""
_PASSWORD = re.compile(r"^[a-z]+://[^/?#\s]*:[^/?#\s]*@|[?&]password=")


def settings_faults(settings: GatewaySettings, lines: Lines, environ: Mapping[str, str] | None) -> Iterator[InputError]:
    """Yield every fault of the section that its types do not show; `environ` as for `preflight.deployment_of`."""
    yield from _policy_faults(settings, lines)
    yield from _oracle_faults(settings, lines)
    yield from _prompt_faults(settings, lines)
    yield from _log_faults(settings, lines)
    yield from offload_faults(settings, lines)
    yield from autoscaling_faults(settings, lines)
    yield from _replication_faults(settings, lines, environ)
    if environ is not None:
        yield from _file_faults(settings, lines)
    yield from _key_faults(settings, lines, environ)
    listen, admin = settings.listen, settings.admin
    if listen.port == admin.port != 0:
        what = f"`listen` and `admin` both use port {admin.port}"
        yield lines.error(what, (SECTION, "admin", "port"), "give each its own port")
    yield from _address_faults(settings, lines)
    for index, name in enumerate(settings.forward_headers):
        if name.lower().encode() in OUR_OWN:
            what = f"the gateway sets {name} itself and cannot forward the client's"
            yield lines.error(what, (SECTION, "forward_headers", index), "leave it out")
    for index, path in enumerate(settings.passthrough):
        what, hint = passthrough_fault(path)
        if what:
            yield lines.error(what, (SECTION, "passthrough", index), hint)


def _address_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield URLs and host names that no machine can use."""
    prometheus, replication = settings.oracle.prometheus, settings.replication
    urls: dict[Key, str | None] = {
        ("oracle", "prometheus", "url"): prometheus.url if prometheus is not None else None,
        ("replication", "redis"): replication.redis if replication is not None else None,
        ("tracing", "otlp"): settings.tracing.otlp,
    }
    for key, url in urls.items():
        if url and not url.startswith("unix:") and (fault := port_fault(url.rpartition("@")[2])):
            yield lines.error(fault, (SECTION, *key), "write it as scheme://host:port")
    for part, host in (("listen", settings.listen.host), ("admin", settings.admin.host)):
        try:
            host.encode("idna")
        except UnicodeError:
            yield lines.error(f"{host!r} is not a host name", (SECTION, part, "host"), "give a name or an IP address")


def _policy_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    if settings.policy not in DECODE_POLICIES:
        yield from _policy_fault(settings.policy, {}, lines, (SECTION, "policy"))
    else:
        key = (SECTION, "parameters")
        each = settings.parameters.items()
        faults = [
            fault
            for name, value in each
            for fault in _policy_fault(settings.policy, {name: value}, lines, (*key, name))
        ]
        yield from faults or _policy_fault(settings.policy, settings.parameters, lines, key)
    if settings.shadow:
        yield from _policy_fault(settings.shadow, {}, lines, (SECTION, "shadow"))
    try:
        prefill_policy(settings.prefill)
    except InputError as error:
        yield lines.error(error.what, (SECTION, "prefill"), error.hint)
    if settings.constraint:
        try:
            TopologyConstraint.parse(settings.constraint)
        except InputError as error:
            yield lines.error(error.what, (SECTION, "constraint"), error.hint)


def _policy_fault(
    policy: str, parameters: Mapping[str, PolicyParameter], lines: Lines, key: Key
) -> Iterator[FileError]:
    """Yield the fault at `key` if there is no policy with this name and these parameters."""
    own = known_parameters(policy, parameters)
    try:
        numbers = {name: policy_parameter(name, value) for name, value in own.items()}
        decode_policy(policy, **(dict.fromkeys(parameters, 0.0) | numbers))
    except InputError as error:
        yield lines.error(error.what, key, error.hint)


def _prompt_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    prompt = settings.prompt
    if prompt.without_tokenizer == "engine" and prompt.tokenizer is not None:
        hint = "leave `tokenizer` out, or list the models that have one in `tokenizers`"
        what = "every model has a tokenizer, so no engine is asked"
        yield lines.error(what, (SECTION, "prompt", "without_tokenizer"), hint)


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


def _replication_faults(
    settings: GatewaySettings, lines: Lines, environ: Mapping[str, str] | None
) -> Iterator[FileError]:
    """Yield every fault of the section that its types do not show; `environ` as for `preflight.deployment_of`."""
    section, key = settings.replication, (SECTION, "replication")
    if section is None:
        return
    if _PASSWORD.search(section.redis):
        hint = "leave it out of the URL and write `password_env: VARIABLE` or `password_file: PATH`"
        yield lines.error("the URL contains a password", (*key, "redis"), hint)
    if section.password_env is not None and section.password_file is not None:
        what = "both `password_env` and `password_file` are given"
        yield lines.error(what, (*key, "password_file"), "leave one of them out")
    if _BEATS * section.flush_s > section.lease_s:
        what = f"`flush` ({section.flush_s:g} s) is longer than a quarter of `lease` ({section.lease_s:g} s)"
        yield lines.error(what, (*key, "flush"), "make it shorter, e.g. `5 ms`")
    if settings.cache_salt != "none" and settings.cache_salt_secret_env is None:
        hint = "add `cache_salt_secret_env`, with the same secret for all gateways"
        yield lines.error("each gateway would use other salts, and none would find another's prefixes", key, hint)
    if environ is None:
        return
    if section.password_env is not None and not environ.get(section.password_env):
        what = f"the environment variable {section.password_env} is not set"
        yield lines.error(what, (*key, "password_env"), f"export {section.password_env}=...")
    if section.password_file is not None and not Path(section.password_file).is_file():
        what = f"there is no file {section.password_file}"
        yield lines.error(what, (*key, "password_file"), "paths are relative to the cluster file")


def _file_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    tokenizer, events = settings.prompt.tokenizer, settings.log.events
    named: dict[Key, str] = {} if tokenizer is None else {("tokenizer",): tokenizer}
    named |= {("tokenizers", model): path for model, path in settings.prompt.tokenizers.items()}
    for key, path in named.items():
        if not (Path(path).is_file() or Path(path, "tokenizer.json").is_file()):
            hint = "give a tokenizer.json, or the folder that contains it"
            yield lines.error(f"there is no tokenizer at {path}", (SECTION, "prompt", *key), hint)
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
    yield from _service_class_faults(settings, keys.names, lines)
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


def _service_class_faults(settings: GatewaySettings, keys: Collection[str], lines: Lines) -> Iterator[FileError]:
    """Yield every fault. Args: `keys`: names of all keys."""
    for key, name in settings.keys.classes.items():
        place = (SECTION, "keys", "classes", key)
        if key not in keys:
            hint = nearest(key, sorted(keys)) or "there are no keys: add `file` or `known`"
            yield lines.error(f"there is no key {key!r}", place, hint)
        known = name in settings.classes or name == DEFAULT_CLASS
        if not known and lines.sure(SECTION, "classes", name, whole=True):  # otherwise the class itself has a fault
            hint = nearest(name, sorted(settings.classes)) or f"add it: `classes: {{{name}: {{...}}}}`"
            yield lines.error(f"there is no class {name!r}", place, hint)
    for name, found in settings.classes.items():
        section = (SECTION, "classes", name)
        if found.rated and not keys:
            field = "requests_per_minute" if found.requests_per_minute is not None else "tokens_per_minute"
            what = "rates are limited for each API key, but none are configured"
            yield lines.error(what, (*section, field), "add `keys`, or leave the rate out")
        if found.priority_max is not None and found.priority_max < found.priority:
            what = f"`priority_max` ({found.priority_max}) is below `priority` ({found.priority})"
            yield lines.error(what, (*section, "priority_max"), f"give {found.priority} or more, or leave it out")
        slo = found.slo
        if slo is not None and slo.ttft_s is None and not slo.header:
            what = "the section `slo` sets no limit"
            yield lines.error(what, (*section, "slo"), "add `ttft: 2 s`, or `header: true`")


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
