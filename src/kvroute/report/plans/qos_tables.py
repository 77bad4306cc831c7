"""Traffic classes as a sentence and one grid."""

from __future__ import annotations

from kvroute.planner.qos.plan import QosPlan
from kvroute.report.grid import UNKNOWN, Grid, GridEntry, Heading

_LINKS = {"infiniband": "InfiniBand", "roce": "RoCE"}


def qos_verdict(plan: QosPlan) -> str:
    """Say in one sentence which class has which share."""
    parts = [f"{each.name} {100 * each.guaranteed_share:.3g}%" for each in plan.classes]
    return (
        f"While all classes send, the {_LINKS[plan.link]} links of {plan.cluster} are shared as {', '.join(parts)}. "
        "A class that sends alone has the whole link."
    )


def qos_grid(plan: QosPlan) -> Grid:
    """Return one row per class with the numbers of the link type."""
    if plan.link == "infiniband":
        headings: tuple[Heading, ...] = (Heading("service level"), Heading("virtual lane"), Heading("table"))
        rows = [(str(each.service_level), str(each.vl), "high" if each.high else "low") for each in plan.classes]
    else:
        headings = (Heading("DSCP"), Heading("priority and TC"), Heading("PFC"))
        rows = [
            (
                ", ".join(map(str, each.dscp)) or ("others" if each.default else UNKNOWN),
                str(each.priority),
                "on" if each.lossless else "off",
            )
            for each in plan.classes
        ]
    texts = tuple(
        tuple(map(GridEntry, (each.name, f"{100 * each.share:.3g}", f"{100 * each.guaranteed_share:.3g}", *row)))
        for each, row in zip(plan.classes, rows, strict=True)
    )
    first = (
        Heading("class"),
        Heading("share, %", "Share asked for"),
        Heading("guaranteed, %", "While all classes send"),
    )
    return Grid("", (*first, *headings), texts)
