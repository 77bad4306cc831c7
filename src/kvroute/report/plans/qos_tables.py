"""Traffic classes as a sentence and one grid."""

from __future__ import annotations

from kvroute.planner.qos.plan import QosPlan
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading

_LINKS = {"infiniband": "InfiniBand", "roce": "RoCE"}


def qos_verdict(plan: QosPlan) -> str:
    """Say in one sentence which class has which share."""
    parts = [f"{traffic_class.name} {100 * traffic_class.guaranteed_share:.3g}%" for traffic_class in plan.classes]
    return (
        f"While all classes send, the {_LINKS[plan.link]} links of {plan.cluster} are shared as {', '.join(parts)}. "
        "A class that sends alone has the whole link."
    )


def qos_grid(plan: QosPlan) -> Grid:
    """Return one row per class with the numbers of the link type."""
    if plan.link == "infiniband":
        headings: tuple[Heading, ...] = (Heading("service level"), Heading("virtual lane"), Heading("table"))
        rows = [
            (str(traffic_class.service_level), str(traffic_class.vl), "high" if traffic_class.high else "low")
            for traffic_class in plan.classes
        ]
    else:
        headings = (Heading("DSCP"), Heading("priority and TC"), Heading("PFC"))
        rows = [
            (
                ", ".join(map(str, traffic_class.dscp)) or ("others" if traffic_class.default else UNKNOWN),
                str(traffic_class.priority),
                "on" if traffic_class.lossless else "off",
            )
            for traffic_class in plan.classes
        ]
    texts = tuple(
        tuple(
            map(
                GridEntry,
                (
                    traffic_class.name,
                    f"{100 * traffic_class.share:.3g}",
                    f"{100 * traffic_class.guaranteed_share:.3g}",
                    *row,
                ),
            )
        )
        for traffic_class, row in zip(plan.classes, rows, strict=True)
    )
    first = (
        Heading("class"),
        Heading("share, %", "Share asked for"),
        Heading("guaranteed, %", "While all classes send"),
    )
    return Grid("", (*first, *headings), texts)
