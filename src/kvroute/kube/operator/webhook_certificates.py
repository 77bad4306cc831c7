"""Certificates of the webhook in the cluster: a Secret, the CAs in the webhook configurations, and renewal.

Every operator does the same, leader or not. Writes carry the resourceVersion that was read, so one of several succeeds
and the others read its result.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvroute.kube.admission.certificates import CertificatePair, Certificates, advance, read_secret, secret_data
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.rights import MUTATING, SECRET, SECRETS, VALIDATING, WEBHOOKS
from kvroute.types import InputError


async def current_pair(calls: ApiCalls, namespace: str, names: Sequence[str]) -> CertificatePair | None:
    """Bring Secret and webhook configurations up to date, and return the certificate to serve; None if another operator
    has written at the same time, or the Secret does not exist.

    Args:
        calls: to the API server.
        namespace: of the Secret.
        names: DNS names of the webhook's Service.

    Raises:
        Refused: the API server refuses a call.
        httpx2.HTTPError: it does not answer.
    """
    secret = await calls.get(SECRETS, namespace, SECRET)
    if secret is None:
        return None
    stored = read_secret(secret.get("data") or {})
    wanted = advance(stored, names, time.time())
    if wanted is not stored and await calls.update(SECRETS, namespace, secret | {"data": secret_data(wanted)}) is None:
        return None
    for kind in (VALIDATING, MUTATING):
        configuration = await calls.get(kind, "", WEBHOOKS)
        change = bundle_change(configuration, wanted) if configuration is not None else None
        if change is not None:
            await calls.patch(kind, "", WEBHOOKS, change)
    return wanted.current


def bundle_change(configuration: dict[str, Any], certificates: Certificates) -> dict[str, Any] | None:
    """Return the merge patch that gives all webhooks the CA bundle; None if they have it.

    A merge patch replaces a list as a whole, so it has the resourceVersion of the list that was read.
    """
    bundle = base64.b64encode(certificates.ca_bundle).decode()
    webhooks = configuration.get("webhooks") or []
    if all(webhook["clientConfig"].get("caBundle") == bundle for webhook in webhooks):
        return None
    changed = [webhook | {"clientConfig": webhook["clientConfig"] | {"caBundle": bundle}} for webhook in webhooks]
    return {"metadata": {"resourceVersion": configuration["metadata"]["resourceVersion"]}, "webhooks": changed}


def pair_of_folder(folder: Path) -> CertificatePair:
    """Read the certificate that cert-manager keeps in a mounted Secret.

    Raises:
        InputError: a file cannot be read.
    """
    try:
        certificate, key = (folder / "tls.crt").read_bytes(), (folder / "tls.key").read_bytes()
    except OSError as error:
        where = str(error.filename or folder)
        what = f"cannot be read ({error.strerror})"
        raise InputError(what, where=where, hint="mount the Secret with the certificate") from error
    return CertificatePair(certificate, key, certificate)
