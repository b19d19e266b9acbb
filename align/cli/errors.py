"""From whatever a command raises to a message, what to run next, and an exit code."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from align.errors import EXIT_NOT_COMPARABLE, SideError, UserError


def guarded(work: Callable[[], int], debug: bool) -> int:
    """Run ``work``; errors become a message and an exit code that no verdict has."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return int(work())
    except UserError as error:
        if debug:
            traceback.print_exc()
        say_error(error)
        return error.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        what = f"this is a defect of align: {type(error).__name__}: {error}"
        hint = "report it with the traceback above" if debug else "run it again with --debug and report what it prints"
        say_error(UserError(what, hint))
        return EXIT_NOT_COMPARABLE


def _terminated(number: int, frame: Any) -> NoReturn:
    """``kill`` ends the command through its clean-up, as Ctrl-C does."""
    raise SystemExit(128 + number)


def say_error(error: UserError) -> None:
    """The error and what to do next, on standard error."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    if isinstance(error, SideError) and error.log_tail:
        console.print(f"[dim]last lines of the {error.side}'s log:[/dim]")
        for line in error.log_tail:
            console.print(f"[dim]  {escape(line)}[/dim]")
    console.print(f"[bold red]error:[/bold red] {escape(error.message)}")
    console.print(f"[bold]next:[/bold] {escape(error.hint)}")
