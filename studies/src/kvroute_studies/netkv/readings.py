"""Readings of a publication: named sets of parameters for the choices that its text leaves open."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args, get_type_hints

import msgspec

from kvroute.types import InputError


class ComputeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """T_prefill(l) = per_token * l + base and t_iter(b) = base + per_request * b (NetKV VI-A)."""

    prefill_per_token_s: float
    prefill_base_s: float
    decode_base_s: float
    decode_per_request_s: float


NETKV_TIMES = ComputeTimes(
    prefill_per_token_s=61.6e-6,
    prefill_base_s=20e-3,
    decode_base_s=12.47e-3,
    decode_per_request_s=0.111e-3,
)
"""Fitted by `calibration` on the Mooncake conversation trace (docs/fidelity.md); the base of prefill is assumed."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """An interpretation of NetKV's evaluation. Fabric rates are the paper's; readings differ in how they are shared."""

    name: str
    about: str
    prefill_queueing: bool
    """True: FIFO prefill; False: a pure delay, as in Table II, whose TTFT minus transfer time is constant."""
    prefill_cache: bool
    prefill_policy: str
    ecmp: Literal["flow", "transfer"]
    """Unit of an ECMP draw: each of the TP flows draws its uplinks, or all flows of a transfer share one draw."""
    nic_scope: Literal["gpu", "instance", "server"]
    nic_bandwidth: str = "100 Gbps"
    rack_uplinks: int
    """Number of links of B2 = 50 Gbps from each rack."""
    pod_uplinks: int
    """Number of links of B3 = 25 Gbps from each pod."""
    placement: Literal["rack", "node", "spread"]
    """`rack`: prefill instances fill whole racks (tiers 0 and 1 are not used). `node`: they fill a node in every other
    rack (tier 0 is not used). `spread`: one goes to each rack and shares its node with a decode instance."""
    prefixes: Literal["groups", "trace"]
    """`groups`: p_share groups that share half a prompt; `trace`: the trace's own block hashes."""
    background: float
    """Share of every network link used by background traffic, unless the experiment sweeps it."""
    capacity: Literal["network", "prefill"]
    """Meaning of 100 % load. `network`: 6.09 RAG requests/s, other profiles at equal prompt tokens/s. `prefill`: 80 %
    of FIFO prefill capacity."""
    request_set: Literal["window", "shifted"]
    """`window`: trace seconds [60, 75) for every seed, as in the paper; `shifted`: another window for each seed."""
    times: ComputeTimes = NETKV_TIMES


_PAPER = Reading(
    name="paper",
    about="prefill is a pure delay, a transfer's shards share one uplink, prefill fills one rack",
    prefill_queueing=False,
    prefill_cache=False,
    prefill_policy="round-robin",
    ecmp="transfer",
    nic_scope="gpu",
    rack_uplinks=32,
    pod_uplinks=64,
    placement="rack",
    prefixes="groups",
    background=0.0,
    capacity="network",
    request_set="window",
)
_LITERAL = msgspec.structs.replace(
    _PAPER,
    name="literal",
    about="one 100G NIC per server, two uplinks per rack and pod, as the bandwidths read word by word",
    ecmp="flow",
    nic_scope="server",
    rack_uplinks=2,
    pod_uplinks=2,
)
_REALISTIC = msgspec.structs.replace(
    _PAPER,
    name="realistic",
    about="FIFO prefill with prefix reuse, flows draw their uplinks one by one, the trace's own prefixes",
    prefill_queueing=True,
    prefill_cache=True,
    prefill_policy="least-loaded",
    ecmp="flow",
    rack_uplinks=16,
    pod_uplinks=32,
    prefixes="trace",
    capacity="prefill",
    request_set="shifted",
)
READINGS = {entry.name: entry for entry in (_PAPER, _LITERAL, _REALISTIC)}


def unfit(kind: type, changes: Sequence[str], fault: str) -> InputError:
    """Return the error for a value that does not fit its field of `kind`, from the decoder's message, which names the
    field as `$.field`."""
    what, _, place = fault.partition(" - at ")
    name = place.strip("`").rpartition(".")[2]
    given = next((change for change in changes if change.partition("=")[0] == name), ", ".join(changes))
    choices = [str(choice) for choice in get_args(get_type_hints(kind).get(name))]
    expected = re.fullmatch(r"Expected `(.+)`, got `.+`", what)
    if "enum" in what and choices:
        problem, hint = "the value is unknown", f"choose one of {', '.join(choices)}"
    else:
        problem, hint = (
            f"the value is not of type {expected[1].replace('float', 'number')}" if expected else what,
            "give a value of this type",
        )
    return InputError(f"{given}: {problem}", where="--set", hint=hint)


def reading(name: str, changes: Sequence[str] = ()) -> Reading:
    """Return a reading by name with fields changed by `field=value`; its name then lists the changes.

    Raises:
        InputError: a reading or field is unknown, or a value does not fit the field.
    """
    if name not in READINGS:
        raise InputError(
            f"there is no reading {name!r}", where="--reading", hint=f"choose one of {', '.join(READINGS)}"
        )
    fields = msgspec.to_builtins(READINGS[name])
    for change in changes:
        field, _, value = change.partition("=")
        if not value:
            raise InputError(f"{change!r} has no value", where="--set", hint="write field=value")
        holder = fields["times"] if field in fields["times"] else fields
        if field not in holder or field in ("name", "about", "times"):
            known = ", ".join(key for key in (*fields, *fields["times"]) if key not in ("name", "about", "times"))
            raise InputError(f"a reading has no field {field!r}", where="--set", hint=f"known: {known}")
        holder[field] = value
    fields["name"] = "+".join((name, *changes))
    try:
        return msgspec.convert(fields, Reading, strict=False)
    except msgspec.ValidationError as error:
        raise unfit(Reading, changes, str(error)) from None
