"""Input errors: the only exceptions shown to a user."""

from __future__ import annotations

import errno
from collections.abc import Sequence


class InputError(ValueError):
    """Invalid input in one sentence: where it is, what is wrong, how to fix it. A command exits with status 2."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__((f"{where}: " if where else "") + what + (f"; {hint}" if hint else ""))


class InputErrors(InputError):
    """Several faults of one file, reported together so that the user can fix all of them; `problems` is in file
    order."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        assert problems
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[InputErrors], tuple[tuple[InputError, ...]]]:
        return type(self), (self.problems,)


def cannot_listen(place: str, number: int | None, why: str, *, where: str = "") -> InputError:
    """Return the error for a listening address that the system rejects, with the system's error number and message."""
    hints = {errno.EADDRINUSE: "choose another port, or free this one", errno.EACCES: "choose a port above 1023"}
    hint = hints.get(number or 0, "give an address of this machine")
    return InputError(f"cannot listen on {place} ({why})", where=where, hint=hint)
