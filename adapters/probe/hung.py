"""Wrappers around attributes of live objects, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hung:
    """What was hung up, in order; :meth:`remove` takes it off in the reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, target: Any, name: str, wrapped: Any) -> None:
        """Set ``target.name``; an attribute that the object had of its class alone is deleted again."""
        had, before = name in vars(target), vars(target).get(name)
        setattr(target, name, wrapped)
        self._undo.append((lambda: setattr(target, name, before)) if had else (lambda: delattr(target, name)))

    def remove(self) -> None:
        """Take everything off again."""
        while self._undo:
            self._undo.pop()()
