"""Cluster addresses of Services: allocation, and what an update leaves out."""

from __future__ import annotations

import ipaddress

from tests.kube.apiserver.status import Object
from tests.kube.apiserver.store import Store

FIRST_ADDRESS = ipaddress.IPv4Address("10.0.0.2")
HEADLESS = "None"


def allocate(store: Store, service: Object) -> None:
    """Give a new Service an address in place, unless it is headless or external."""
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return
    if not spec.get("clusterIP"):
        taken = {held["spec"].get("clusterIP") for _, held in store.select(("", "services"))}
        address = FIRST_ADDRESS
        while str(address) in taken:
            address += 1
        spec["clusterIP"] = str(address)
    spec["clusterIPs"] = [spec["clusterIP"]]
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")


def keep(service: Object, before: Object) -> None:
    """Fill the address of an updated Service in place if the update leaves it out."""
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return
    for name in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
        if not spec.get(name) and before["spec"].get(name):
            spec[name] = before["spec"][name]
