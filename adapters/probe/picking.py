"""What a tap picks of a call: its result, a part of it, an argument; :mod:`adapters.probe.taps` has the words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def _chosen(choice: str, parameters: Sequence[str]) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    head, *rest = choice.split(".")
    if head == "out":
        if rest and not rest[0].isdigit():
            return lambda args, kwargs, result: functools.reduce(lambda at, name: getattr(at, name, None), rest, result)
        index = int(rest[0]) if rest else None

        def from_result(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
            if index is None:
                return None if isinstance(result, tuple) else result
            return result[index] if isinstance(result, tuple) and len(result) > index else None

        return from_result
    name, attributes = rest[0], rest[1:]
    place = parameters.index(name) if name in parameters else None

    def from_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        value = kwargs.get(name) if name in kwargs else args[place] if place is not None and place < len(args) else None
        for attribute in attributes:
            value = getattr(value, attribute, None)
        return value

    return from_arguments


def picker(pick: str, parameters: Sequence[str]) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    """A function of ``(args, kwargs, result)``; it raises ``LookupError`` when nothing that was asked for is there."""
    choices = [[_chosen(one, parameters) for one in choice.split("+")] for choice in pick.split("|")]

    def picked(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        for choice in choices:
            values = tuple(one(args, kwargs, result) for one in choice)
            if not any(value is None for value in values):
                return values[0] if len(values) == 1 else values
        raise LookupError(f"the call has no {pick}")

    return picked
