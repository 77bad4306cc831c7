"""Hypothesis has no deadline, because a first call may compile and no test measures time. With CI set, the examples are
the same each time, so that a result depends on the change alone. Elsewhere each run draws new examples."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("kvroute", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvroute")
