"""Certificates of servers on the loopback interface."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that is its own authority, and its key."""

    certificate: Path
    key: Path

    def pem(self) -> bytes:
        """Return the certificate as text."""
        return self.certificate.read_bytes()


def make(folder: Path, name: str = "server") -> Certificate:
    """Make a certificate for 127.0.0.1 in a folder; it needs the program openssl."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate), "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *curve, *files, *names], check=True, capture_output=True)
    return Certificate(certificate, key)
