"""`kvroute timing fit`: fits the files of a command line, profiles of steps or reports of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvroute.cli.output import tell
from kvroute.cli.timing.text import Limits, limits_of
from kvroute.measurements import (
    BenchmarkRun,
    ReportedRuns,
    fit_runs,
    is_inferencex,
    is_report,
    read_inferencex,
    read_report,
)
from kvroute.timing import Fit, Profile, fit_profile, read_profile
from kvroute.timing.fit import PrefillKind
from kvroute.types import DecodeSpec, InputError, PrefillSpec

_HEAD = 65_536
"""Characters at the start of a file that tell what it is."""


@dataclass(frozen=True, slots=True)
class FileSelection:
    """What to use of a file with several configurations; None: the file has one."""

    model: str | None
    hardware: str | None
    tp: int | None
    where: tuple[str, ...]
    """COLUMN=VALUE, for rows of InferenceX."""

    @property
    def columns(self) -> dict[str, str]:
        """The chosen values of InferenceX's columns."""
        options = {"model": self.model, "hardware": self.hardware, "decode_tp": self.tp}
        return {name: str(value) for name, value in options.items() if value is not None} | dict(map(_pair, self.where))

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given."""
        options = {"--model": self.model, "--hardware": self.hardware, "--tp": self.tp, "--where": self.where or None}
        return tuple(name for name, value in options.items() if value is not None)


def fit_files(
    files: Sequence[Path], selection: FileSelection, kind: PrefillKind
) -> tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None, Limits]:
    """Fit profiles, each to a part of a timing, or the runs of all reports together; return fits and range.

    Raises:
        InputError: both kinds of files are given, or see the readers and fits.
    """
    runs: list[BenchmarkRun] = []
    profiles: list[Profile] = []
    for file in files:
        reported = _reported(file, selection)
        if reported is not None:
            tell([f"{file}: {remark}" for remark in reported.remarks])
            runs += reported.runs
            continue
        profile = read_profile(file, model=selection.model, hardware=selection.hardware, tp=selection.tp)
        tell(profile.remarks)
        profiles.append(profile)
    if runs and profiles:
        raise InputError("reports and profiles are given", where=str(files[0]), hint="fit them one after the other")
    if not runs:
        return _fit_profiles(profiles, kind)
    try:
        fitted = fit_runs(runs, kind)
    except InputError as error:
        where = ", ".join(map(str, files))
        raise InputError(error.what, where=where, hint=error.hint.replace("measure", "give runs with")) from None
    return fitted.prefill, fitted.decode, fitted.limits


def _reported(file: Path, selection: FileSelection) -> ReportedRuns | None:
    """Return the runs of a report; None: the file is something else, or cannot be read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if is_inferencex(text[:_HEAD]):
        return read_inferencex(file, text, selection.columns)
    if is_report(text[:_HEAD]):
        if selection.given:
            hint = f"remove {', '.join(selection.given)}"
            raise InputError("is a report of one engine", where=str(file), hint=hint)
        return read_report(file, text)
    if selection.where:
        raise InputError("has no rows of InferenceX", where=str(file), hint="remove --where")
    return None


def _pair(text: str) -> tuple[str, str]:
    column, sign, value = text.partition("=")
    if not sign or not column:
        raise InputError(f"{text!r} is not COLUMN=VALUE", where="--where", hint="write e.g. precision=fp8")
    return column.strip(), value.strip()


def _fit_profiles(
    profiles: Sequence[Profile], kind: PrefillKind
) -> tuple[Fit[PrefillSpec] | None, Fit[DecodeSpec] | None, Limits]:
    prefill: Fit[PrefillSpec] | None = None
    decode: Fit[DecodeSpec] | None = None
    limits: Limits = {}
    for profile in profiles:
        fits = fit_profile(profile, kind)
        for part, before, now in (("prefill", prefill, fits[0]), ("decode", decode, fits[1])):
            if before is not None and now is not None:
                what = f"measures {part} a second time"
                raise InputError(what, where=profile.where, hint="give one file for each part")
        prefill, decode = prefill or fits[0], decode or fits[1]
        limits |= limits_of(profile)
    return prefill, decode, limits
