"""vLLM configurations with the connector's old path still load it, with a warning."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType

import pytest


def test_the_old_path_is_the_same_class_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As far as an environment without vLLM can show it: the connector's module is a stand-in."""
    connector = ModuleType("kvroute_engine.connector.vllm")
    connector.KvrouteConnector = type("KvrouteConnector", (), {})  # type: ignore[attr-defined]
    connector.log = logging.getLogger("kvroute.connector")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvroute_engine.connector.vllm", connector)
    monkeypatch.delitem(sys.modules, "kvroute.connector.vllm", raising=False)
    old = import_module("kvroute.connector.vllm")
    monkeypatch.delitem(sys.modules, "kvroute.connector.vllm")
    assert old.KvrouteConnector is connector.KvrouteConnector
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "write kvroute_engine.connector.vllm" in record.getMessage()
