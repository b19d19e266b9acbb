"""For every rule a call of which it says something, and one of which it does not: ``examples.<family>.toml``.

An example names a base (``examples.bases.toml``) and what it changes: ``fails`` and ``passes`` hold arguments by name,
``-`` for one that is left out, and ``context.NAME``. Read where Python has ``tomllib`` (3.11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from align.fa.call import Call, Context, Value
from align.fa.operators import operators
from align.fa.rules import FAMILIES
from align.fa.text import parse_tensor


@dataclass(frozen=True)
class Example:
    """Two calls of one rule; ``change`` is what makes the difference, for readers."""

    rule: str
    fails: Call
    passes: Call
    change: str


@cache
def bases() -> Mapping[str, Call]:
    """The right calls by name."""
    return {name: _call(base, {}) for name, base in _read("bases").items()}


@cache
def examples() -> Mapping[str, Example]:
    """By the id of the rule."""
    found = {}
    start = _read("bases")
    for family in FAMILIES:
        for name, one in _read(family).items():
            base = start[one["base"]]
            fails, passes = one["fails"], one.get("passes", {})
            found[name] = Example(name, _call(base, fails), _call(base, passes), _change(one["base"], fails))
    return found


def _read(name: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name(f"examples.{name}.toml").read_text(encoding="utf-8"))


def _call(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Call:
    own = {name: value for name, value in changes.items() if name != "context"}
    given = {**base["arguments"], **own}
    operator = operators()[base["operator"]]
    tensors = {one.name for one in operator.arguments.values() if one.tensor}
    arguments = {name: _value(value, name in tensors) for name, value in given.items() if value != "-"}
    context = {**base.get("context", {}), **changes.get("context", {})}
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in context.items() if value != "-"
    }
    return Call(base["operator"], arguments, Context(**known))


def _value(value: Any, tensor: bool) -> Value:
    if isinstance(value, str) and (tensor or "[" in value):
        return parse_tensor(value)
    return tuple(value) if isinstance(value, list) else value


def _change(base: str, changes: Mapping[str, Any]) -> str:
    """``decode: block_table=int64[2,2]=[1,3,2,0]``."""
    flat = {**{name: value for name, value in changes.items() if name != "context"}, **changes.get("context", {})}
    return f"{base}: " + ", ".join(
        f"{name} {'left out' if value == '-' else f'= {value}'}" for name, value in flat.items()
    )
