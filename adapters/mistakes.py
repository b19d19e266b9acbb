"""What the user got wrong, found on the engine's side: said in the user's words, with what to correct.

A worker may be a process whose exception the engine swallows, waits for, or passes on as text. So a mistake found there
is also left as a file in the side's directory, where the driver looks while it waits.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path

_FILE = "mistake.json"


class Mistake(ValueError):  # noqa: N818 - it is the user's, and the error tells of it
    """Something the user asked for is wrong, and no log of the engine says more.

    Args:
        message: what is wrong, in one sentence that names the value.
        hint: what to correct.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return self.message


def leave_mistake(directory: Path, mistake: Mistake) -> None:
    """Write it where the driver looks. Several ranks may find the same one; the last is kept, whole."""
    temporary = directory / f"{_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"message": mistake.message, "hint": mistake.hint}), encoding="utf-8")
    os.replace(temporary, directory / _FILE)


def read_mistake(directory: Path) -> Mistake | None:
    """What a worker left; ``None`` if nothing is wrong."""
    try:
        plain = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Mistake(plain["message"], plain["hint"])


def require_options(engine: str, side: str, given: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuse options that the engine does not have, before it is built with them.

    Args:
        given, known: names without ``prefix``.
        prefix: namespace of the names on the command line, such as ``sampling.``.

    Raises:
        Mistake: names the first unknown option and the nearest known one.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            guess = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise Mistake(
                f"{engine} has no option {prefix}{name}{guess}", f"correct --set {side}.{prefix}{name}, or leave it out"
            )
