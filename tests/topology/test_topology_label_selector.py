"""Label selectors of a cluster file: accepted exactly if an API server accepts them."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kube.apiserver.names import label_key_errors
from tests.kube.apiserver.selectors import parse_labels
from tests.kube.apiserver.status import ApiError

from kvroute.topology.label_selector import LABEL_KEY, selector_fault

TOKENS = st.sampled_from(
    (
        *("app", "x.y/role", "a_b", "-a", "A..b", "X.Y/role", "5", "-5", "=", "==", "!=", "!", "in", "notin"),
        *("(", ")", ",", ",", " ", "<", ">", "n" * 63, "n" * 64, "é"),
    )
)
KEYS = st.lists(st.sampled_from(["a", "B", "7", ".", "-", "_", "/", "..", "n" * 62, "x.y" * 40, " "]), max_size=6).map(
    "".join
)


def accepted(text: str) -> bool:
    """Return whether the API server of the tests accepts a selector."""
    try:
        parse_labels(text)
    except ApiError:
        return False
    return True


@given(
    st.lists(TOKENS, max_size=9)
    .map("".join)
    .filter(lambda text: not re.search(r"(^|,|!)\s*(not)?in|\([^)]*,,|\(,|,\)", text))
)
@example("app=vllm,role in (prefill, decode),!canary , gpus>3")
@example("app in (),x!=,y==")
@example("app=a,")
@example("a in (b c)")
def test_a_selector_is_valid_if_the_server_accepts_it(text: str) -> None:
    """Keys that are operators, and empty values in a list, are left out: the server of the tests rejects more."""
    assert (not selector_fault(text)) == accepted(text)


@given(KEYS)
@example("kubernetes.io/rack")
def test_a_key_is_valid_if_the_server_accepts_it(key: str) -> None:
    """With and without a prefix."""
    assert bool(re.fullmatch(LABEL_KEY, key)) == (not label_key_errors(key))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("app=vllm,role=", ""),
        ("app=vllm,", "a condition is missing after the last comma"),
        ("app=vllm,role in prefill", "'role in prefill' is no condition on a label"),
        ("app = " + "v" * 64, f"'app = {'v' * 34}...' is no condition on a label"),
    ],
)
def test_what_is_wrong_with_a_selector(text: str, fault: str) -> None:
    """The condition that is wrong."""
    assert selector_fault(text) == fault
