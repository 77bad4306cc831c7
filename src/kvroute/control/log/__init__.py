"""Files of event logs, which the simulator and the gateway write and `replay` and `explain` read."""

from kvroute.control.log.files import bytes_beside, check_can_create, remove_oldest, rotate
from kvroute.control.log.reader import check_whole, is_truncated, parts_of, read_log
from kvroute.control.log.writer import EventLog

__all__ = [
    "EventLog",
    "bytes_beside",
    "check_can_create",
    "check_whole",
    "is_truncated",
    "parts_of",
    "read_log",
    "remove_oldest",
    "rotate",
]
