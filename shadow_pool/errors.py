"""The one exception for what a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend; the message says what was expected, what was found and what to do.

    The command line prints it as one line and exits with status 1.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a fixed list, with the nearest known one named first."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")


def one_line(error: BaseException) -> str:
    """An exception's text on one line, or the name of its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def few(names: Iterable[str], count: int = 3) -> str:
    """The first names, joined, and dots for the rest."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
