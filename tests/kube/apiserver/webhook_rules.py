"""Validation of webhook configurations."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.kube.apiserver.rules import syntax_error
from tests.kube.apiserver.status import Cause, Object, duplicate, invalid, required, unsupported

OPERATIONS = ("*", "CONNECT", "CREATE", "DELETE", "UPDATE")
SIDE_EFFECTS = ("None", "NoneOnDryRun")
VERSIONS = ("v1", "v1beta1")


def validate_webhooks(found: Object) -> list[Cause]:
    """Return what is wrong with a webhook configuration, apart from its metadata."""
    errors: list[Cause] = []
    names: set[str] = set()
    for at, webhook in enumerate(found.get("webhooks") or []):
        errors += _webhook(webhook, f"webhooks[{at}]")
        if webhook["name"] in names:
            errors.append(duplicate(f"webhooks[{at}].name", webhook["name"]))
        names.add(webhook["name"])
    return errors


def _webhook(webhook: Object, path: str) -> list[Cause]:
    errors: list[Cause] = []
    if webhook["name"].count(".") < 2:
        detail = "should be a domain with at least three segments separated by dots"
        errors.append(invalid(f"{path}.name", webhook["name"], detail))
    versions = webhook.get("admissionReviewVersions") or []
    if not versions:
        errors.append(required(f"{path}.admissionReviewVersions", "must specify one of v1, v1beta1"))
    elif not set(versions) & set(VERSIONS):
        detail = "must include at least one of v1, v1beta1"
        errors.append(invalid(f"{path}.admissionReviewVersions", versions, detail))
    for number, rule in enumerate(webhook.get("rules") or []):
        for place, operation in enumerate(rule.get("operations") or []):
            if operation not in OPERATIONS:
                errors.append(unsupported(f"{path}.rules[{number}].operations[{place}]", operation, OPERATIONS))
    effects = webhook.get("sideEffects")
    if effects is None:
        errors.append(required(f"{path}.sideEffects", "must specify one of None, NoneOnDryRun"))
    elif effects not in SIDE_EFFECTS:
        errors.append(unsupported(f"{path}.sideEffects", effects, SIDE_EFFECTS))
    timeout_s = webhook["timeoutSeconds"]
    if not 1 <= timeout_s <= 30:
        detail = "the timeout value must be between 1 and 30 seconds"
        errors.append(invalid(f"{path}.timeoutSeconds", timeout_s, detail))
    errors += _client(webhook["clientConfig"], f"{path}.clientConfig")
    for number, condition in enumerate(webhook.get("matchConditions") or []):
        if text := syntax_error(condition.get("expression", "")):
            where = f"{path}.matchConditions[{number}].expression"
            errors.append(invalid(where, condition["expression"], f"compilation failed: {text}"))
    return errors


def _client(client: Object, path: str) -> list[Cause]:
    if ("url" in client) == ("service" in client):
        return [required(path, "exactly one of url or service is required")]
    if "url" not in client:
        return []
    parts = urlsplit(client["url"])
    if parts.scheme != "https":
        detail = "'https' is the only allowed URL scheme; desired format: https://host[/path]"
        return [invalid(f"{path}.url", parts.scheme, detail)]
    if parts.query:
        return [invalid(f"{path}.url", parts.query, "query parameters are not permitted in the URL")]
    return []
