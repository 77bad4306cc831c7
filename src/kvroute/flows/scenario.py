"""Flow scenarios: a JSON file of links and timed transfers, its checks, and the finish time of every transfer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvroute.flows.network import WEIGHT_MAX, WEIGHT_MIN, FlowNetwork
from kvroute.types import InputError, InputErrors
from kvroute_engine.files.document import other_kind
from kvroute_engine.files.form import nearest

_SCENARIO_HINT = "give a JSON object with `links` and `flows`"


class ScenarioLink(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"bytes_per_s": "capacity_Bps"}
):
    """One directed link."""

    id: str
    bytes_per_s: float


class Flow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"nbytes": "size_B", "traffic_class": "class"},
):
    """One transfer: its path in order, its size and its start time."""

    id: int
    links: tuple[str, ...]
    nbytes: float
    start_s: float
    weight: float = 1.0
    traffic_class: str = "kv"


class FlowScenario(msgspec.Struct, frozen=True, kw_only=True):
    """Links and the flows over them; `classes` is a weight multiplier by traffic class (default: 1 for each)."""

    links: tuple[ScenarioLink, ...]
    flows: tuple[Flow, ...]
    classes: dict[str, float] | None = None

    def class_weights(self) -> dict[str, float]:
        """Return the weight multiplier of every class that a flow may use."""
        return self.classes if self.classes is not None else {flow.traffic_class: 1.0 for flow in self.flows}


def read_scenario(path: Path) -> FlowScenario:
    """Read a scenario file. Raises InputError when it cannot be read, InputErrors with every fault of its content."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint="give a readable file") from error
    return parse_scenario(text, where=str(path))


def parse_scenario(text: bytes | str, where: str = "scenario") -> FlowScenario:
    """Parse and check a scenario from JSON text; `where` is its name in errors. Raises InputError or InputErrors."""
    data = text.encode() if isinstance(text, str) else text
    if not data.strip():
        raise InputError("the file is empty", where=where, hint=_SCENARIO_HINT)
    try:
        scenario = msgspec.json.decode(data, type=FlowScenario)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), where) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (foreign := _foreign(data, where)) is not None:
            raise foreign from error
        at = re.search(r"byte (\d+)", str(error))
        line = data[: int(at.group(1)) if at else len(data)].count(b"\n") + 1
        raise InputError(f"bad JSON: {error}", where=f"{where}, line {line}", hint="correct the JSON") from error
    problems = [InputError(what, where=f"{where}, {place}", hint=hint) for place, what, hint in _faults(scenario)]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputErrors(problems)
    return scenario


def _invalid(error: str, where: str) -> InputError:
    """Convert msgspec's message about a field to an InputError."""
    what, _, field = error.partition(" - at ")
    place = field.strip("`").removeprefix("$").removeprefix(".")
    hint = "correct the field" if place else _SCENARIO_HINT
    if missing := re.fullmatch(r"Object missing required field (.*)", what):
        what = f"{missing[1]} is missing"
    elif unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        what = f"unknown field `{unknown[1]}`"
        kind = ScenarioLink if place.startswith("links") else Flow
        hint = nearest(unknown[1], [known.encode_name for known in msgspec.structs.fields(kind)])
    return InputError(what, where=f"{where}, {place}" if place else where, hint=hint)


def _foreign(data: bytes, where: str) -> InputError | None:
    """Return the error for a YAML file of another kind; None if the file was meant to be JSON."""
    if data.lstrip().startswith((b"{", b"[")):
        return None
    try:
        what, hint = other_kind(data.decode(), FlowScenario) or ("this is YAML, not JSON", _SCENARIO_HINT)
    except (UnicodeDecodeError, InputErrors):
        return None
    return InputError(what, where=where, hint=hint)


def completion_times(scenario: FlowScenario) -> list[float]:
    """Return when each flow ends, in absolute seconds, in the order of the scenario's flows.

    Rates are weighted max-min, solved again at each start and finish. Links have no latency. Raises InputError for a
    flow that never ends.
    """
    number = {link.id: k for k, link in enumerate(scenario.links)}
    net = FlowNetwork(np.array([link.bytes_per_s for link in scenario.links], np.float64), scenario.class_weights())
    ends_s = [math.inf] * len(scenario.flows)

    def run(to: float) -> None:
        while (upcoming := net.next_finish()) is not None and upcoming[0] <= to:
            for done in net.advance(upcoming[0]):
                ends_s[done] = net.now

    for k in sorted(range(len(scenario.flows)), key=lambda k: scenario.flows[k].start_s):
        flow = scenario.flows[k]
        run(flow.start_s)
        net.advance(flow.start_s)
        net.start(k, [number[link] for link in flow.links], flow.nbytes, flow.weight, flow.traffic_class)
    run(math.inf)
    for flow, end_s in zip(scenario.flows, ends_s, strict=True):
        if end_s == math.inf:
            raise InputError(f"flow {flow.id} never ends", hint="give its links a capacity above zero")
    return ends_s


def _faults(scenario: FlowScenario) -> Iterator[tuple[str, str, str]]:
    """Yield place, fault and fix of every error that the types do not exclude."""
    classes = scenario.class_weights()
    for name, weight in classes.items():
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            yield f"classes.{name}", f"weight {weight:g} is out of range", _WEIGHT_HINT
    times = Counter(link.id for link in scenario.links)
    for k, link in enumerate(scenario.links):
        if times[link.id] > 1:
            yield f"links[{k}].id", f"link id {link.id!r} is not unique", "give every link its own id"
        if not 0.0 < link.bytes_per_s < math.inf:
            what = f"link {link.id!r} has capacity {link.bytes_per_s:g}, so its flows never end"
            yield f"links[{k}].capacity_Bps", what, "give bytes per second above zero"
    uses = Counter(flow.id for flow in scenario.flows)
    for k, flow in enumerate(scenario.flows):
        if uses[flow.id] > 1:
            yield f"flows[{k}].id", f"flow id {flow.id} is not unique", "give every flow its own id"
        for field, what, hint in _flow_faults(flow, times, classes):
            yield f"flows[{k}].{field}", f"flow {flow.id} {what}", hint


def _flow_faults(flow: Flow, links: Counter[str], classes: dict[str, float]) -> Iterator[tuple[str, str, str]]:
    if not flow.links:
        yield "links", "has an empty path", "list the links of its path in order"
    for link in dict.fromkeys(flow.links):
        if link not in links:
            yield "links", f"crosses unknown link {link!r}", "use a link of `links`"
    if not 0.0 <= flow.nbytes < math.inf:
        yield "size_B", f"has size {flow.nbytes:g}", "give bytes, 0 or more"
    if not 0.0 <= flow.start_s < math.inf:
        yield "start_s", f"starts at {flow.start_s:g} s", "give seconds, 0 or more"
    if flow.traffic_class not in classes:
        yield "class", f"has unknown class {flow.traffic_class!r}", f"choose one of {', '.join(sorted(classes))}"
    elif not WEIGHT_MIN <= flow.weight * classes[flow.traffic_class] <= WEIGHT_MAX:
        yield "weight", f"has weight {flow.weight:g}, out of range", _WEIGHT_HINT


_WEIGHT_HINT = f"weight times class weight lies between {WEIGHT_MIN:g} and {WEIGHT_MAX:g}"
