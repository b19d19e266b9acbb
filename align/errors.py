"""Errors that a user can act on.

Every message ends with what to do next, so the command prints it without a traceback (``--debug`` shows one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Exit codes of the command (design: 0 aligned, 1 diverged, 2 could not compare).
EXIT_ALIGNED = 0
EXIT_DIVERGED = 1
EXIT_NOT_COMPARABLE = 2


class UserError(Exception):
    """Something outside the program must change before the command can succeed.

    Args:
        message: what is wrong, in one sentence that names the value.
        hint: what to do next, ideally a command.
        told: ``message`` as a sentence of :mod:`align.sentences`, for reports in other languages.
    """

    exit_code = EXIT_NOT_COMPARABLE

    def __init__(self, message: str, hint: str, told: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.told = None if told is None else dict(told)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n→ {self.hint}"


class SideError(UserError):
    """One engine failed: it could not be launched, hung or died. ``log_tail`` holds its last log lines."""

    def __init__(
        self,
        side: str,
        message: str,
        hint: str,
        log_tail: tuple[str, ...] = (),
        told: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint, told)
        self.side = side
        self.log_tail = log_tail
