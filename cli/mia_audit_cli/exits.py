"""The one place where what went wrong becomes a line on standard error and an exit status."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import typer

from mia_audit_cli.console import note
from shadow_pool.errors import UserError
from shadow_pool.memory import keep_freed_memory

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a command: Ctrl-C, kill, a terminal that is closed."""


def guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """A command whose errors are one line each, and whose returned number is the exit status.

    Exit status: 0; 1 the user can mend it; 3 what the command returns; 130 interrupted. Usage errors, 2, are Typer's.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        keep_freed_memory()
        try:
            status = command(*args, **kwargs)
        except UserError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            leave_interrupted()
        except BrokenPipeError:
            leave(0)
        except (OSError, MemoryError) as error:
            _fail(f"{_named(error)}; free space or memory, or mend permissions, then run the same command again")
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            if os.environ.get("MIA_AUDIT_DEBUG"):
                raise
            _fail(f"unexpected {_named(error)}; set MIA_AUDIT_DEBUG=1 for the traceback and report it")
        raise typer.Exit(status or 0)

    return run


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal that ends the command.

    While something is imported, at once: libraries catch whatever their imports raise, KeyboardInterrupt too, and go
    on with half a module.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            leave_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def leave(status: object) -> NoReturn:
    """End the process, and workers that wait for more, without taking torch apart, which takes most of a second."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    workers = sys.modules.get("shadow_pool.train.workers")
    if workers is not None:
        workers.kill_workers()
    atexit._run_exitfuncs()
    code = status if isinstance(status, int) else int(status is not None)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        code = say_unwritable(error)
    os._exit(code)


def leave_interrupted() -> NoReturn:
    """End the process at once, without waiting for worker processes, which die with this one."""
    with suppress(OSError):  # the terminal may be gone
        note("interrupted: what was finished is kept; run the same command again to go on")
    os._exit(130)


def say_unwritable(error: OSError) -> int:
    """Standard output is full, say: one line, and the exit status."""
    note(f"error: standard output: {_named(error)}")
    return 1


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _fail(message: str) -> NoReturn:
    note("error: " + " ".join(message.split()))
    raise typer.Exit(1)
