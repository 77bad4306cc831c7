"""Certificates of the webhook: issued by a CA of its own, renewed in two steps so that no call fails.

A renewal first publishes the new CA beside the old one. Only when `PUBLISH_S` have passed, the new certificate is
served: by then the API server trusts both.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvroute.types import InputError

LIFETIME_S = 90 * 86400.0
RENEW_BEFORE_S = 30 * 86400.0
"""Time before the end at which the next certificate is issued."""
PUBLISH_S = 3600.0
"""Time between the publication of a CA and the first use of its certificate."""
_CLOCKS_DIFFER = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A server certificate, its key and the CA that has signed it, in PEM form."""

    certificate: bytes
    key: bytes
    ca: bytes

    @property
    def begins_s(self) -> float:
        """Unix time at which it was issued."""
        return (_parsed(self.certificate).not_valid_before_utc + _CLOCKS_DIFFER).timestamp()

    @property
    def ends_s(self) -> float:
        """Unix time at which it expires."""
        return _parsed(self.certificate).not_valid_after_utc.timestamp()

    @property
    def names(self) -> tuple[str, ...]:
        """DNS names for which it is valid."""
        extension = _parsed(self.certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        return tuple(extension.value.get_values_for_type(x509.DNSName))


@dataclass(frozen=True, slots=True)
class Certificates:
    """Everything that the webhook's Secret holds."""

    current: CertificatePair
    following: CertificatePair | None = None
    """The next certificate, which is not served yet."""

    @property
    def ca_bundle(self) -> bytes:
        """CAs that the API server must trust."""
        return self.current.ca + (self.following.ca if self.following else b"")


def advance(stored: Certificates | None, names: Sequence[str], now: float) -> Certificates:
    """Return the certificates that the Secret should hold now; the same object if nothing changes.

    Args:
        stored: what the Secret holds; None: nothing, or nothing usable.
        names: DNS names of the webhook's Service.
        now: Unix time in seconds.
    """
    if stored is None or stored.current.names != tuple(names) or now >= stored.current.ends_s:
        return Certificates(issue(names, now))
    if stored.following is not None:
        published = now >= stored.following.begins_s + PUBLISH_S
        return Certificates(stored.following) if published else stored
    if now >= stored.current.ends_s - RENEW_BEFORE_S:
        return Certificates(stored.current, issue(names, now))
    return stored


def issue(names: Sequence[str], now: float) -> CertificatePair:
    """Return a certificate for these DNS names from a new CA, whose key is discarded."""
    begin = datetime.datetime.fromtimestamp(now, datetime.UTC) - _CLOCKS_DIFFER
    end = datetime.datetime.fromtimestamp(now + LIFETIME_S, datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    issuer = _name(f"kvroute webhook CA {serial:x}"[:60])
    ca = (
        _builder(issuer, issuer, ca_key.public_key(), begin, end, serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        _builder(_name("kvroute webhook"), issuer, key.public_key(), begin, end, x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = serialization.Encoding.PEM
    return CertificatePair(leaf.public_bytes(pem), private, ca.public_bytes(pem))


def secret_data(certificates: Certificates) -> dict[str, str]:
    """Return the `data` of the Secret, each value in base64."""
    data = {"tls.crt": certificates.current.certificate, "tls.key": certificates.current.key}
    data["ca.crt"] = certificates.current.ca
    if certificates.following is not None:
        data["next.crt"], data["next.key"] = certificates.following.certificate, certificates.following.key
        data["next-ca.crt"] = certificates.following.ca
    return {name: base64.b64encode(value).decode() for name, value in data.items()}


def read_secret(data: Mapping[str, str]) -> Certificates | None:
    """Return what a Secret holds; None if it holds no certificate that can be used."""
    try:
        values = {name: base64.b64decode(value, validate=True) for name, value in data.items()}
        current = _pair(values, "tls.crt", "tls.key", "ca.crt")
        following = _pair(values, "next.crt", "next.key", "next-ca.crt") if "next.crt" in values else None
    except (ValueError, KeyError):
        return None
    return Certificates(current, following)


def webhook_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the DNS names by which the API server calls a Service.

    Raises:
        InputError: the names are not DNS labels.
    """
    for title, name in (("service", service), ("namespace", namespace)):
        if not name or not name.replace("-", "").isalnum() or not name.isascii():
            raise InputError(f"{name!r} is no DNS label", where=title, hint="give the name of the webhook's Service")
    return (f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local")


def _pair(values: Mapping[str, bytes], certificate: str, key: str, ca: str) -> CertificatePair:
    """Raises ValueError if certificate and key are unreadable or do not belong together."""
    pair = CertificatePair(values[certificate], values[key], values[ca])
    private = serialization.load_pem_private_key(pair.key, None)
    _parsed(pair.ca)
    if private.public_key() != _parsed(pair.certificate).public_key():
        raise ValueError("the key is not that of the certificate")
    return pair


def _parsed(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
    serial: int,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(serial).not_valid_before(begin).not_valid_after(end)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
