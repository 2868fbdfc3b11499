"""The entry point: one Typer application, and the one place where errors become a line and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import click
import typer

from mia_audit_cli import auditing, pools, studying, training
from shadow_pool.errors import UserError

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


def main() -> NoReturn:
    """Run the command line. Exit status: 0; 1 the user can mend it; 2 usage; 3 --fail-above; 130 interrupted."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        # Workers are daemons of nobody: leave without waiting for them.
        print("interrupted: what was finished is kept; run the same command again to go on", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)
    except BrokenPipeError:
        os._exit(0)
    except (OSError, MemoryError) as error:
        _fail(f"{_what(error)}; free space or memory, or mend permissions, then run the same command again", 1)
    except Exception as error:
        if os.environ.get("MIA_AUDIT_DEBUG"):
            raise
        _fail(f"unexpected {_what(error)}; set MIA_AUDIT_DEBUG=1 for the traceback and report it", 1)
    sys.exit(status if isinstance(status, int) else 0)


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _fail(message: str, status: int) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


def _terminate(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt
