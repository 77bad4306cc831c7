"""Access reviews: who am I, may I, and whose token is this."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.kube.apiserver.access import Access, Attributes
from tests.kube.apiserver.decode import parse_json
from tests.kube.apiserver.golang import GoError
from tests.kube.apiserver.requests import Answer, Request
from tests.kube.apiserver.status import ApiError, Object, bad_request


class Reviews:
    """Answers the resources that are only created and never stored."""

    def __init__(self, access: Access, now: Callable[[], str]) -> None:
        self._access = access
        self._now = now
        self._kinds: Mapping[str, Callable[[Request, Object], Object]] = {
            "selfsubjectreviews": self._whoami,
            "selfsubjectaccessreviews": self._may_i,
            "tokenreviews": self._whose,
        }

    def handles(self, request: Request) -> bool:
        """Return whether a resource is a review."""
        return request.resource.plural in self._kinds

    def answer(self, request: Request) -> Answer:
        """Answer a review; raise ApiError 400."""
        try:
            body = parse_json(request.body.decode(errors="replace") or "{}")
        except GoError as error:
            raise bad_request(f"couldn't get version/kind; json parse error: {error}") from None
        resource = request.resource
        made = {"kind": resource.kind, "apiVersion": resource.api_version}
        return Answer(201, {**made, **self._kinds[resource.plural](request, body)})

    def _whoami(self, request: Request, body: Object) -> Object:
        return {"metadata": {"creationTimestamp": self._now()}, "status": {"userInfo": request.user.info()}}

    def _managed(self, request: Request) -> Object:
        fields: Object = {"f:spec": {}}
        entry = {
            "manager": request.manager, "operation": "Update", "apiVersion": request.resource.api_version,
            "time": self._now(), "fieldsType": "FieldsV1", "fieldsV1": fields,
        }  # fmt: skip
        return {"managedFields": [entry]}

    def _may_i(self, request: Request, body: Object) -> Object:
        spec: Object = body.get("spec") or {}
        asked = spec.get("resourceAttributes") or {}
        wanted = Attributes(
            asked.get("verb", ""), asked.get("group", ""), asked.get("resource", ""), asked.get("subresource", ""),
            asked.get("namespace", ""), asked.get("name", ""),
        )  # fmt: skip
        reason = self._access.allows(request.user, wanted)
        status: Object = {"allowed": bool(reason)}
        if reason:
            status["reason"] = reason
        return {"metadata": self._managed(request), "spec": spec, "status": status}

    def _whose(self, request: Request, body: Object) -> Object:
        spec: Object = body.get("spec") or {}
        try:
            user = self._access.authenticate({"authorization": f"Bearer {spec.get('token', '')}"})
            status: Object = {"authenticated": True, "user": user.info()}
        except ApiError:
            status = {"user": {}, "error": "invalid bearer token"}
        return {"metadata": self._managed(request), "spec": spec, "status": status}
