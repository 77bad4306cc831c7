"""Events in, decisions out: the control core that the simulator and the gateway drive alike."""

from kvroute.control.core import Control
from kvroute.control.log import (
    EventLog,
    LogHeader,
    LogRecord,
    TermsKept,
    check_place,
    is_cut,
    is_log,
    read_log,
    replay,
    same,
    set_aside,
)
from kvroute.control.settings import ControlSettings
from kvroute.control.shadow import ShadowTally
from kvroute.control.spec import ControlSpec
from kvroute.control.view import Load

__all__ = [
    "Control",
    "ControlSettings",
    "ControlSpec",
    "EventLog",
    "Load",
    "LogHeader",
    "LogRecord",
    "ShadowTally",
    "TermsKept",
    "check_place",
    "is_cut",
    "is_log",
    "read_log",
    "replay",
    "same",
    "set_aside",
]
