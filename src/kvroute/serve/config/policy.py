"""The policy of the `gateway:` section: its name, its parameters, and the mapping of both that a file may give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from kvroute.policies import DEFAULT_DECODE_POLICY, TARGETS, known_parameters
from kvroute.topology import FileError
from kvroute.types import InputError
from kvroute_engine.files.form import Key, Lines
from kvroute_engine.files.units import Duration, quantity

PolicyParameter: TypeAlias = float | Annotated[str, Meta(pattern=r"^[0-9][^\n]*[a-z]\Z", examples=["50 ms"])]
"""A number, or a time with its unit."""
PolicyName: TypeAlias = Annotated[
    str,
    Meta(
        examples=[DEFAULT_DECODE_POLICY],
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "string"}]}},
            ]
        },
    ),
]
"""Name of a policy. A file may give a mapping with the name and the parameters; see `preflight`."""


class Target(Duration):
    """Target for a latency, in seconds; 0: none."""

    example: ClassVar[str] = "50 ms"


def policy_parameter(name: str, value: PolicyParameter) -> float:
    """Return a parameter of a policy as a number, a time in seconds.

    Raises:
        InputError: a target is no time with its unit, or another parameter is neither a number nor, if its name says
            that it is in seconds, a time. `where` is its name.
    """
    if not isinstance(value, str) and name not in TARGETS:
        return value
    if not isinstance(value, str):
        value = f"{value:g}"
    try:
        if name in TARGETS or name.endswith("_s"):
            return float(quantity(Target, value))
        raise InputError(f"{value!r} is not a number", hint="write a number without a unit")
    except InputError as error:
        raise InputError(error.what, where=name, hint=error.hint) from None


def parameters_text(parameters: Mapping[str, PolicyParameter]) -> str:
    """Return parameters as in the file: `tpot=50 ms, width=1`; empty: there are none."""
    values = {name: value if isinstance(value, str) else f"{value:g}" for name, value in parameters.items()}
    return ", ".join(f"{name}={value}" for name, value in values.items())


def policy_text(policy: str, parameters: Mapping[str, PolicyParameter]) -> str:
    """Return a policy with its parameters, if it has any: `foresight-joint (tpot=50 ms)`."""
    return f"{policy} ({parameters_text(parameters)})" if parameters else policy


def without_effect(policy: str, parameters: Mapping[str, PolicyParameter], others: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each group of other policies that do not have all parameters of one."""
    without: dict[str, list[str]] = {}
    for other in others:
        own = known_parameters(other, parameters)
        names = " and ".join(name for name in parameters if name not in own)
        without.setdefault(names, []).append(other)
    for names, found in without.items():
        if names:
            yield f"no effect on {', '.join(found)}: {names} of {policy}"


def with_policy_name(key: str, section: object, lines: Lines) -> tuple[object, Lines, list[FileError]]:
    """Return the section with its policy as a name: `policy: {tpot: 50 ms}` gives parameters to the default policy, or
    to the one that `name` names. A fault is an empty mapping, or a parameter that is given at both places. Args:
    `key`: of the section."""
    policy = section.get("policy") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(policy, dict):
        return section, lines, []
    here, there = (key, "policy"), (key, "parameters")
    name = policy.get("name", DEFAULT_DECODE_POLICY)
    if not policy:
        hint = f"write the name of a policy, or parameters of {name} such as {{tpot: 50 ms}}"
        return section | {"policy": name}, lines, [lines.error("the mapping is empty", here, hint)]
    own = {parameter: value for parameter, value in policy.items() if parameter != "name"}
    given = section.get("parameters") or {}
    if not isinstance(given, dict):
        return section | {"policy": name}, lines, []
    twice = [
        lines.error(
            f"`{parameter}` is given here and in `{key}.parameters`", (*here, parameter), "remove one of the two"
        )
        for parameter in own
        if parameter in given
    ]
    moved: dict[Key, Key] = {(*there, parameter): (*here, parameter) for parameter in own}
    moved |= {here: (*here, "name")} if "name" in policy else {}
    moved |= {there: here} if "parameters" not in section else {}
    present = {written: new for new, written in moved.items()}
    numbers = {present.get(written, written): number for written, number in lines.numbers.items()}
    lines = dataclasses.replace(lines, moved=moved, numbers=numbers)
    return section | {"policy": name, "parameters": {**given, **own}}, lines, twice
