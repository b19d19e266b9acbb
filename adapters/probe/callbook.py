"""Notes the calls of the tapped functions in the first step of each phase, and which of them is running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from adapters.probe.arguments import describe
from adapters.probe.callsite import frames
from align.checkpoints.table import kinds
from align.trace.calls import Call, FloatOperator, OperatorCall

#: Device operators of one tapped call that are kept.
_OPERATORS = 8
#: Frames of a device operator: down to the tapped function.
_DEEP = 8
#: Of ATen's operators those that do an operator's work; the others only rearrange.
_WORK = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "embedding", "rms_norm", "silu", "softmax", "_softmax")
#: Namespaces that are not the device's own kernels.
_COMMON = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")


@dataclass(frozen=True)
class Tapped:
    """A function with taps.

    Attributes:
        where: its name in the tap table.
        place: where it is defined.
        kinds: that are tapped of it.
        parameters: of its signature, without ``self``.
    """

    where: str
    place: str
    kinds: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass
class _Running:
    """A tapped call that has begun."""

    kinds: tuple[str, ...]
    layer: int | None
    call: Call | None
    operators: list[OperatorCall] = field(default_factory=list)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return tuple(
            kinds()[kind].at(self.layer) for kind in self.kinds if kinds()[kind].per_layer == (self.layer is not None)
        )


class CallBook:
    """The calls of one run on one rank."""

    def __init__(self) -> None:
        self._phases: set[str] = set()
        self._noting = False
        self._phase, self._step, self._rows = "", -1, 0
        self._running: list[_Running] = []
        #: By everything but the layer.
        self._calls: dict[Call, Call] = {}
        self._operators: dict[str, FloatOperator] = {}
        #: The last checkpoint that was recorded.
        self.after: str | None = None
        #: What could not be described, by where.
        self.failures: dict[str, str] = {}

    def begin(self, step: int, phase: str, rows: int) -> None:
        """A step over ``rows`` tokens is about to run."""
        self._noting = phase not in self._phases
        self._phases.add(phase)
        self._phase, self._step, self._rows = phase, step, rows
        self._running, self._calls, self._operators, self.after = [], {}, {}, None

    def end(self) -> tuple[tuple[Call, ...], tuple[FloatOperator, ...]]:
        """What was noted of the step; nothing unless it was the first of its phase."""
        self._running = []
        return tuple(self._calls.values()), tuple(self._operators.values())

    # ------------------------------------------------------------------------------------------------------- calls

    def enter(self, tapped: Tapped, layer: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A tapped function is about to be called with these arguments."""
        call = None
        if self._noting:
            try:
                given = describe(tapped.parameters, args, kwargs)
                call = Call(
                    tapped.where, tapped.place, tapped.kinds, (layer,), self._phase, self._step, self._rows, given
                )
            except Exception as error:  # an observer must not stop the engine
                self.failures.setdefault(tapped.where, f"{type(error).__name__}: {error}")
        self._running.append(_Running(tapped.kinds, layer, call))

    def leave(self) -> None:
        """The tapped function that was entered last has ended."""
        one = self._running.pop()
        if one.call is None:
            return
        whole = replace(one.call, operators=tuple(one.operators))
        alike = replace(whole, layers=())
        before = self._calls.get(alike)
        self._calls[alike] = whole if before is None else replace(before, layers=(*before.layers, *whole.layers))

    @property
    def inside(self) -> tuple[str, ...]:
        """Checkpoints of the innermost tapped call that is running."""
        return self._running[-1].checkpoints if self._running else ()

    # --------------------------------------------------------------------------------------------------- operators

    @property
    def noting(self) -> bool:
        """Whether operators of this step are noted."""
        return self._noting

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
        """A device operator is done.

        Args:
            func: ``torch._ops.OpOverload``.
            outs: tensors that it returned.
        """
        name = f"{func.namespace}::{func.overloadpacket.__name__}"
        if any(out.is_floating_point() for out in outs) and name not in self._operators:
            self._operators[name] = FloatOperator(name, self._phase, self._step, frames(), self.inside, self.after)
        one = self._running[-1] if self._running else None
        if one is None or one.call is None or len(one.operators) >= _OPERATORS:
            return
        if func.namespace in _COMMON and func.overloadpacket.__name__ not in _WORK:
            return
        names = [argument.name for argument in func._schema.arguments]
        one.operators.append(OperatorCall(name, frames(_DEEP), describe(names, args, kwargs)))
