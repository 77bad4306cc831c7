"""Answers of admission webhooks: valid ones, refusals, and the texts of every failure."""

from __future__ import annotations

import base64
import binascii
import json

import aiohttp
from tests.kube.apiserver.bodies import KIND_STRUCT
from tests.kube.apiserver.decode import parse_json
from tests.kube.apiserver.golang import GoError, json_kind
from tests.kube.apiserver.status import ApiError, Object

WARNING_MAX_LENGTH = 256
WARNINGS_MAX_LENGTH = 4_096
HEADERS = {
    "User-Agent": "kube-apiserver-admission", "Accept": "application/json, */*", "Content-Type": "application/json",
    "Accept-Encoding": "gzip",
}  # fmt: skip


class CallFailed(Exception):
    """A webhook that gave no valid answer; the text says why. `failurePolicy` decides what follows."""


def network_error(error: BaseException, url: str) -> str:
    """Return Go's text for a connection that failed."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return "tls: failed to verify certificate: x509: certificate signed by unknown authority"
    if isinstance(error, TimeoutError):
        return "context deadline exceeded"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"dial tcp {url.split('/')[2]}: connect: connection refused"
    return "EOF"


def parse_response(text: str, uid: str) -> Object:
    """Return the response of a review; raise CallFailed with the API server's text."""
    try:
        review = parse_json(text)
    except GoError as error:
        raise CallFailed(f"failed to call webhook: couldn't get version/kind; json parse error: {error}") from None
    if not isinstance(review, dict):
        problem = f"json: cannot unmarshal {json_kind(review)} into Go value of type {KIND_STRUCT}"
        raise CallFailed(f"failed to call webhook: couldn't get version/kind; json parse error: {problem}")
    found = f"{review.get('apiVersion', '/')}, Kind={review.get('kind', '')}"
    if review.get("apiVersion") == "admission.k8s.io/v1beta1":
        problem = "converting (v1beta1.AdmissionReview) to (v1.AdmissionReview): unknown conversion"
        raise CallFailed(f"failed to call webhook: {problem}")
    invalid = "received invalid webhook response: "
    if found != "admission.k8s.io/v1, Kind=AdmissionReview":
        wanted = "admission.k8s.io/v1, Kind=AdmissionReview"
        raise CallFailed(f"{invalid}expected webhook response of {wanted}, got {found}")
    response = review.get("response")
    if not isinstance(response, dict):
        raise CallFailed(f"{invalid}webhook response was absent")
    if response.get("uid") != uid:
        raise CallFailed(f'{invalid}expected response.uid="{uid}", got "{response.get("uid", "")}"')
    patch = response.get("patch")
    if patch is not None:
        try:
            response["patch"] = json.loads(base64.b64decode(patch, validate=True))
        except (binascii.Error, ValueError):
            raise CallFailed("failed to call webhook: illegal base64 data at input byte 0") from None
        if not response.get("patchType"):
            raise CallFailed(f"{invalid}webhook returned response.patch but not response.patchType")
    return response


def internal_error(text: str) -> ApiError:
    """Return 500 InternalError."""
    return ApiError(500, "InternalError", f"Internal error occurred: {text}", {"causes": [{"message": text}]})


def denied(name: str, status: Object) -> ApiError:
    """Return the refusal of a webhook: its code if it is an error, else 400 without a reason."""
    code = status.get("code", 0)
    message = status.get("message") or status.get("reason")
    text = f'admission webhook "{name}" denied the request'
    text += f": {message}" if message else " without explanation"
    details = status.get("details")
    headers = {}
    if details and details.get("retryAfterSeconds"):
        headers["Retry-After"] = str(details["retryAfterSeconds"])
    return ApiError(code if code >= 400 else 400, status.get("reason", ""), text, details, headers)


def shortened(warnings: list[str]) -> list[str]:
    """Return warnings as they are passed on: without line breaks, and cut if together they are too long for headers."""
    total = sum(len(text) for text in warnings)
    cut = WARNING_MAX_LENGTH if total > WARNINGS_MAX_LENGTH else total
    return [text[:cut].replace("\n", " ") for text in warnings]
