"""The error a user caused and can mend, and the search for the nearest valid name. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Wrong input, told as what is wrong, what was given, what is allowed and how to mend it.

    `str()` of it is a few readable lines; the launchers print them without a traceback and exit with code 2.
    `given` is shown with `repr`; `allowed` may be a sentence or the names to choose from.
    """

    def __init__(
        self,
        what: str,
        *,
        given: Any = None,
        allowed: str | Iterable[str] | None = None,
        fix: str | None = None,
    ):
        self.what, self.given, self.fix = what, given, fix
        self.allowed = (
            allowed if allowed is None or isinstance(allowed, str) else ", ".join(map(str, allowed))
        )
        lines = [what]
        lines += [f"  given:   {given!r}"] if given is not None else []
        lines += [f"  allowed: {self.allowed}"] if self.allowed else []
        lines += [f"  fix:     {fix}"] if fix else []
        super().__init__("\n".join(lines))

    def __reduce__(self):
        # Rebuilt from its parts, so that it crosses process borders with its message intact.
        return _rebuild, (type(self), self.what, self.given, self.allowed, self.fix)


def _rebuild(cls: type[UserError], what: str, given: Any, allowed: str | None, fix: str | None) -> UserError:
    error = cls.__new__(cls)
    UserError.__init__(error, what, given=given, allowed=allowed, fix=fix)
    return error


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The at most `n` names closest to `name`, best first; case is ignored and none need be close.

    Names that contain `name` (or are contained in it) come before the merely similar ones.
    """
    wanted = name.lower()

    def distance(candidate: str) -> tuple[bool, float, str]:
        low = candidate.lower()
        contained = bool(wanted) and (wanted in low or low in wanted)
        return (not contained, -difflib.SequenceMatcher(None, wanted, low).ratio(), candidate)

    return sorted(set(names), key=distance)[:n]
