"""The scenario of each recorded file."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kube.scenario import Scenario
from tests.kube.scenarios import definitions, lightkube, lists, objects, pods, server, webhooks

SCENARIOS: Mapping[str, Scenario] = {
    "02-auth": server.ACCESS,
    "03-crud": objects.CRUD,
    "04-errors": objects.ERRORS,
    "05-patch": objects.PATCH,
    "06-ssa": objects.APPLY,
    "07-lists": lists.LISTS,
    "08-watch": lists.WATCHES,
    "09-delete": objects.DELETE,
    "10-podops": pods.POD_OPERATIONS,
    "11-crd": definitions.DEFINITIONS,
    "12-cel": definitions.RULES,
    "13-webhooks": webhooks.ADMISSION,
    "14-misc": objects.MISC,
    "15-transport": server.TRANSPORT,
    "16-shutdown": server.SHUTDOWN,
    "17-outage": server.OUTAGE,
    "18-lightkube": lightkube.LIGHTKUBE,
}
