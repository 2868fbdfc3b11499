"""The one exception for what a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST, _MOST = 60, 200
"""Names in messages may be a stranger's: they are cut to this many characters, and lists to this many names."""


class UserError(ValueError):
    """Something the user can mend; the message says what was expected, what was found and what to do.

    The command line prints it and exits with status 1. It is one line of at most 2,000 characters, whatever names of
    a stranger it quotes: more is cut out of its middle.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.splitlines())
        super().__init__(line if len(line) <= 2000 else f"{line[:1200]} ... {line[-700:]}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a fixed list, with the nearest known one named first."""
    names = sorted(text[:_LONGEST] for text in known)
    near = difflib.get_close_matches(name[:_LONGEST], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name[:_LONGEST]!r}: {hint}known: {few(names, _MOST) or 'none'}")


def one_line(error: BaseException) -> str:
    """An exception's text on one line of bearable length, or the name of its type where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."


def few(names: Iterable[str], count: int = 3) -> str:
    """The first names, joined, and dots for the rest, as for the end of long ones."""
    names = list(names)
    shown = (name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:count])
    return ", ".join(shown) + (", ..." if len(names) > count else "")
