"""The one error of this package that users see."""

from __future__ import annotations

from align.errors import UserError


class EnvError(UserError):
    """An interpreter could not be found or built. ``hint`` says what to do next; the exit code is 2."""
