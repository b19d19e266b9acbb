"""Describes the arguments of a call: order, type, dtype, shape, strides and storage format, never values of tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from align.trace.calls import Argument

#: Parts of a list, and tensors of an object, that are described.
_PARTS = 8
_TEXT = 60
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def describe(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Argument, ...]:
    """The arguments that were given, in the order of the signature; ``None`` is left out.

    Args:
        parameters: names by place, without ``self``; arguments behind them are called by their place.
    """
    named = [(parameters[at] if at < len(parameters) else str(at), value) for at, value in enumerate(args)]
    order = {name: at for at, name in enumerate(parameters)}
    named += sorted(kwargs.items(), key=lambda one: order.get(one[0], len(order)))
    return tuple(part for name, value in named for part in _described(name, value))


def _described(name: str, value: Any) -> Iterator[Argument]:
    if value is None:
        return
    if isinstance(value, Tensor):
        yield _tensor(name, value)
    elif isinstance(value, _PLAIN):
        yield Argument(name, type(value).__name__, value=str(value)[:_TEXT])
    elif isinstance(value, (list, tuple)):
        yield from _sequence(name, value)
    else:
        yield Argument(name, type(value).__name__)
        held = [(key, part) for key, part in _fields(value).items() if isinstance(part, Tensor)]
        for key, part in held[:_PARTS]:
            yield _tensor(f"{name}.{key}", part)


def _sequence(name: str, value: Sequence[Any]) -> Iterator[Argument]:
    if any(isinstance(part, Tensor) for part in value):
        for at, part in enumerate(value[:_PARTS]):
            yield from _described(f"{name}.{at}", part)
        return
    shown = [part if isinstance(part, _PLAIN) or part is None else type(part).__name__ for part in value[:_PARTS]]
    more = "" if len(value) <= _PARTS else f", … ({len(value)})"
    yield Argument(name, type(value).__name__, value=f"{', '.join(map(str, shown))}{more}"[:_TEXT])


def _fields(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__dict__", {})
    return found


def _tensor(name: str, value: Tensor) -> Argument:
    return Argument(
        name,
        "Tensor",
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
        tuple(value.stride()),
        value.device.type,
        _format(value),
    )


def _format(value: Tensor) -> int | None:
    """Storage format: 2 is ND, 29 is FRACTAL_NZ (``torch_npu.Format``)."""
    ask = getattr(sys.modules.get("torch_npu"), "get_npu_format", None)
    return int(ask(value)) if ask is not None and value.device.type == "npu" else None
