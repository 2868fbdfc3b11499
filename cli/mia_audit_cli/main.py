"""The entry point: one Typer application of the commands of the other files."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import sys
from typing import Annotated

import typer

from mia_audit_cli import auditing, pools, studying, training
from mia_audit_cli.exits import SIGNALS, interrupt, leave, leave_interrupted, say_unwritable


def _print_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("mia-audit"))
        raise typer.Exit


app = typer.Typer(
    name="mia-audit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Does this checkpoint leak who was in its training data, how much, about whom, "
    "and how much of it is BatchNorm's doing?",
    epilog="Start with: mia-audit demo",
)
training.register(app)
auditing.register(app)
studying.register(app)
pools.register(app)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What stands before a command."""


def main() -> None:
    """Run the command line; SIGTERM and a closed terminal end it as Ctrl-C does."""
    _open_standard_streams()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's background jobs, ignore some
            signal.signal(number, interrupt)
    # A million objects come with torch and stay: looking among them for garbage takes a tenth of the way in.
    gc.set_threshold(100_000)
    try:
        app()
    except SystemExit as ended:
        leave(ended.code)
    except KeyboardInterrupt:
        leave_interrupted()
    except OSError as error:  # of what is written outside a command: its help, the version
        leave(say_unwritable(error))


def _open_standard_streams() -> None:
    """Streams that were closed by whoever started this lead nowhere; files opened later would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
