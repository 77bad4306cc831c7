"""What the recordings of custom resources leave out: files 11 and 12."""

from __future__ import annotations

from typing import Any

from tests.kube.scenario import Scenario, Step
from tests.kube.scenarios.objects import delete, if_object, named, part

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGETS = "/apis/t.kvroute.dev/v1/namespaces/default/widgets"
STUCKS = "/apis/t.kvroute.dev/v1/namespaces/default/stucks"
WIDGET = {"apiVersion": "t.kvroute.dev/v1", "kind": "Widget"}


def decided(found: Any) -> bool:
    """Return whether the names of a definition are accepted or refused."""
    return bool(found["status"].get("conditions"))


def definition(plural: str) -> str:
    """Return the path of a definition."""
    return f"{CRDS}/{plural}.t.kvroute.dev"


def established(plural: str) -> Step:
    """Return the wait for a definition."""
    return Step("GET", definition(plural), until=decided)


def gone(path: str) -> Step:
    """Return the wait for the end of an object."""
    return Step("GET", path, until=lambda found: isinstance(found, str) or found.get("code") == 404)


def custom(found: Any) -> Any:
    """Return metadata, spec and status of a custom object; status is null without one."""
    return {"metadata": found["metadata"], "spec": found["spec"], "status": found.get("status")}


def created_definition(found: Any) -> Any:
    """Return the name of a definition."""
    return {"metadata": {"name": found["metadata"]["name"]}}


def accepted(found: Any) -> Any:
    """Return the name of what was accepted."""
    return {"accepted": found["metadata"]["name"]}


CUSTOM = (
    "unknown-field-Warn", "unknown-field-Ignore", "put-no-change", "patch-label", "patch-spec", "patch-status-via-main",
    "patch-remove-defaulted", "patch-json", "patch-unknown-field", "status-patch", "status-patch-spec-ignored",
    "status-get", "status-put", "status-unknown-pruned", "status-apply-force", "apply-list-map-merge",
    "apply-list-map-drop", "apply-set-merge", "apply-set-merge-2", "scale-after", "finalizer", "delete-with-finalizer",
    "update-while-terminating", "remove-finalizer",
)  # fmt: skip
SPEC_ONLY = (
    "validation-float-integral-ok", "validation-int-or-string-ok", "validation-null-not-nullable",
    "validation-null-nullable", "validation-null-with-default",
)  # fmt: skip
ACCEPTED = (
    "additionalproperties-false", "preserve-at-root", "spec-preserve-without-type", "unknown-schema-field",
    "kind-lowercase", "metadata-schema",
)  # fmt: skip
STUCK = {
    "metadata": {"name": "stucks.t.kvroute.dev"},
    "spec": {
        "group": "t.kvroute.dev", "scope": "Namespaced",
        "names": {"plural": "stucks", "singular": "stuck", "kind": "Stuck"},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}  # fmt: skip
DEFINITIONS = Scenario(
    before={
        "11-crd/established": (established("widgets"),),
        "11-crd/scale-get": (delete(f"{WIDGETS}/ap"),),
        "11-crd/nosub-instance": (established("plains"),),
        "11-crd/multi-post-old": (established("multis"),),
        "11-crd/names-conflict-status": (established("others"),),
        "11-crd/watch-while-crd-is-deleted": (
            Step(
                "POST", WIDGETS, {**WIDGET, "metadata": {"name": "last"}, "spec": {"size": 1}},
                binds={"rv26": "metadata.resourceVersion"},
            ),
        ),
        "11-crd/list-after-crd-deletion": (gone(definition("widgets")),),
        "11-crd/stuck-instance": (Step("POST", CRDS, STUCK), established("stucks")),
        "11-crd/stuck-instance-terminating": (
            Step("GET", f"{STUCKS}/s", until=lambda found: "deletionTimestamp" in found["metadata"]),
        ),
        "11-crd/stuck-crd-finally-gone": (gone(definition("stucks")),),
    },
    during={"11-crd/watch-while-crd-is-deleted": (delete(definition("widgets")),)},
    fresh={"rv4": "1"},
    bodies={
        "11-crd/duplicate-field-strict": (
            b'{"apiVersion":"t.kvroute.dev/v1","kind":"Widget","metadata":{"name":"v"},"spec":{"size":1,"size":2}}'
        ),
    },
    projections={
        **{f"11-crd/{case}": if_object(custom) for case in CUSTOM},
        **{f"11-crd/{case}": if_object(lambda found: {"spec": found["spec"]}) for case in SPEC_ONLY},
        **{f"11-crd/refused-{case}": if_object(accepted) for case in ACCEPTED},
        "11-crd/established": lambda found: {
            "metadata": found["metadata"], "status": found["status"], "specConversion": found["spec"]["conversion"],
            "names": found["spec"]["names"],
        },
        "11-crd/field-selector": named,
        "11-crd/field-selector-none": named,
        "11-crd/nosub-create": created_definition,
        "11-crd/multi-create": created_definition,
        "11-crd/names-conflict": created_definition,
        "11-crd/multi-stored-versions": part("status", "storedVersions"),
        "11-crd/names-conflict-status": part("status", "conditions"),
        "11-crd/stuck-crd-conditions": part("status", "conditions"),
        "11-crd/stuck-crd-delete": lambda found: {
            "metadata": found["metadata"], "conditions": found["status"]["conditions"]
        },
    },
)  # fmt: skip


def spec_and_generation(found: Any) -> Any:
    """Return spec and generation."""
    return {"spec": found["spec"], "generation": found["metadata"]["generation"]}


ACCEPTED_RULES = (
    "prototype-clustertopologies", "prototype-kvdeployments", "create-crd", "refused-reserved-word-field",
    "refused-reserved-word-escaped-ok", "refused-unbounded-simple-ok", "refused-libraries",
)  # fmt: skip
TOPOS = (
    "ok", "transition-grow-ok", "optional-old-self-unset-then-set", "optional-old-self-set-again",
    "ratchet-unchanged-field-ok",
)  # fmt: skip
RULES = Scenario(
    before={
        "12-cel/ok": (established("topos"),),
        "12-cel/tighten-schema": (
            Step(
                "GET", definition("topos"), binds={"uid1": "metadata.uid", "rv1": "metadata.resourceVersion"}
            ),
        ),
    },
    projections={
        **{f"12-cel/{case}": if_object(accepted) for case in ACCEPTED_RULES},
        **{f"12-cel/{case}": if_object(spec_and_generation) for case in TOPOS},
        "12-cel/tighten-schema": if_object(lambda found: {"generation": found["metadata"]["generation"]}),
    },
)  # fmt: skip
