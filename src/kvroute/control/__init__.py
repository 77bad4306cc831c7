"""The control core, which turns events into decisions; the simulator and the gateway call the same core."""

from kvroute.control.core import Control
from kvroute.control.log import (
    EventLog,
    LogHeader,
    LogRecord,
    TermsKept,
    check_whole,
    decisions_equal,
    is_truncated,
    parts_of,
    read_log,
    replay,
)
from kvroute.control.log_files import bytes_beside, check_can_create, is_log, remove_oldest, rotate
from kvroute.control.log_hashing import LogHashing
from kvroute.control.settings import ControlSettings
from kvroute.control.shadow_policy import ShadowTally
from kvroute.control.spec import ControlSpec
from kvroute.control.view import Load

__all__ = [
    "Control",
    "ControlSettings",
    "ControlSpec",
    "EventLog",
    "Load",
    "LogHashing",
    "LogHeader",
    "LogRecord",
    "ShadowTally",
    "TermsKept",
    "bytes_beside",
    "check_can_create",
    "check_whole",
    "decisions_equal",
    "is_log",
    "is_truncated",
    "parts_of",
    "read_log",
    "remove_oldest",
    "replay",
    "rotate",
]
