"""Structured logs, one line per event as JSON or text, written by a thread of its own.

Only the fields named here are written, so no key, prompt or response can leak. If the reader of the stream blocks,
lines are dropped and counted; the gateway never waits.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from threading import Thread
from types import TracebackType
from typing import Any, Literal, TextIO

from kvroute_engine.origins import without_url_secrets

FIELDS = frozenset(
    {
        *("request_id", "trace_id", "endpoint", "status", "seconds", "ttft_s", "client", "key_name", "model"),
        *("instance", "source", "target", "leg", "kind", "reason", "attempt", "tier", "kv_bytes", "input_tokens"),
        *(
            "policy",
            "parameters",
            "cluster",
            "instances",
            "file",
            "url",
            "address",
            "count",
            "age_s",
            "version",
            "signal",
            "dropped",
        ),
        *(
            "number",
            "field",
            "site",
            "role",
            "verdict",
            "binding",
            "gain",
            "rate_per_s",
            "lambda_max_per_s",
            "available",
            "failed",
            "expired",
        ),
    }
)
"""Names of the fields that may be logged. A new field must contain neither user text nor a secret."""
LINES_MOST = 10_000
CLOSE_S = 5.0
"""Longest time by which a blocked reader delays the end of the process."""
_LOGGER = logging.getLogger("kvroute")
_ACCESS = logging.getLogger("kvroute.access")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Level = Literal["debug", "info", "warning", "error"]
Value = str | int | float | bool | None


def log_event(level: Level, event: str, **fields: Value) -> None:
    """Log one event, e.g. log_event("warning", "instance_down", instance="decode3"); fields are those of FIELDS. URLs
    in them lose user, password and query."""
    number = _LEVELS[level]
    if _LOGGER.isEnabledFor(number):
        shown = {
            name: without_url_secrets(value) if isinstance(value, str) else value for name, value in fields.items()
        }
        _LOGGER.log(number, event, extra={"fields": shown})


def access_on() -> bool:
    """Whether the access log is on."""
    return _ACCESS.isEnabledFor(logging.INFO)


def log_accept_paused(reason: str, seconds: float) -> None:
    """Log that a port accepts no connection for so many seconds, because the system has no resources for one."""
    log_event("error", "accept_paused", reason=reason, seconds=seconds)


def access(request_id: str, endpoint: str, status: int, seconds: float, **fields: Value) -> None:
    """Log one line for a finished request, if the access log is on."""
    if _ACCESS.isEnabledFor(logging.INFO):
        first: dict[str, Value] = {"request_id": request_id, "endpoint": endpoint, "status": status}
        _ACCESS.info("request", extra={"fields": {**first, "seconds": round(seconds, 6), **fields}})


class Logs:
    """Logging for the whole process while it is open; libraries log warnings and errors."""

    def __init__(
        self,
        style: Literal["json", "text"] = "text",
        level: Level = "info",
        *,
        access: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """Start to log to `stream`, which defaults to standard error."""
        self._handler = logging.StreamHandler(stream or sys.stderr)
        queue: Queue[Any] = Queue(LINES_MOST)
        self._server = _Dropping(queue)
        self._listener = _Patient(queue, self._handler)
        self._listener.start()
        self._before = (_LOGGER.level, _ACCESS.level)
        logging.getLogger().addHandler(self._server)
        self.change(style, level, access=access)

    def change(self, style: Literal["json", "text"], level: Level, *, access: bool) -> None:
        """Change style and level from now on."""
        self._handler.setFormatter(_Json() if style == "json" else _Text())
        _LOGGER.setLevel(_LEVELS[level])
        _ACCESS.setLevel(logging.INFO if access else logging.WARNING)

    @property
    def dropped(self) -> int:
        """Lines dropped because the reader of the stream blocked."""
        return self._server.dropped

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most, and restore the previous logging settings."""
        logging.getLogger().removeHandler(self._server)
        self._server.close()
        stopping = Thread(target=self._listener.stop, daemon=True)
        stopping.start()
        stopping.join(CLOSE_S)
        for logger, level in zip((_LOGGER, _ACCESS), self._before, strict=True):
            logger.setLevel(level)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Patient(QueueListener):
    queue: Queue[Any]

    def enqueue_sentinel(self) -> None:
        self.queue.put(None)  # waits while the queue is full: the end marker follows the queued lines


class _Dropping(QueueHandler):
    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1


def _parts(record: logging.LogRecord) -> dict[str, Value]:
    """Return the fields in the caller's order, only those of FIELDS; the text of a library is one field."""
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, Value] = {"at": at, "level": record.levelname.lower()}
    if record.name == "kvroute" or record.name.startswith("kvroute."):
        line["event"] = record.message if hasattr(record, "message") else record.getMessage()
    else:
        line |= {"event": "library", "logger": record.name, "text": without_url_secrets(record.getMessage())}
    fields = getattr(record, "fields", {})
    return line | {name: value for name, value in fields.items() if name in FIELDS}


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_parts(record))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = _parts(record)
        start = f"{line.pop('at')} {line.pop('level')} {_printable(line.pop('event'))}"
        return " ".join((start, *(f"{name}={_printable(value)}" for name, value in line.items())))


def _printable(value: Value) -> str:
    """Quote a value if needed: no control character reaches a terminal, and no value looks like another field."""
    if isinstance(value, str) and not (value.isprintable() and value and not set(value) & set(' ="')):
        return json.dumps(value)
    return str(value)
