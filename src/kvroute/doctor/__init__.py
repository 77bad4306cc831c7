"""Checks of engines and of the KV transfers between them, before a gateway serves a cluster. No gateway is needed."""

from kvroute.doctor.examination import ExaminationSpec, examine
from kvroute.doctor.report import DoctorFinding, EngineReport, ExaminationReport, PairReport

__all__ = ["DoctorFinding", "EngineReport", "ExaminationReport", "ExaminationSpec", "PairReport", "examine"]
