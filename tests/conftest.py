"""Hypothesis without a deadline, for a first call may compile and no test is about time; with CI set, the same examples
each time, so that a change is judged by itself. Everywhere else each run looks for new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("kvroute", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvroute")
