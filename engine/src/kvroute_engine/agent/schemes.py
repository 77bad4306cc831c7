"""All-reduce schemes by name; `kvroute.collectives.schemes` defines their flows."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Scheme: TypeAlias = Literal["ring", "multi-rail-ring", "hierarchical-ring", "ina", "hierarchical-ina"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
