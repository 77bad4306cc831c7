"""Checks of the `gateway.autoscaling:` section, by itself and against its cluster: every fault with its line."""

from __future__ import annotations

from collections.abc import Iterator

from kvroute.serve.config.settings import SECTION, GatewaySettings
from kvroute.topology import Cluster, FileError
from kvroute.types import InputError
from kvroute_engine.files.form import Lines


def autoscaling_faults(settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield values that contradict each other."""
    section = settings.autoscaling
    if section is None:
        return
    place = (SECTION, "autoscaling")
    try:
        section.spec()
    except InputError as error:
        yield lines.error(error.what, place, error.hint)
    for name, hook in (("hook", section.hook), ("role_switch", section.role_switch)):
        if hook is not None and (hook.url is None) == (hook.command is None):
            what = f"`{name}` requires a URL or a command" + (", not both" if hook.url else ", but has neither")
            yield lines.error(what, (*place, name), "give `url: http://...` or `command: [PROGRAM, ...]`")
    if section.hook is not None and section.role_switch is not None:
        what = "`hook` changes the number of engines and `role_switch` keeps it"
        yield lines.error(what, (*place, "role_switch"), "give one of them")
    if section.role_switch is not None and settings.offload is not None:
        what = "`offload` and `autoscaling` would both switch roles"
        yield lines.error(what, (*place, "role_switch"), "give `role_switch` in the section `offload` only")


def scaled_cluster_faults(cluster: Cluster, settings: GatewaySettings, lines: Lines) -> Iterator[FileError]:
    """Yield what prevents autoscaling in this cluster."""
    section = settings.autoscaling
    if section is None:
        return
    place = (SECTION, "autoscaling")
    if section.role_switch is not None and cluster.file.discovery is not None:
        what = "`role_switch` and `discovery` cannot be given together"
        yield lines.error(what, (*place, "role_switch"), "give `hook`, or list the instances in the file")
    ranks = next((instance.engine for instance in cluster.instances if instance.engine), "")
    if ranks and section.manages != "nothing":
        what = f"{ranks} has several data-parallel ranks, which can only start and stop together"
        yield lines.error(what, place, "leave `hook` and `role_switch` out")
