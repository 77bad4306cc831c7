"""The form of labels and label selectors of Kubernetes (apimachinery, `labels.Parse` and `validation`)."""

from __future__ import annotations

import re

_PART = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
LABEL_KEY = rf"((?=[^/]{{1,253}}/){_PART}(\.{_PART})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
"""A label's key: a name, with an optional DNS name and a slash before it."""
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_CONDITION = re.compile(
    rf"\s*(!\s*{LABEL_KEY}"
    rf"|{LABEL_KEY}\s*(==|!=|=)\s*{_VALUE}"
    rf"|{LABEL_KEY}\s*[<>]\s*-?[0-9]+"
    rf"|{LABEL_KEY}\s+(not)?in\s*\(\s*{_VALUE}(\s*,\s*{_VALUE})*\s*\)"
    rf"|{LABEL_KEY})\s*(,|$)"
)
_SHOWN = 40
SELECTOR_HINT = "write conditions such as app=vllm,role in (prefill,decode),!canary"


def selector_fault(text: str) -> str:
    """Return why a text is no label selector; empty if it is one. An empty selector selects everything."""
    at = 0
    while text.strip():
        match = _CONDITION.match(text, at)
        if match is None:
            rest = text[at:].strip()
            shown = rest if len(rest) <= _SHOWN else rest[:_SHOWN] + "..."
            return f"{shown!r} is no condition on a label" if rest else "a condition is missing after the last comma"
        if match.end() == len(text) and not match[0].endswith(","):
            break
        at = match.end()
    return ""
