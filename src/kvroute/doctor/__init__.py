"""Checks of engines and of the KV transfers between them, before a gateway serves a cluster. No gateway is needed."""

from kvroute.doctor.examination import Options, examine
from kvroute.doctor.report import EngineReport, Finding, PairReport, Report

__all__ = ["EngineReport", "Finding", "Options", "PairReport", "Report", "examine"]
