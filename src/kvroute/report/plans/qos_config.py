"""Traffic classes as lines to paste: OpenSM, NICs (mlnx_qos or dcb), Cumulus Linux, and environments of engines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kvroute.planner.qos.plan import InfiniBandQos, QosPlan, RoceQos
from kvroute.planner.qos.vl_arbitration import Table

_ECN_CAPABLE = 2
"""The last two bits of the traffic class byte; 2 lets switches mark packets instead of dropping them."""

_MAPPING = "nv set qos egress-queue-mapping default-global"
_SCHEDULER = "nv set qos egress-scheduler default-global traffic-class"


def configurations(plan: QosPlan) -> dict[str, str]:
    """Return the configuration of each component, by a title that says where it belongs."""
    if plan.infiniband is not None:
        found = {"Subnet manager, opensm.conf": _opensm(plan.infiniband)}
    else:
        assert plan.roce is not None
        found = {
            "Each NIC, with NVIDIA's mlnx_qos": _mlnx_qos(plan.roce),
            "Each NIC, with dcb of iproute2 instead": _dcb(plan.roce),
            "Each switch, Cumulus Linux with NVUE": _nvue(plan.roce),
        }
    environment = _environment(plan)
    return found | ({"Environment of each engine": environment} if environment else {})


def _opensm(found: InfiniBandQos) -> str:
    def entries(table: Table) -> str:
        return ",".join(f"{lane}:{weight}" for lane, weight in table)

    return "\n".join(
        (
            "qos TRUE",
            f"qos_max_vls {found.vls}",
            f"qos_high_limit {found.arbitration.high_limit}",
            f"qos_vlarb_high {entries(found.arbitration.high)}",
            f"qos_vlarb_low {entries(found.arbitration.low)}",
            f"qos_sl2vl {_listed(found.sl2vl)}",
        )
    )


def _mlnx_qos(found: RoceQos) -> str:
    command = f"mlnx_qos -i {found.interface}"
    lines = [f"{command} --trust dscp"]
    for priority, values in _changed(found).items():
        if len(values) == 1:
            lines.append(f"{command} --dscp2prio set,{values[0]},{priority}")
            continue
        loop = f"for d in {' '.join(map(str, values))}; do"
        lines += [*_wrapped(loop), f"  {command} --dscp2prio set,$d,{priority}", "done"]
    algorithms = ",".join("ets" if weight else "strict" for weight in found.weights)
    lines += [
        f"{command} --prio_tc {_listed(found.priority_class)}",
        f"{command} --tsa {algorithms} \\",
        f"  --tcbw {_listed(found.weights)}",
        f"{command} --pfc {_listed(map(int, found.pfc))}",
    ]
    return "\n".join(lines)


def _dcb(found: RoceQos) -> str:
    device = f"dev {found.interface}"
    marks = [f"{value}:{priority}" for priority, values in _changed(found).items() for value in values]
    lines = _wrapped(f"dcb app replace {device} dscp-prio {' '.join(marks)}") if marks else []
    classes = " ".join(f"{priority}:{queue}" for priority, queue in enumerate(found.priority_class))
    used = [(queue, weight) for queue, weight in enumerate(found.weights) if weight]
    paused = " ".join(f"{priority}:on" for priority, on in enumerate(found.pfc) if on)
    lines += [
        f"dcb ets set {device} willing off prio-tc {classes}",
        f"dcb ets set {device} tc-tsa all:strict {' '.join(f'{queue}:ets' for queue, _ in used)} \\",
        f"  tc-bw all:0 {' '.join(f'{queue}:{weight}' for queue, weight in used)}",
        f"dcb pfc set {device} prio-pfc all:off {paused}".rstrip(),
    ]
    return "\n".join(lines)


def _nvue(found: RoceQos) -> str:
    lines = ["nv set qos mapping default-global trust l3"]
    for priority, values in _changed(found).items():
        for at in range(0, len(values), 8):
            numbers = _listed(values[at : at + 8])
            lines.append(f"nv set qos mapping default-global dscp {numbers} switch-priority {priority}")
    for priority, queue in enumerate(found.priority_class):
        if queue != priority:
            lines.append(f"{_MAPPING} switch-priority {priority} traffic-class {queue}")
    for queue, weight in enumerate(found.weights):
        if weight:
            lines += [f"{_SCHEDULER} {queue} mode dwrr", f"{_SCHEDULER} {queue} bw-percent {weight}"]
    unused = [queue for queue, weight in enumerate(found.weights) if not weight]
    if unused:
        lines.append(f"{_SCHEDULER} {_listed(unused)} mode strict")
    paused = [priority for priority, on in enumerate(found.pfc) if on]
    if paused:
        lines += [f"nv set qos pfc default-global switch-priority {_listed(paused)}"]
        lines += [f"nv set qos pfc default-global {way} enable" for way in ("tx", "rx")]
    return "\n".join([*lines, "nv config apply"])


def _environment(plan: QosPlan) -> str:
    names = {
        "infiniband": {"nccl": "NCCL_IB_SL", "ucx": "UCX_IB_SL"},
        "roce": {"nccl": "NCCL_IB_TC", "ucx": "UCX_IB_TRAFFIC_CLASS"},
    }[plan.link]
    lines = []
    for traffic_class in plan.classes:
        if traffic_class.library is None or (plan.link == "roce" and not traffic_class.dscp):
            continue
        value = traffic_class.service_level if plan.link == "infiniband" else traffic_class.dscp[0] * 4 + _ECN_CAPABLE
        lines.append(f"export {names[traffic_class.library]}={value}  # {traffic_class.name}")
    return "\n".join(lines)


def _changed(found: RoceQos) -> dict[int, list[int]]:
    """Return the DSCP values of classes, and those whose priority is not the usual one, an eighth of the value, by
    priority."""
    shown: dict[int, list[int]] = {}
    for value, priority in enumerate(found.dscp_priority):
        if priority != value // 8 or value in found.dscp:
            shown.setdefault(priority, []).append(value)
    return shown


def _wrapped(command: str) -> list[str]:
    """Return a shell command in lines of at most 80 characters."""
    lines = textwrap.wrap(command, 78, subsequent_indent="  ")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _listed(numbers: Sequence[int] | map[int]) -> str:
    return ",".join(map(str, numbers))
