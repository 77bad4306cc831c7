"""Hypothesis without a deadline: a first call may compile, and no test is about time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvroute", deadline=None)
settings.load_profile("kvroute")
