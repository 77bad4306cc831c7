"""Laws of the API server's parts, for many objects."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.kube.apiserver import managers
from tests.kube.apiserver.fieldsets import UNTRACKED, all_paths, applied_set, from_fields, to_fields
from tests.kube.apiserver.golang import canonical_quantity, format_time, parse_time, quantity_value
from tests.kube.apiserver.managers import Writer
from tests.kube.apiserver.patches import json_patch, merge_patch, strategic
from tests.kube.apiserver.reads import Token, parse_token
from tests.kube.apiserver.resources import BUILT_IN, Key
from tests.kube.apiserver.selectors import Selection, parse_labels
from tests.kube.apiserver.store import Store
from tests.kube.apiserver.types import resource_type
from tests.kube.apiserver.watch import event_type

NAMES = st.sampled_from(["a", "b", "c", "d"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "x", "y"]))
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner)))
OBJECTS = st.dictionaries(NAMES, VALUES)
POD = resource_type(next(resource for resource in BUILT_IN if resource.kind == "Pod"))
LABELS = st.dictionaries(NAMES, st.sampled_from(["1", "2"]))
CONTAINERS = st.dictionaries(NAMES, st.sampled_from(["x:1", "x:2"]), min_size=1)


def without_nulls(value: Any) -> Any:
    """Return an object without nulls in objects."""
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(part) for name, part in value.items() if part is not None}


@st.composite
def pods(draw: st.DrawFn) -> Any:
    """Draw labels and containers of a pod."""
    containers = [{"name": name, "image": image} for name, image in draw(CONTAINERS).items()]
    return {"metadata": {"name": "p", "uid": "u", "labels": draw(LABELS)}, "spec": {"containers": containers}}


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_is_idempotent_and_does_not_change_its_target(target: Any, patch: Any) -> None:
    """RFC 7386: what the patch sets is there, what it nulls is not, and a second time changes nothing."""
    held = copy.deepcopy(target)
    once = merge_patch(target, patch)
    assert target == held
    assert merge_patch(once, patch) == once
    assert merge_patch({}, patch) == without_nulls(patch)
    for name, part in patch.items():
        assert (name in once) == (part is not None)


@given(OBJECTS, NAMES, VALUES)
def test_json_patch_adds_and_removes(target: Any, name: str, value: Any) -> None:
    """Adding a field and testing it passes; removing it gives the target without the field."""
    operations = [{"op": "add", "path": f"/{name}", "value": value}, {"op": "test", "path": f"/{name}", "value": value}]
    added = json_patch(target, operations)
    assert added == {**target, name: value}
    left = {key: part for key, part in target.items() if key != name}
    assert json_patch(added, [{"op": "remove", "path": f"/{name}"}]) == left


@given(pods(), pods())
def test_a_strategic_merge_patch_merges_containers_by_name(target: Any, patch: Any) -> None:
    """Containers of both are there once, with the image of the patch where it has one."""
    found = strategic(POD, target, {"spec": patch["spec"]})
    images = {container["name"]: container["image"] for container in found["spec"]["containers"]}
    wanted = {
        container["name"]: container["image"]
        for container in [*target["spec"]["containers"], *patch["spec"]["containers"]]
    }
    assert images == wanted
    assert len(found["spec"]["containers"]) == len(wanted)


@given(pods())
def test_field_sets_survive_their_form_in_managed_fields(pod: Any) -> None:
    """FieldsV1 to a set and back is the same."""
    for found in (set(applied_set(POD, pod)), set(all_paths(POD, pod)) - {()}):
        assert set(from_fields(to_fields(found))) == found


@given(pods(), pods(), pods())
def test_apply_gives_what_was_applied_and_leaves_what_others_own(live: Any, first: Any, second: Any) -> None:
    """A forced apply sets every field of the configuration, again changes nothing, and one manager's last word wins."""
    live = managers.write(live, [])
    for config in (first, second):
        applied = managers.apply(POD, live, config, Writer("me", "v1", time="t"), True, ())
        live = managers.write(applied.merged, applied.entries)
        labels = live["metadata"].get("labels", {})
        assert config["metadata"]["labels"].items() <= labels.items()
        images = {container["name"]: container.get("image") for container in live["spec"]["containers"]}
        assert {
            container["name"]: container["image"] for container in config["spec"]["containers"]
        }.items() <= images.items()
        again = managers.apply(POD, live, config, Writer("me", "v1", time="t"), False, ())
        assert managers.write(again.merged, again.entries) == live
    mine = next(entry for entry in managers.read(live) if entry.manager == "me")
    assert mine.fields == {path for path in applied_set(POD, second) if path not in UNTRACKED}


