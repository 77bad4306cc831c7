"""What the recordings leave out: requests between cases, bodies, and how answers were cut."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kube.replay import Replay


@dataclass(frozen=True, slots=True)
class Step:
    """A request that was made but not recorded; the method RESTART starts the server anew, on its journal."""

    method: str
    path: str
    body: Any = None
    media: str = "application/json"
    binds: Mapping[str, str] = field(default_factory=dict)
    """Placeholders by the path of the answer that they stand for, such as `uid1` by `metadata.uid`."""
    until: Callable[[Any], bool] | None = None
    """Repeat the request until the answer meets the condition."""
    token: str = ""
    """The name under which recorded requests use the token in the answer."""


Project = Callable[[Any], Any]
Observe = Callable[["Replay"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the recording of a file leaves out."""

    before: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    """Requests before a case."""
    during: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    """Requests while the watch of a case is open."""
    bodies: Mapping[str, bytes] = field(default_factory=dict)
    """Request bodies that JSON can not show, or that were too large."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The same with placeholders."""
    fresh: Mapping[str, str] = field(default_factory=dict)
    """Values of placeholders that only requests have."""
    projections: Mapping[str, Project] = field(default_factory=dict)
    """What the recorder kept of an answer, by case."""
    observations: Mapping[str, Observe] = field(default_factory=dict)
    """How observations that are no single request are made again."""
    substitutes: Mapping[str, str] = field(default_factory=dict)
    """Placeholders for generated texts that the recorder left as they were, by text."""
    webhooks: bool = False
    """Whether the webhook server of the recording runs; it gives `<port>` and `<caBundle>`."""
    without_media: frozenset[str] = frozenset()
    """Cases without a Content-Type header."""
