"""From whatever a command raises to a message, what to run next, and an exit code."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from align.cli.output import print_error
from align.errors import EXIT_NOT_COMPARABLE, SideError, UserError

#: What typer answers for Ctrl-C.
EXIT_INTERRUPTED = 130
#: Whoever read standard output left, as in ``align explain | head -1``: what a shell says of SIGPIPE.
EXIT_UNREAD = 128 + signal.SIGPIPE
#: Rich ends the process with it when standard output is closed; here it would mean diverged.
_RICH_UNREAD = 1
_NEXT = "next: "


def guarded(work: Callable[[], int], debug: bool, json: bool = False) -> int:
    """Run ``work``; errors become a message and an exit code that no verdict has.

    Args:
        json: print them on standard output too, as an object. Not for commands that answer with a result, which says
            itself why there is no verdict.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = int(work())
        sys.stdout.flush()
        return code
    except UserError as error:
        failure, code = error, error.exit_code
        if debug:
            traceback.print_exc()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread(sys.stdout):
            return EXIT_UNREAD
        if debug:
            traceback.print_exc()
        what = f"this is a defect of align: {type(error).__name__}: {error}"
        hint = "report it with the traceback above" if debug else "run it again with --debug and report what it prints"
        failure, code = UserError(what, hint), EXIT_NOT_COMPARABLE
    except BaseException as error:  # Ctrl-C and kill
        if isinstance(error, SystemExit) and error.code == _RICH_UNREAD:
            return EXIT_UNREAD
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else EXIT_INTERRUPTED
        say_stopped(error)
        if json:
            print_error(UserError(*reason_of(error)), code)
        raise SystemExit(code) from error
    say_error(failure)
    if json:
        print_error(failure, code)
    return code


def _unread(stream: TextIO) -> bool:
    """Whether nobody reads a stream any more; then what is left of it goes nowhere, without a complaint."""
    try:
        number = stream.fileno()
    except OSError:  # no file
        return False
    watched = select.poll()
    watched.register(number, 0)
    if not watched.poll(0):  # errors alone are reported
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return True


def reason_of(error: BaseException) -> tuple[str, str]:
    """What ended a command, and what to do next, as a result says it."""
    if isinstance(error, UserError):
        return error.message, error.hint
    if isinstance(error, Exception):
        return f"a defect of align: {type(error).__name__}: {error}", "run it again"
    return "interrupted", "run it again"


def note_next(error: BaseException, hint: str) -> None:
    """Keep with an interruption what to run next; whoever says that it happened says this too."""
    error.add_note(f"{_NEXT}{hint}")


def say_stopped(error: BaseException | None = None) -> None:
    """That the command was stopped from outside, and what to do next, on standard error."""
    how = "terminated" if isinstance(error, SystemExit) else "interrupted"
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NEXT)]
    sys.stderr.write(f"{how}; everything that was started has been ended\n")
    sys.stderr.write(f"{notes[0] if notes else _NEXT + 'run the same command again'}\n")


def _terminated(number: int, frame: Any) -> NoReturn:
    """``kill`` ends the command through its clean-up, as Ctrl-C does."""
    raise SystemExit(128 + number)


def say_error(error: UserError) -> None:
    """The error and what to do next, on standard error; if nobody reads that, the exit code is still the error's."""
    try:
        _print_error(error)
        sys.stderr.flush()
    except (BrokenPipeError, SystemExit):  # Rich ends the process when nobody reads
        _unread(sys.stderr)


def _print_error(error: UserError) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    if isinstance(error, SideError) and error.log_tail:
        console.print(f"[dim]last lines of the {error.side}'s log:[/dim]")
        for line in error.log_tail:
            console.print(f"[dim]  {escape(line)}[/dim]")
    console.print(f"[bold red]error:[/bold red] {escape(error.message)}")
    console.print(f"[bold]next:[/bold] {escape(error.hint)}")
