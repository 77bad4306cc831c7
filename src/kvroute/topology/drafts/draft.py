"""First draft of a cluster file from engine addresses: engines and hosts are given, the network is a guess to
correct."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from kvroute.topology.drafts.builders import H100_LLAMA_70B_TP4
from kvroute.topology.place import port_fault
from kvroute.topology.schema import (
    ClusterFile,
    DecodeEntry,
    EndpointEntry,
    InstanceDefaults,
    InstanceEntry,
    LinearPrefillEntry,
    Nic,
    Nics,
    Node,
    Rack,
    TimingEntry,
)
from kvroute.types import InputError, KvProtocol, Role
from kvroute_engine.files.units import Bandwidth, Size

_RACK = "rack0"
_MEASURED_TP = 4
KV_BYTES_PER_GPU = 40e9
_TODO = """\
# First draft: engines and addresses are as given, all other values are guesses. Correct them in this order:
#  1. racks, pods and their uplinks, unless one switch connects all nodes; `nics` of the real nodes;
#  2. `timing`: fit your own engines with `kvroute timing fit`; these are for Llama-3-70B on H100, scaled to {tp};
#  3. `kv_capacity`: KV memory of one instance, here 40 GB per GPU; vLLM logs the number of tokens that fit at startup.
# Run `kvroute topology check FILE` to find all errors, then `kvroute serve FILE`.
"""


def draft(
    name: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    both: Sequence[str] = (),
    *,
    model: str,
    protocol: KvProtocol = "vllm",
    tp: int = 1,
    gpus_per_node: int = 8,
    nic_bytes_per_s: float = 12.5e9,
) -> str:
    """Return a cluster file's text: one instance for each URL, one node for each host, all below one switch.

    KV memory and times are guesses that scale with the GPUs of an instance.

    Raises:
        InputError: no address, one without a host, one named twice, or more engines on a host than its GPUs allow.
    """
    addresses: list[tuple[Role, str]] = [
        *(("prefill", url) for url in prefill),
        *(("decode", url) for url in decode),
        *(("both", url) for url in both),
    ]
    if not addresses:
        raise InputError("no engine is given", hint="give --prefill URL and --decode URL, or --both URL")
    places: dict[str, list[tuple[Role, str]]] = {}
    for role, url in addresses:
        places.setdefault(_host(url), []).append((role, url))
    for role, urls in (("prefill", prefill), ("decode", decode)):
        if not urls and not both:
            raise InputError(f"no {role} engine is given", hint=f"give --{role} URL or --both URL")
    if len({url for _, url in addresses}) < len(addresses):
        raise InputError("an address is given twice", hint="use --both URL for an engine with both roles")
    for host, engines in places.items():
        if len(engines) * tp > gpus_per_node:
            wanted = f"{_count(len(engines), 'engine')} of {_count(tp, 'GPU')} on host {host!r}"
            what = f"{wanted} need{'s' if len(engines) == 1 else ''} more than its {_count(gpus_per_node, 'GPU')}"
            raise InputError(what, hint="correct --gpus or --tp")
    nics = Nics(compute=Nic(count=gpus_per_node, bytes_per_s=Bandwidth(nic_bytes_per_s)))
    file = ClusterFile(
        name=name,
        racks=[Rack(name=_RACK)],
        nodes=[Node(name=f"node{i}", rack=_RACK, gpus=gpus_per_node, nics=nics) for i in range(len(places))],
        timing={"default": scaled_times(tp)},
        defaults=InstanceDefaults(model=model, tp=tp, kv_capacity_bytes=Size(KV_BYTES_PER_GPU * tp)),
        instances=_instances(places, protocol, tp),
    )
    return _TODO.format(tp=_count(tp, "GPU")) + file.to_yaml()


def scaled_times(tp: int) -> TimingEntry:
    """Return times of an engine of `tp` GPUs. Prefill time and the weights' part of a decode step scale inversely to
    the number of GPUs."""
    prefill, decode = H100_LLAMA_70B_TP4.prefill, H100_LLAMA_70B_TP4.decode
    assert isinstance(prefill, LinearPrefillEntry)
    share = _MEASURED_TP / tp
    return TimingEntry(
        prefill=LinearPrefillEntry(per_token_s=_scaled_s(prefill.per_token_s, share), base_s=prefill.base_s),
        decode=DecodeEntry(base_s=_scaled_s(decode.base_s, share), per_request_s=decode.per_request_s),
    )


def _scaled_s(seconds: float, share: float) -> float:
    return float(f"{seconds * share:.4g}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _host(url: str) -> str:
    try:
        host = urlsplit(url).hostname if url.startswith(("http://", "https://")) else None
    except ValueError:
        host = None
    if not host:
        raise InputError(f"{url!r} is not an engine address", hint="write http://host:port")
    if fault := port_fault(url):
        raise InputError(fault, where=url, hint="give the port that the engine listens on")
    return host


def _instances(places: dict[str, list[tuple[Role, str]]], protocol: KvProtocol, tp: int) -> list[InstanceEntry]:
    """Return instances in the given order of roles, each on the next free GPUs of its host."""
    counts: dict[Role, int] = {}
    entries: list[InstanceEntry] = []
    for node, engines in enumerate(places.values()):
        for slot, (role, url) in enumerate(engines):
            number = counts.get(role, 0)
            counts[role] = number + 1
            first = slot * tp
            gpus = f"node{node}:{first}" if tp == 1 else f"node{node}:{first}-{first + tp - 1}"
            endpoint = EndpointEntry(url=url.rstrip("/"), protocol=protocol)
            entries.append(InstanceEntry(name=f"{role}{number}", role=role, gpus=gpus, endpoint=endpoint))
    return entries
