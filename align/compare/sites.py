"""Where each side makes a checkpoint: the engine's own function with its live line, and what it calls on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from align.compare.calls import calls_of, own_shape
from align.compare.rows import Recorded
from align.trace.calls import Call

#: Device operators and tensors of one call that are named.
_OPERATORS, _TENSORS = 4, 8


@dataclass(frozen=True)
class Site:
    """Calls of one tapped function that were alike.

    Attributes:
        side: whose.
        kinds, layers: whose product are the checkpoints that it yields; a layer of ``None`` for what exists once.
        phases: in whose first step it was seen.
        function: as the engine's tap table names it.
        place: ``file:line name`` of its definition as it ran; empty if it has none.
        operators: (device operator, where it was called), in order.
        tensors: (argument, dtype, own shape) that it was given, of its first phase; ``T`` is a row per token.
    """

    side: str
    kinds: tuple[str, ...]
    layers: tuple[int | None, ...]
    phases: tuple[str, ...]
    function: str
    place: str
    operators: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, str, str], ...]


def sites_of(traces: Mapping[str, Recorded]) -> tuple[Site, ...]:
    """Of the first rank of each side; empty of recordings that hold no calls."""
    found: dict[tuple[object, ...], Site] = {}
    for side, trace in traces.items():
        records = calls_of(trace)
        for call in () if records is None else records.calls:
            operators = _operators(call)
            key = (side, call.kinds, call.layers, call.where, call.place, operators)
            before = found.get(key)
            phases = (call.phase,) if before is None else tuple(dict.fromkeys([*before.phases, call.phase]))
            tensors = _tensors(call) if before is None else before.tensors
            found[key] = Site(side, call.kinds, call.layers, phases, call.where, call.place, operators, tensors)
    return tuple(found.values())


def _operators(call: Call) -> tuple[tuple[str, str], ...]:
    named = dict.fromkeys((one.name, one.at[0] if one.at else "") for one in call.operators)
    return tuple(named)[:_OPERATORS]


def _tensors(call: Call) -> tuple[tuple[str, str, str], ...]:
    given = [one for one in call.arguments if one.type == "Tensor"]
    return tuple((one.name, one.dtype, own_shape(one.shape, call.rows)) for one in given[:_TENSORS])
