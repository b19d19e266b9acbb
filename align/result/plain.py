"""From values as they are to values that JSON has."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Mappings, lists, strings, finite numbers, booleans and ``None``; other numbers become ``inf``, ``-inf``,
    ``nan``, and whatever else its text.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | bool | int) else str(value)


def without_directory(value: Any, directory: Path | None) -> Any:
    """The same, with ``RUN`` for the run's directory wherever a text names it."""
    if directory is None:
        return value
    if isinstance(value, dict):
        return {key: without_directory(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [without_directory(item, directory) for item in value]
    return value.replace(str(directory), "RUN") if isinstance(value, str) else value
