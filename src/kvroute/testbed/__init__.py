"""A miniature cluster on one machine: the kernel's own network between emulated engines, with a gateway in front."""

from kvroute.testbed.network import Build
from kvroute.testbed.runs import NamedTestbed, SavedTestbed, known
from kvroute.testbed.testbed import Testbed

__all__ = ["Build", "NamedTestbed", "SavedTestbed", "Testbed", "known"]
