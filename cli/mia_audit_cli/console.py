"""What the terminal sees: notes and progress on standard error, tables of results on standard output."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shadow_pool.train.schedule import Progress

LOG_EVERY = 10.0
"""Seconds between two lines of progress where standard error is no terminal."""


def stdout() -> Console:
    """Standard output; 80 columns where it is no terminal. NO_COLOR is respected by rich."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # as print does, not an exit of rich's own

    return Output(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 80)


def note(text: str, *, quiet: bool = False) -> None:
    """One line on standard error."""
    if not quiet:
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Text on one line without control characters: a stranger's names may hold what drives a terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def warn(texts: Iterable[str], *, quiet: bool = False) -> None:
    """Warnings, one line each, on standard error."""
    for text in texts:
        note(f"warning: {text}", quiet=quiet)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A plain table, its title (where not empty) after a free line.

    The first column is text, which may wrap; the others are numbers and short words, aligned right.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    heading = f"\n{title}" if title else None
    result = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, padding=(0, 1, 0, 0))
    for position, column in enumerate(columns):
        result.add_column(column, justify="right" if position else "left", no_wrap=position > 0, overflow="fold")
    for row in rows:
        result.add_row(*(escape(printable(cell)) for cell in row))
    return result


def prose(text: str) -> None:
    """A paragraph on standard output, after a free line, within the console's width."""
    from mia_audit.report.words import unbroken

    lines = textwrap.fill(unbroken(printable(text)), stdout().width, break_on_hyphens=False)
    print("\n" + lines.replace("\u00a0", " "))


def clock(seconds: float) -> str:
    """65 -> 1:05"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TrainingProgress:
    """Shows models done, rate, elapsed and remaining time; called with each unit's end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._last = time.monotonic()
        self._start()

    def _start(self) -> None:
        """At the beginning of a pool: a study trains several."""
        self._started, self._images = time.monotonic(), 0

    def __call__(self, progress: Progress) -> None:
        receipt, now = progress.receipt, time.monotonic()
        self._images += receipt.images
        name = f"{receipt.unit.arm}/{receipt.unit.index:04d}"
        if receipt.outcome in _OUTCOMES and not self._quiet:
            detail = f": {receipt.message}" if receipt.message else ""
            self._line(f"warning: model {name} {_OUTCOMES[receipt.outcome]}{detail}")
        last = progress.done == progress.total
        if self._quiet or not (self._terminal or last or now - self._last >= LOG_EVERY):
            return
        self._last = now
        elapsed = now - self._started
        left = elapsed / progress.done * (progress.total - progress.done)
        text = (
            f"trained {progress.done}/{progress.total} models, {self._images / max(elapsed, 1e-9):,.0f} images/s, "
            f"{clock(elapsed)} elapsed, {clock(left)} left"
        )
        if self._terminal:
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            note(text)
        if last:
            self._start()

    def _line(self, text: str) -> None:
        print(("\r\x1b[K" if self._terminal else "") + text, file=sys.stderr, flush=True)


_OUTCOMES = {
    "failed": "failed",
    "diverged": "diverged (its loss is not finite); it is left out of audits with its pair",
    "chance": "is no better than naming the largest class; it is left out of audits with its pair",
}


@contextmanager
def step(text: str, *, quiet: bool) -> Iterator[None]:
    """Say what is being done and, at its end, how long it took."""
    started = time.monotonic()
    note(f"{text} ...", quiet=quiet)
    yield
    elapsed = time.monotonic() - started
    if elapsed > 2:
        note(f"  done in {clock(elapsed)}", quiet=quiet)
