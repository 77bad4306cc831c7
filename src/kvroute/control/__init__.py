"""The control core, which turns events into decisions; the simulator and the gateway call the same core."""

from kvroute.control.choice.forecast import Backlog
from kvroute.control.choice.shadow_policy import ShadowTally
from kvroute.control.cluster_change import NextCluster
from kvroute.control.core import Control
from kvroute.control.learning.calibration import Calibration, CalibrationRow
from kvroute.control.learning.calibration import deciles as calibration_deciles
from kvroute.control.learning.calibration import joined as joined_calibration
from kvroute.control.log.entries import (
    LogHeader,
    LogRecord,
    TermsKept,
    decisions_equal,
    is_log,
    replay,
)
from kvroute.control.log.hashing import LogHashing
from kvroute.control.queueing.fair_queue import FairQueue, WaitingRequest
from kvroute.control.queueing.request_queue import QueuedRequest, RequestQueue
from kvroute.control.replication.admissions import Admissions
from kvroute.control.replication.replica import Replica, SyncState
from kvroute.control.replication.usage import ChargedUsage
from kvroute.control.settings import CoreSpec
from kvroute.control.spec import ControlSpec
from kvroute.control.view import CountedLoad

__all__ = [
    "Admissions",
    "Backlog",
    "Calibration",
    "CalibrationRow",
    "ChargedUsage",
    "Control",
    "ControlSpec",
    "CoreSpec",
    "CountedLoad",
    "FairQueue",
    "LogHashing",
    "LogHeader",
    "LogRecord",
    "NextCluster",
    "QueuedRequest",
    "Replica",
    "RequestQueue",
    "ShadowTally",
    "SyncState",
    "TermsKept",
    "WaitingRequest",
    "calibration_deciles",
    "decisions_equal",
    "is_log",
    "joined_calibration",
    "replay",
]
