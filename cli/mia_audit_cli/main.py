"""The entry point: one Typer application of the commands of the other files."""

from __future__ import annotations

import gc
import importlib.metadata
import signal
from typing import Annotated

import typer

from mia_audit_cli import auditing, pools, studying, training
from mia_audit_cli.exits import interrupt, leave


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
    """Run the command line; SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, interrupt)
    # A million objects come with torch and stay: looking among them for garbage takes a tenth of the way in.
    gc.set_threshold(100_000)
    try:
        app()
    except SystemExit as ended:
        leave(ended.code)
