"""Checks the `replication:` section of the gateway's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology import FileError
from kvroute_engine.files.form import Lines

BEATS = 4
"""Number of reports per lease, at least; see `Replica`."""
_PASSWORD = re.compile(r"^[a-z]+://[^/?#\s]*:[^/?#\s]*@|[?&]password=")
_KEY = (SECTION, "replication")


def replication_faults(
    settings: GatewaySettings, lines: Lines, environ: Mapping[str, str] | None
) -> Iterator[FileError]:
    """Yield every fault of the section that its types do not show; `environ` as for `preflight.deployment_of`."""
    section = settings.replication
    if section is None:
        return
    if _PASSWORD.search(section.redis):
        hint = "leave it out of the URL and write `password_env: VARIABLE` or `password_file: PATH`"
        yield lines.error("the URL contains a password", (*_KEY, "redis"), hint)
    if section.password_env is not None and section.password_file is not None:
        what = "both `password_env` and `password_file` are given"
        yield lines.error(what, (*_KEY, "password_file"), "leave one of them out")
    if BEATS * section.flush_s > section.lease_s:
        what = f"`flush` ({section.flush_s:g} s) is longer than a quarter of `lease` ({section.lease_s:g} s)"
        yield lines.error(what, (*_KEY, "flush"), "make it shorter, e.g. `5 ms`")
    if settings.cache_salt != "none" and settings.cache_salt_secret_env is None:
        hint = "add `cache_salt_secret_env`, with the same secret for all gateways"
        yield lines.error("each gateway would use other salts, and none would find another's prefixes", _KEY, hint)
    if environ is None:
        return
    if section.password_env is not None and not environ.get(section.password_env):
        what = f"the environment variable {section.password_env} is not set"
        yield lines.error(what, (*_KEY, "password_env"), f"export {section.password_env}=...")
    if section.password_file is not None and not Path(section.password_file).is_file():
        what = f"there is no file {section.password_file}"
        yield lines.error(what, (*_KEY, "password_file"), "paths are relative to the cluster file")
