"""`dualpath-*` for the terminal: its own tables and pages, and recorded sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvroute.cli.output import console, remarks
from kvroute.report.grid import rich_table
from kvroute.types import InputError
from kvroute_studies.dualpath.run import AGENTS, EXPERIMENTS, agents_of, run_cell, sessions_config
from kvroute_studies.shared.cells import Experiment
from kvroute_studies.shared.family import ExperimentFamily, Results, Sweeps, write_each
from kvroute_studies.shared.sweeps import RunOptions


def _prepare(chosen: Sequence[Experiment], options: RunOptions) -> Sweeps:
    """Select the cells; without a file of sessions, the whole group runs without `dualpath-agents`."""
    if options.reading != "paper" or options.changes:
        raise InputError("dualpath does not support --reading and --set", where="dualpath", hint="omit these options")
    if options.trace:
        if [experiment.name for experiment in chosen] != [AGENTS.name]:
            what = f"only {AGENTS.name} reads a trace"
            raise InputError(what, where="--trace", hint=f"run `kvroute experiment {AGENTS.name} --trace FILE`")
        agents_of(str(options.trace))
    elif list(chosen) == [AGENTS]:
        what = f"{AGENTS.name} needs recorded sessions of agents"
        raise InputError(what, where="--trace", hint="give a file, see docs/workloads.md")
    elif AGENTS in chosen:
        remarks().print(f"{AGENTS.name} is left out: it needs recorded sessions (--trace FILE).")
        chosen = [experiment for experiment in chosen if experiment != AGENTS]
    return Sweeps.of(chosen, options, options.reading)


def _config(sessions: str) -> Mapping[str, Any]:
    """Return what the records of a results folder have in common."""
    return sessions_config(sessions) if sessions else {}


def _write_pages(results: Results[str]) -> None:
    from kvroute_studies.dualpath.tables import write_dualpath  # its import of plots takes a second

    write_each(
        results.sweeps,
        "DualPath",
        lambda experiment, folder: write_dualpath(experiment, results.records[experiment.name], folder),
    )


def _print_tables(results: Results[str]) -> None:
    from kvroute_studies.dualpath.tables import dualpath_grid

    for experiment in results.sweeps.experiments:
        console().print(rich_table(dualpath_grid(experiment, results.records[experiment.name]), console().width))


FAMILY = ExperimentFamily(
    EXPERIMENTS,
    prepare=_prepare,
    begin=lambda sweeps: str(sweeps.options.trace or ""),
    run_cell=lambda sessions: partial(run_cell, sessions),
    config=_config,
    write_pages=_write_pages,
    print_tables=_print_tables,
)
