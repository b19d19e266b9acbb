"""Where both sides make the checkpoints, from calls as the probe writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from align.compare.sites import sites_of
from align.trace.calls import Argument, Call, CallRecords, OperatorCall
from align.trace.format import StepEntry

PREFILL = Call(
    "engine.norm:Norm.forward", "engine/norm.py:7 forward", ("attn_norm",), (0, 1), "prefill", 0, 5,
    (Argument("x", "Tensor", "bfloat16", (1, 5, 8), (40, 8, 1)), Argument("eps", "float", value="1e-06")),
    (OperatorCall("npu::npu_rms_norm", ("engine/norm.py:9 forward",), ()),),
)  # fmt: skip
DECODE = replace(PREFILL, phase="decode", step=1, rows=1)
OTHER = replace(PREFILL, layers=(2,), place="patch.py:3 forward", operators=())


class Side:
    """A recording of which only the calls are looked at."""

    ranks = (0,)

    def __init__(self, *calls: Call) -> None:
        self._calls = calls

    def steps(self, rank: int) -> tuple[StepEntry, ...]:
        return ()

    def calls(self, rank: int) -> CallRecords:
        return CallRecords(self._calls)


def test_alike_phases_are_one_and_patched_layers_another() -> None:
    sides: dict[str, Any] = {"candidate": Side(PREFILL, DECODE, OTHER), "reference": Side()}
    first, second = sites_of(sides)
    assert (first.side, first.layers, first.phases) == ("candidate", (0, 1), ("prefill", "decode"))
    assert first.operators == (("npu::npu_rms_norm", "engine/norm.py:9 forward"),)
    assert first.tensors == (("x", "bfloat16", "1×T×8"),), "tensors alone, in the engine's own shape"
    assert (second.layers, second.place, second.operators) == ((2,), "patch.py:3 forward", ())


def test_recordings_without_calls_say_nothing() -> None:
    nothing: Any = object()
    assert sites_of({"candidate": nothing}) == ()
