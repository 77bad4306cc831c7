"""Certificates of the gateway's ports: each is read again when its files change, without a restart or a reload."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TypeAlias

from kvroute.serve.config.settings import TlsSettings
from kvroute.serve.config.settings_checks import tls_context
from kvroute.serve.observe.logs import log_event
from kvroute.types import InputError

_CHECK_S = 1.0
"""Interval between two checks of the files, in seconds."""
_FileState: TypeAlias = tuple[int, int, int, int]


class PortCertificate:
    """Certificate and key of one port. New connections use the newest pair of the files; open ones keep theirs.

    A pair that cannot be used changes nothing. It is logged once, when the files have not changed between two checks,
    because certificate and key may be replaced one after the other.
    """

    def __init__(self, tls: TlsSettings, field: str) -> None:
        """
        Args:
            tls: the two files.
            field: name of the setting for log lines, such as `gateway.listen.tls`.

        Raises:
            InputError: they cannot be used together.
        """
        self._field = field
        self._tls, self._seen = tls, _states(tls)
        self._judged = self._seen
        """State of the files that are served, or have been refused."""
        self.context = tls_context(tls)
        """For servers that use Python's TLS; it changes with the files."""
        self.pair = _pair(tls)
        """Key and certificate in PEM, for servers with a TLS of their own."""

    def change(self, tls: TlsSettings) -> None:
        """Use other files from now on. Raises InputError if they cannot be used together."""
        states = _states(tls)
        tls_context(tls)
        self._use(tls)
        self._tls, self._seen, self._judged = tls, states, states

    async def check(self) -> None:
        """Use the pair of the files if they have changed."""
        tls, before = self._tls, self._judged
        states, reason = await asyncio.to_thread(_examined, tls, before)
        if tls is not self._tls or states == before:
            return
        stable, self._seen = states == self._seen, states
        if not reason:
            try:
                self._use(tls)
            except InputError as error:  # the files have changed meanwhile
                reason = str(error)
        if not reason:
            self._judged = states
            log_event("info", "certificate_renewed", field=self._field, file=tls.certificate)
        elif stable:
            self._judged = states
            log_event("error", "certificate_refused", field=self._field, file=tls.certificate, reason=reason)

    def _use(self, tls: TlsSettings) -> None:
        pair = _pair(tls)
        tls_context(tls, self.context)
        self.pair = pair


def port_certificate(tls: TlsSettings | None, field: str) -> PortCertificate | None:
    """Return the certificate of a port; None: the port has no TLS. Raises InputError as `PortCertificate` does."""
    return None if tls is None else PortCertificate(tls, field)


def context_of(certificate: PortCertificate | None) -> ssl.SSLContext | None:
    """Return the context of a port; None: the port has no TLS."""
    return None if certificate is None else certificate.context


async def follow(*certificates: PortCertificate | None) -> None:
    """Check the files of certificates from now on, until this task is cancelled."""
    followed = [certificate for certificate in certificates if certificate is not None]
    while followed:
        await asyncio.sleep(_CHECK_S)
        for certificate in followed:
            await certificate.check()


def _examined(tls: TlsSettings, known: tuple[_FileState | None, ...]) -> tuple[tuple[_FileState | None, ...], str]:
    """Return the state of the files, and why they cannot be used together; empty if they can, or are known."""
    states = _states(tls)
    if states == known:
        return states, ""
    try:
        tls_context(tls)
    except InputError as error:
        return states, str(error)
    return states, ""


def _states(tls: TlsSettings) -> tuple[_FileState | None, ...]:
    """Return what differs after any change of the files; None for one that cannot be read."""
    return tuple([_state(Path(path)) for path in (tls.certificate, tls.key)])


def _state(path: Path) -> _FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _pair(tls: TlsSettings) -> tuple[bytes, bytes]:
    try:
        return Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    except OSError as error:
        raise InputError(f"certificate and key cannot be read: {error.strerror}", where=tls.certificate) from error