@given(pods(), pods())
def test_fields_have_one_owner_among_those_who_update(before: Any, after: Any) -> None:
    """After two updates each field of the object belongs to the manager that set it last, and to nobody twice."""
    made = managers.update(POD, {"metadata": {}, "spec": {}}, before, Writer("one", "v1", time="t"), ())
    made["metadata"]["uid"] = "u"
    managed = {**after, "metadata": {**after["metadata"], "managedFields": made["metadata"].get("managedFields")}}
    made = managers.update(POD, made, managed, Writer("two", "v1", time="t"), ())
    entries = managers.read(made)
    fields = [path for entry in entries for path in entry.fields]
    assert len(fields) == len(set(fields))
    assert set(fields) <= set(all_paths(POD, made))


SUFFIXES = ("", "m", "k", "M", "Ki", "Mi", "Gi")


@given(st.integers(0, 10_000), st.sampled_from(SUFFIXES))
def test_the_canonical_form_of_a_quantity_is_the_same_number(number: int, suffix: str) -> None:
    """It has the same value and is its own canonical form."""
    text = f"{number}{suffix}"
    canonical = canonical_quantity(text)
    assert quantity_value(canonical) == quantity_value(text)
    assert canonical_quantity(canonical) == canonical
    assert quantity_value("1Ki") == Fraction(1024)


@given(st.datetimes(), st.sampled_from(["+00:00", "Z", "-07:30", "+14:00"]))
def test_times_are_the_same_moment_in_their_canonical_form(moment: Any, zone: str) -> None:
    """A MicroTime in any zone comes back in UTC."""
    moment = moment.replace(year=2000 + moment.year % 50)
    text = moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + zone
    parsed = parse_time(text, micro=True)
    assert parse_time(format_time(parsed, micro=True), micro=True) == parsed
    assert parsed.microsecond == moment.microsecond


@given(st.integers(-1, 10**12), st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1))
def test_continue_tokens_come_back(version: int, start: str) -> None:
    """A token that the server has given is understood."""
    assert parse_token(Token(version, start).text()) == Token(version, start)


@given(LABELS, st.dictionaries(NAMES, st.sets(st.sampled_from(["1", "2", "3"]), min_size=1), min_size=1))
def test_a_selector_and_its_complement_divide_the_objects(labels: Any, wanted: Any) -> None:
    """`in` and `notin` exclude each other, and a conjunction matches where all its parts do."""
    parts = [(f"{key} in ({','.join(sorted(values))})", key, values) for key, values in wanted.items()]
    for text, key, values in parts:
        found = parse_labels(text).matches(labels)
        assert found == (labels.get(key) in values)
        assert found != parse_labels(text.replace(" in ", " notin ")).matches(labels)
    together = parse_labels(",".join(text for text, _, _ in parts)).matches(labels)
    assert together == all(parse_labels(text).matches(labels) for text, _, _ in parts)


WRITES = st.lists(st.tuples(NAMES, st.one_of(st.none(), LABELS)), max_size=20)
KIND = ("", "configmaps")


def written(store: Store, name: str, labels: Any) -> None:
    """Write or delete an object, if there is something to delete."""
    key: Key = (*KIND, "default", name)
    if labels is None and store.get(key) is None:
        return
    made = None if labels is None else {"kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}
    store.write(key, made)


@given(WRITES, WRITES, LABELS)
def test_a_list_and_the_events_since_give_the_present(earlier: Any, later: Any, chosen: Any) -> None:
    """A client that lists with a selector and follows the watch from there has what a new list has."""
    store = Store()
    for name, labels in earlier:
        written(store, name, labels)
    selected = Selection(parse_labels(",".join(f"{key}={value}" for key, value in chosen.items())))
    version = store.version
    view = {key: found for key, found in store.select(KIND) if selected.matches(found)}
    past = dict(view)
    for name, labels in later:
        written(store, name, labels)
    for change in store.since(KIND, version):
        event = event_type(change, selected, "default")
        if event is None:
            continue
        kind, found = event
        assert (kind == "ADDED") == (change.key not in view)
        assert found["metadata"]["resourceVersion"] == str(change.version)
        if kind == "DELETED":
            del view[change.key]
        else:
            view[change.key] = found
    assert view == {key: found for key, found in store.select(KIND) if selected.matches(found)}
    assert past == {key: found for key, found in store.at(KIND, "", version) if selected.matches(found)}


@given(st.lists(st.tuples(NAMES, LABELS), min_size=1, max_size=60))
def test_a_history_that_is_cut_says_how_far_it_goes_back(writes: Any) -> None:
    """Whatever is forgotten, every state from the floor on can still be read."""
    store = Store(history_max=5)
    states: dict[int, Any] = {}
    for name, labels in writes:
        written(store, name, labels)
        states[store.version] = dict(store.select(KIND))
    for version, state in states.items():
        if version >= store.compacted:
            assert dict(store.at(KIND, "", version)) == state
