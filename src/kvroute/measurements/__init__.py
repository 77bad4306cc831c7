"""Timings of engines from what other tools have measured: reports of benchmarks, aiconfigurator's operators."""

from kvroute.measurements.benchmark_runs import BenchmarkFit, BenchmarkRun, fit_runs
from kvroute.measurements.inferencex import is_inferencex, read_inferencex
from kvroute.measurements.reports import ReportedRuns, is_report, read_report

__all__ = [
    "BenchmarkFit",
    "BenchmarkRun",
    "ReportedRuns",
    "fit_runs",
    "is_inferencex",
    "is_report",
    "read_inferencex",
    "read_report",
]
