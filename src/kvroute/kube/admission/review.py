"""AdmissionReview v1: the request that the API server sends to a webhook, and the response."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from kvroute.kube.resources import GROUP, Object
from kvroute.types import InputError, InputErrors

API_VERSION = "admission.k8s.io/v1"
_WARNING_CHARACTERS = 256
"""The API server cuts longer warnings."""

Patch: TypeAlias = Sequence[dict[str, Any]]
"""Operations of a JSON Patch (RFC 6902)."""


class GroupVersionKind(msgspec.Struct, frozen=True, kw_only=True):
    """Type of an object."""

    group: str = ""
    version: str = ""
    kind: str = ""


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is to be admitted. `object` is None for DELETE, `old_object` for CREATE."""

    uid: str
    kind: GroupVersionKind
    operation: str
    name: str = ""
    namespace: str = ""
    sub_resource: str = ""
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _Review(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str
    kind: str
    request: AdmissionRequest


class _Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None


class _Container(_Named, frozen=True, kw_only=True, rename="camel"):
    env: list[_Named] | None = None
    volume_mounts: list[_Named] | None = None


class _Template(msgspec.Struct, frozen=True, kw_only=True):
    metadata: _Metadata | None = None


class _EngineSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Named] | None = None
    volumes: list[_Named] | None = None
    image_pull_secrets: list[_Named] | None = None
    template: _Template | None = None


class _CustomObject(msgspec.Struct, frozen=True, kw_only=True):
    """What checks read of an object whose `spec` is checked by `read_spec`."""

    kind: str | None = None
    metadata: _Metadata | None = None


class _EngineObject(_CustomObject, frozen=True, kw_only=True):
    """What checks read of a pod, or of a workload with a pod template."""

    spec: _EngineSpec | None = None


class ReviewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a request."""

    problems: tuple[InputError, ...] = ()
    """Reasons for a rejection; empty: allowed."""
    warnings: tuple[str, ...] = ()
    patch: tuple[dict[str, Any], ...] = ()


def read_review(body: bytes) -> AdmissionRequest:
    """Decode an AdmissionReview.

    Raises:
        InputError: the body is no AdmissionReview of version v1.
    """
    try:
        review = msgspec.json.decode(body, type=_Review)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _no_review(str(error)) from None
    if (review.api_version, review.kind) != (API_VERSION, "AdmissionReview"):
        what = f"{review.api_version} {review.kind} is not {API_VERSION} AdmissionReview"
        raise InputError(what, where="admission", hint="set admissionReviewVersions: [v1] in the webhook")
    _check_types(review.request)
    return review.request


def _check_types(request: AdmissionRequest) -> None:
    """Raise InputError for a field of another type than checks read."""
    kind = _CustomObject if request.kind.group == GROUP else _EngineObject
    for key, obj in (("object", request.object), ("oldObject", request.old_object)):
        try:
            msgspec.convert(obj, kind | None)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$")
            raise _no_review(f"request.{key}{place.rstrip('`')}: {what}") from None


def _no_review(why: str) -> InputError:
    what = f"the body is no AdmissionReview ({' '.join(why.split())})"
    return InputError(what, where="admission", hint="send what the API server sends")


def response_body(request: AdmissionRequest, verdict: ReviewResponse) -> bytes:
    """Return the body of the response; a rejection has status 422 and one cause for each problem."""
    response: dict[str, Any] = {"uid": request.uid, "allowed": not verdict.problems}
    if verdict.problems:
        response["status"] = _status(verdict.problems)
    elif verdict.patch:
        encoded = base64.b64encode(msgspec.json.encode(list(verdict.patch))).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    if verdict.warnings:
        response["warnings"] = [text[:_WARNING_CHARACTERS] for text in verdict.warnings]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def rejection(error: InputError, warnings: Sequence[str] = ()) -> ReviewResponse:
    """Return the verdict for wrong input."""
    problems = error.problems if isinstance(error, InputErrors) else (error,)
    return ReviewResponse(problems=tuple(problems), warnings=tuple(warnings))


def subject(request: AdmissionRequest) -> Object:
    """Return the object that a request is about: the new one, or the one that is deleted."""
    return request.object or request.old_object or {}


def _status(problems: Sequence[InputError]) -> dict[str, Any]:
    causes = [
        {"reason": "FieldValueInvalid", "field": problem.where, "message": problem.what + _fix(problem)}
        for problem in problems
    ]
    message = ". ".join(str(problem) for problem in problems)
    return {
        "status": "Failure",
        "code": 422,
        "reason": "Invalid",
        "message": message,
        "details": {"causes": causes},
    }


def _fix(problem: InputError) -> str:
    return f"; {problem.hint}" if problem.hint else ""
