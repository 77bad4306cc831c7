"""Admission webhooks: which are called for a request, the AdmissionReview, and every way in which a call fails."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from tests.kube.apiserver.patches import PatchFailed, json_patch
from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.resources import ADMISSION
from tests.kube.apiserver.rules import evaluate
from tests.kube.apiserver.selectors import from_object
from tests.kube.apiserver.status import Object
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.webhook_answers import (
    HEADERS,
    CallFailed,
    denied,
    internal_error,
    network_error,
    parse_response,
    shortened,
)

REVIEW = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}


@dataclass(frozen=True, slots=True)
class Review:
    """What is asked of webhooks: an operation, the object after and before it, and its options."""

    request: Request
    operation: str
    after: Object | None
    before: Object | None
    options: Object
    name: str = ""

    def body(self, after: Object | None) -> Object:
        """Return the AdmissionReview."""
        request, resource = self.request, self.request.resource
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        plural = {"group": resource.group, "version": resource.version, "resource": resource.plural}
        asked: Object = {"uid": str(uuid.uuid4()), "kind": kind, "resource": plural}
        if request.subresource:
            asked["subResource"] = request.subresource
        asked |= {"requestKind": kind, "requestResource": plural}
        if request.subresource:
            asked["requestSubResource"] = request.subresource
        if self.name:
            asked["name"] = self.name
        if request.namespace:
            asked["namespace"] = request.namespace
        asked |= {
            "operation": self.operation, "userInfo": request.user.info(), "object": after, "oldObject": self.before,
            "dryRun": request.dry_run or "All" in self.options.get("dryRun", ()), "options": self.options,
        }  # fmt: skip
        return {**REVIEW, "request": asked}


def options(request: Request, kind: str) -> Object:
    """Return the options object of a review."""
    made: Object = {"kind": kind, "apiVersion": "meta.k8s.io/v1"}
    if request.dry_run:
        made["dryRun"] = ["All"]
    if request.option("fieldManager"):
        made["fieldManager"] = request.option("fieldManager")
    if request.option("fieldValidation"):
        made["fieldValidation"] = request.option("fieldValidation")
    return made


class Webhooks:
    """Calls the webhooks of the stored configurations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _configured(self, kind: str, review: Review) -> Iterator[Object]:
        """Yield the webhooks of one kind that a review concerns, in the order of their configurations."""
        if review.request.resource.group == ADMISSION:
            return
        for _, configuration in self._store.select((ADMISSION, f"{kind}webhookconfigurations")):
            for webhook in configuration.get("webhooks") or []:
                if self._concerns(webhook, review):
                    yield webhook

    def _concerns(self, webhook: Object, review: Review) -> bool:
        if not any(_rule_matches(rule, review) for rule in webhook.get("rules") or []):
            return False
        selector = from_object(webhook.get("objectSelector"))
        found = [part for part in (review.after, review.before) if part is not None]
        if not any(selector.matches(part["metadata"].get("labels")) for part in found):
            return False
        return self._namespace_matches(webhook, review)

    def _namespace_matches(self, webhook: Object, review: Review) -> bool:
        request = review.request
        namespace = request.namespace or (request.name if request.resource.plural == "namespaces" else "")
        if not namespace:
            return True
        held = self._store.get(("", "namespaces", "", namespace)) or review.after or {"metadata": {}}
        return from_object(webhook.get("namespaceSelector")).matches(held["metadata"].get("labels"))

    async def mutate(self, review: Review) -> Object | None:
        """Return the object as the mutating webhooks leave it; raise ApiError for a refusal."""
        after = review.after
        again: list[Object] = []
        for webhook in self._configured("mutating", review):
            answer = await self._ask(webhook, review, after)
            patched = _patched(webhook, answer, after)
            if patched != after:
                called_again, again = again, []
                after = patched
                for earlier in called_again:
                    after = _patched(earlier, await self._ask(earlier, review, after), after)
            if webhook.get("reinvocationPolicy") == "IfNeeded":
                again.append(webhook)
        return after

    async def validate(self, review: Review) -> None:
        """Ask the validating webhooks, all at once; raise ApiError for the first refusal."""
        concerned = list(self._configured("validating", review))
        answers = [self._ask(webhook, review, review.after) for webhook in concerned]
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def _ask(self, webhook: Object, review: Review, after: Object | None) -> Object:
        """Return the response of one webhook, empty if it is skipped; raise ApiError if it refuses or fails."""
        body = review.body(after)
        if not _conditions_hold(webhook, body["request"]):
            return {}
        try:
            response = await self._call(webhook, body)
        except CallFailed as failure:
            if webhook["failurePolicy"] == "Ignore":
                return {}
            text = f'failed calling webhook "{webhook["name"]}": {failure}'
            raise internal_error(text) from None
        review.request.warnings += shortened(response.get("warnings") or [])
        if not response.get("allowed"):
            raise denied(webhook["name"], response.get("status") or {})
        return response

    async def _call(self, webhook: Object, body: Object) -> Object:
        url = self._url(webhook)
        timeout_s = webhook["timeoutSeconds"]
        address = f"{url}?timeout={timeout_s}s"
        bundle = webhook["clientConfig"].get("caBundle")
        try:
            context = ssl.create_default_context(cadata=base64.b64decode(bundle).decode() if bundle else None)
        except (ssl.SSLError, ValueError):
            raise CallFailed(
                "failed to call webhook: unable to load root certificates: unable to parse bytes as PEM block"
            ) from None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        payload = json.dumps(body).encode()
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(address, data=payload, headers=HEADERS, ssl=context) as answer,
            ):
                text = await answer.text()
                if answer.status >= 300:
                    problem = 'an error on the server ("unknown") has prevented the request from succeeding'
                    raise CallFailed(f"failed to call webhook: {problem}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CallFailed(f'failed to call webhook: Post "{address}": {network_error(error, url)}') from None
        return parse_response(text, body["request"]["uid"])

    def _url(self, webhook: Object) -> str:
        client = webhook["clientConfig"]
        if "url" in client:
            return str(client["url"])
        service = client["service"]
        name, namespace = service["name"], service["namespace"]
        port = service.get("port", 443)
        url = f"https://{name}.{namespace}.svc:{port}{service.get('path', '')}"
        held = self._store.get(("", "services", namespace, name))
        if held is None:
            text = f'Post "{url}?timeout={webhook["timeoutSeconds"]}s": service "{name}" not found'
            raise CallFailed(f"failed to call webhook: {text}")
        address = held["spec"].get("externalName") or held["spec"].get("clusterIP")
        return f"https://{address}:{port}{service.get('path', '')}"


def _rule_matches(rule: Object, review: Review) -> bool:
    request = review.request
    resource = request.resource
    plural = resource.plural
    names = {"*/*", plural if not request.subresource else f"{plural}/{request.subresource}"}
    names |= {f"{plural}/*"} | ({f"*/{request.subresource}"} if request.subresource else {"*"})
    scope = {"*", "Namespaced" if resource.namespaced else "Cluster"}
    return (
        not {"*", review.operation}.isdisjoint(rule.get("operations") or [])
        and not {"*", resource.group}.isdisjoint(rule.get("apiGroups") or [])
        and not {"*", resource.version}.isdisjoint(rule.get("apiVersions") or [])
        and not names.isdisjoint(rule.get("resources") or [])
        and rule.get("scope", "*") in scope
    )


def _conditions_hold(webhook: Object, asked: Object) -> bool:
    variables = {"object": asked["object"], "oldObject": asked["oldObject"], "request": asked}
    return all(
        evaluate(condition["expression"], variables) is True for condition in webhook.get("matchConditions") or []
    )


def _patched(webhook: Object, response: Object, after: Object | None) -> Object | None:
    """Return the object with the patch of a response; raise ApiError 500 for a patch that does not apply."""
    operations: list[Any] | None = response.get("patch")
    if operations is None or after is None:
        return after
    try:
        return json_patch(after, operations)
    except PatchFailed as failure:
        raise internal_error(str(failure)) from None
