"""Figures of runs and sweeps as matplotlib Figures, without pyplot and without writing files."""

from kvroute.report.figures.runs import link_utilisation, thin, threshold_over_time, tier_split, ttft_breakdown
from kvroute.report.figures.sweeps import ablation_bars, heat_map, load_sweep, sweep_lines

__all__ = [
    "ablation_bars",
    "heat_map",
    "link_utilisation",
    "load_sweep",
    "sweep_lines",
    "thin",
    "threshold_over_time",
    "tier_split",
    "ttft_breakdown",
]
