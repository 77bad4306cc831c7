"""Logs: every line is one event with allowed fields only, and a blocked reader blocks nothing else."""

from __future__ import annotations

import io
import json
import logging
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.observe.logs import LINES_MOST, Logs, access, log_event


class BlockedStream(io.StringIO):
    """A stream whose reader is blocked until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.free = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.free.wait(30)
        return super().write(text)


def _written(style: Any, **options: Any) -> tuple[io.StringIO, Logs]:
    stream = io.StringIO()
    return stream, Logs(style, stream=stream, **options)


def test_a_line_of_each_style() -> None:
    """The same event is written as JSON and as text."""
    for style in ("json", "text"):
        stream, logs = _written(style)
        with logs:
            log_event("warning", "instance_down", instance="decode 3", reason='said "no"', age_s=1.5)
        [line] = stream.getvalue().splitlines()
        if style == "json":
            record = json.loads(line)
            assert record.pop("at").endswith("Z")
            assert record == {
                "level": "warning",
                "event": "instance_down",
                "instance": "decode 3",
                "reason": 'said "no"',
                "age_s": 1.5,
            }
        else:
            assert line.split(" ", 1)[1] == r'warning instance_down instance="decode 3" reason="said \"no\"" age_s=1.5'


@pytest.mark.parametrize("style", ["json", "text"])
def test_urls_are_written_without_their_secrets(style: Any) -> None:
    """In every field, in the text of an error, and in what libraries log."""
    hidden = "http://user:hush@host:9090/a?token=hush&b=hush#part"
    stream, logs = _written(style)
    with logs:
        log_event("warning", "telemetry_failed", url=hidden, reason=f"cannot read {hidden!r}, redis://:hush@[::1]/0")
        log_event("warning", "other", reason="is it so? no://", url="https://host/path")
        logging.getLogger("library").warning("cannot connect to %s", hidden)
    text = stream.getvalue()
    assert "hush" not in text
    assert text.count("http://***@host:9090/a?***#part") == 3
    assert "redis://***@[::1]/0" in text
    assert "is it so? no://" in text
    assert "https://host/path" in text


def test_only_allowed_fields_are_written() -> None:
    """A prompt or a key that is passed by mistake is not written."""
    for style in ("json", "text"):
        stream, logs = _written(style, access=True)
        with logs:
            fields: dict[str, Any] = {"prompt": "S3CRET", "authorization": "S3CRET", "body": "S3CRET"}
            log_event("error", "failed", instance="decode0", **fields)
            access("r1", "/v1/completions", 200, 0.5, **fields)
        assert "S3CRET" not in stream.getvalue()
        assert len(stream.getvalue().splitlines()) == 2


@given(st.text(), st.sampled_from(["json", "text"]))
def test_one_event_is_one_printable_line(value: str, style: Any) -> None:
    """A request ID from a client adds no new line, no control character and no second field."""
    stream, logs = _written(style)
    with logs:
        log_event("info", "request", request_id=value, status=200)
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    if style == "json":
        assert json.loads(text)["request_id"] == value


def test_levels_and_the_access_log() -> None:
    """Events below the level are not written; requests only with the access log; libraries from level warning on."""
    stream, logs = _written("json", level="warning")
    with logs:
        log_event("info", "quiet")
        log_event("error", "loud")
        access("r1", "/v1/completions", 200, 0.5)
        logging.getLogger("some.package").warning("it %s", "speaks")
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["loud", "library"]
    assert events[1]["text"] == "it speaks"
    stream, logs = _written("json", access=True)
    with logs:
        access("r1", "/v1/completions", 200, 0.5, instance="decode0")
    [event] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert event | {"at": ""} == {
        "at": "",
        "level": "info",
        "event": "request",
        "request_id": "r1",
        "endpoint": "/v1/completions",
        "status": 200,
        "seconds": 0.5,
        "instance": "decode0",
    }


def test_closing_restores_the_logging_configuration() -> None:
    """A second Logs does not write lines twice."""
    before = list(logging.getLogger().handlers)
    for _ in range(2):
        stream, logs = _written("text")
        with logs:
            log_event("info", "once")
        assert len(stream.getvalue().splitlines()) == 1
    assert logging.getLogger().handlers == before


def test_a_blocked_reader_of_the_log_blocks_no_writer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines beyond the buffer are dropped and counted; the others are written when the reader continues."""
    stream = BlockedStream()
    monkeypatch.setattr(caplog.handler, "level", logging.CRITICAL)  # otherwise pytest keeps every record
    logs = Logs("json", stream=stream)
    log_event("info", "first")
    assert stream.reached.wait(10)
    for number in range(LINES_MOST + 250):
        log_event("info", "next", count=number)
    assert logs.dropped == 250
    stream.free.set()
    logs.close()
    assert len(stream.getvalue().splitlines()) == 1 + LINES_MOST
