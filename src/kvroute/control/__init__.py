"""The control core, which turns events into decisions; the simulator and the gateway call the same core."""

from kvroute.control.admissions import Admissions
from kvroute.control.cluster_change import NextCluster
from kvroute.control.core import Control
from kvroute.control.log import (
    LogHeader,
    LogRecord,
    TermsKept,
    decisions_equal,
    is_log,
    replay,
)
from kvroute.control.log_hashing import LogHashing
from kvroute.control.replica import Replica, SyncState
from kvroute.control.settings import ControlSettings
from kvroute.control.shadow_policy import ShadowTally
from kvroute.control.spec import ControlSpec
from kvroute.control.view import Load

__all__ = [
    "Admissions",
    "Control",
    "ControlSettings",
    "ControlSpec",
    "Load",
    "LogHashing",
    "LogHeader",
    "LogRecord",
    "NextCluster",
    "Replica",
    "ShadowTally",
    "SyncState",
    "TermsKept",
    "decisions_equal",
    "is_log",
    "replay",
]
