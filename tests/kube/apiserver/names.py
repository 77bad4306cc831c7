"""Rules for names, labels and annotations, with the API server's explanations."""

from __future__ import annotations

import re

SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_1035 = r"[a-z]([-a-z0-9]*[a-z0-9])?"
PART = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
CONFIG_KEY = r"[-._a-zA-Z0-9]+"
SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{SUBDOMAIN}')"
)
LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    f"an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{LABEL}')"
)
LABEL_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    f"'{LABEL_1035}')"
)
PART_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    f"character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '{PART}')"
)
VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'{VALUE}')"
)
CONFIG_KEY_TEXT = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or "
    f"'key-name', regex used for validation is '{CONFIG_KEY}')"
)


def subdomain_errors(name: str) -> list[str]:
    """Return what is wrong with a DNS subdomain, the rule for most names."""
    errors = ["must be no more than 253 characters"] if len(name) > 253 else []
    return errors + ([] if re.fullmatch(SUBDOMAIN, name) else [SUBDOMAIN_TEXT])


def label_errors(name: str) -> list[str]:
    """Return what is wrong with a DNS label: names of containers, ports and namespaces."""
    errors = ["must be no more than 63 characters"] if len(name) > 63 else []
    if re.fullmatch(LABEL, name):
        return errors
    return [*errors, "must not contain dots" if re.fullmatch(SUBDOMAIN, name) else LABEL_TEXT]


def label_1035_errors(name: str) -> list[str]:
    """Return what is wrong with the name of a Service."""
    errors = ["must be no more than 63 characters"] if len(name) > 63 else []
    return errors + ([] if re.fullmatch(LABEL_1035, name) else [LABEL_1035_TEXT])


def label_key_errors(key: str) -> list[str]:
    """Return what is wrong with the key of a label, annotation or taint: an optional domain, a slash, a name."""
    prefix, slash, name = key.rpartition("/")
    if "/" in prefix:
        return [f"a qualified {PART_TEXT} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"]
    errors = [f"prefix part {text}" for text in subdomain_errors(prefix)] if slash else []
    if not name:
        return [*errors, "name part must be non-empty", PART_TEXT]
    if len(name) > 63:
        errors.append("name part must be no more than 63 bytes")
    return errors + ([] if re.fullmatch(PART, name) else [PART_TEXT])


def label_value_errors(value: str) -> list[str]:
    """Return what is wrong with the value of a label."""
    errors = ["must be no more than 63 bytes"] if len(value) > 63 else []
    return errors + ([] if re.fullmatch(VALUE, value) else [VALUE_TEXT])


def config_key_errors(key: str) -> list[str]:
    """Return what is wrong with a key of a ConfigMap or Secret."""
    errors = ["must be no more than 253 characters"] if len(key) > 253 else []
    return errors + ([] if re.fullmatch(CONFIG_KEY, key) else [CONFIG_KEY_TEXT])


def is_path_segment(name: str) -> list[str]:
    """Return what is wrong with a name that only needs to fit into a path."""
    if name in (".", ".."):
        return [f"may not be '{name}'"]
    return [f"may not contain '{sign}'" for sign in ("/", "%") if sign in name]
