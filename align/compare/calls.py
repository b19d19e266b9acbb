"""Lays the arguments of an accused operator's calls side by side: order, dtype, shape, and what else was given.

Argument names differ between engines, so that tensors are matched by what they are, never by name: dtype and shape,
where leading axes of 1 do not count, a first axis as long as the step has tokens is ``T``, and what stands behind it
is one product. Names are equated where both sides call one and the same device operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from align.checkpoints.table import parse
from align.compare.rows import CANDIDATE, REFERENCE, Recorded
from align.findings import Finding
from align.sentences import Said, said, text_of
from align.trace.calls import Argument, Call, CallRecords, OperatorCall

#: Kinds of findings that accuse an operator.
ACCUSING = ("operator", "unexplained", "nonfinite", "collective", "host fallback")
#: Path in the packages → what stands there, for the files to read (seed 003 path B); the first that fits counts.
ROLES = (
    ("dlinfer/vendor/", "vendor operator"),
    ("lmdeploy/pytorch/kernels/dlinfer/", "kernel wrapper"),
    ("lmdeploy/pytorch/backends/", "Impl class"),
    ("vllm_ascend/device/", "vendor operator"),
    ("vllm_ascend/attention/", "Impl class"),
    ("vllm_ascend/ops/", "Impl class"),
)
Mark = Literal["", "dtype", "shape", "alone"]
#: Type names of values that say the same on both sides whatever the batch is.
_SETTINGS = ("bool", "int", "float", "str", "dtype")
#: Operators that only ask about a tensor.
_QUERIES = ("get_npu_format", "get_storage_size")


@dataclass(frozen=True)
class Shown:
    """One argument of one side, and how it differs.

    Attributes:
        argument: as it was given.
        form: its shape in canonical form, ``T×512``; empty for what is no tensor.
        mark: ``dtype`` or ``shape`` if the tensor that stands in its place on the other side differs in that,
            ``alone`` for a tensor that has no match there.
    """

    argument: Argument
    form: str
    mark: Mark = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        one = self.argument
        plain: dict[str, Any] = {"name": one.name, "type": one.type, "mark": self.mark}
        if one.type == "Tensor":
            plain |= {"dtype": one.dtype, "shape": list(one.shape), "form": self.form}
            plain |= {"strides": list(one.strides), "device": one.device, "format": one.format}
        elif one.value:
            plain["value"] = one.value
        return plain


def canonical(argument: Argument, rows: int) -> tuple[int | str, ...]:
    """The shape without leading ones; of one row per token ``("T", elements of a row)``."""
    shape = list(argument.shape)
    while len(shape) > 1 and shape[0] == 1 and rows != 1:
        shape = shape[1:]
    if rows == 1 and len(shape) > 1 and shape[:2] == [1, 1]:
        shape = shape[1:]
    if shape and shape[0] == rows:
        inner = 1
        for size in shape[1:]:
            inner *= size
        return ("T", inner)
    return tuple(shape)


def own_shape(shape: Sequence[int], rows: int) -> str:
    """The engine's own shape as text, ``1×T×256``, so that it stands beside the strides axis by axis; ``T`` is the axis
    that has a row per token.
    """
    skipped = 0
    while skipped < len(shape) - 1 and shape[skipped] == 1 and (rows != 1 or shape[skipped + 1] == 1):
        skipped += 1
    if rows == 1 and len(shape) > 1:
        skipped = min(skipped, 1)
    words = [str(size) for size in shape]
    if shape and shape[skipped] == rows:
        words[skipped] = "T"
    return "×".join(words)


def form(argument: Argument, rows: int) -> str:
    """The canonical shape as text."""
    return "×".join(map(str, canonical(argument, rows))) if argument.type == "Tensor" else ""


def beside(candidate: Call, reference: Call) -> tuple[tuple[Shown, ...], tuple[Shown, ...]]:
    """The arguments of both calls with marks."""
    sides = [
        [(one, canonical(one, call.rows) if one.type == "Tensor" else None) for one in call.arguments]
        for call in (candidate, reference)
    ]
    marks: list[list[Mark]] = [["" if shape is None else "alone" for _, shape in side] for side in sides]
    _match(sides, marks, "", lambda one, shape: (one.dtype, shape))
    _match(sides, marks, "dtype", lambda one, shape: shape)
    _match(sides, marks, "shape", lambda one, shape: ("T", one.dtype) if shape[0] == "T" else None)
    shown = [
        tuple(Shown(one, form(one, call.rows), mark) for (one, _), mark in zip(side, marked, strict=True))
        for side, marked, call in zip(sides, marks, (candidate, reference), strict=True)
    ]
    return shown[0], shown[1]


def _match(sides: Sequence[Sequence[Any]], marks: Sequence[list[Mark]], mark: Mark, key: Any) -> None:
    """Give pairs with equal keys this mark, in order, among those without a match so far."""
    free: dict[Any, list[int]] = {}
    for at, (one, shape) in enumerate(sides[1]):
        if marks[1][at] == "alone" and shape and (found := key(one, shape)) is not None:
            free.setdefault(found, []).append(at)
    for at, (one, shape) in enumerate(sides[0]):
        if marks[0][at] != "alone" or not shape:
            continue
        places = free.get(key(one, shape))
        if places:
            marks[0][at] = marks[1][places.pop(0)] = mark


def operator_differences(candidate: Call, reference: Call) -> list[Said]:
    """What one and the same device operator was given differently."""
    sides = [_working(call) for call in (candidate, reference)]
    found = []
    for name, ours in sides[0].items():
        # One that is called several times is paired in order, and not at all where the counts differ.
        theirs = sides[1].get(name, [])
        if len(ours) == len(theirs):
            for one, other in zip(ours, theirs, strict=True):
                found += _operator_differences(one, other, candidate.rows, reference.rows)
    return list({text_of(one): one for one in found}.values())


def _working(call: Call) -> dict[str, list[OperatorCall]]:
    """By name the calls of operators that compute something; a question about a tensor's format does not."""
    found: dict[str, list[OperatorCall]] = {}
    for one in call.operators:
        if one.name.rpartition("::")[2] not in _QUERIES:
            found.setdefault(one.name, []).append(one)
    return found


def _operator_differences(one: OperatorCall, other: OperatorCall, rows: int, other_rows: int) -> list[Said]:
    given = [{argument.name: argument for argument in call.arguments} for call in (one, other)]
    found = []
    for name in dict.fromkeys([*given[0], *given[1]]):
        words: list[Said | str] = []
        for side, count in zip(given, (rows, other_rows), strict=True):
            argument = side.get(name)
            words.append(said("call.default") if argument is None else _text(argument, count))
        if words[0] != words[1] and any(isinstance(text, str) and text for text in words):
            found.append(said("call.operator", operator=one.name, name=name, candidate=words[0], reference=words[1]))
    return found


def _text(argument: Argument, rows: int) -> str:
    if argument.type == "Tensor":
        return f"{argument.dtype} {form(argument, rows)}"
    return argument.value if argument.type in _SETTINGS else ""


# ----------------------------------------------------------------------------------------------------------- findings


def calls_of(trace: Recorded) -> CallRecords | None:
    """What the first rank of a trace that computed requests says about its calls; ``None`` if nothing can be known."""
    read = getattr(trace, "calls", None)  # files that were written by hand have none
    try:
        if read is None:
            return None
        worked = (rank for rank in trace.ranks if any(not entry.dummy for entry in trace.steps(rank)))
        return read(next(worked, trace.ranks[0]))  # type: ignore[no-any-return]
    except ValueError:  # a damaged file; whatever needs it says so
        return None


def with_calls(findings: Sequence[Finding], traces: Mapping[str, Recorded]) -> list[Finding]:
    """The findings; those that accuse an operator have the calls of both sides in their evidence.

    ``evidence["calls"]``: by side the tapped function, its arguments and the device operators inside;
    ``evidence["call_differences"]``: sentences, and ``call_differences_told`` the same as data;
    ``evidence["read"]``: by side what to read, with live lines.
    """
    records = {side: found for side, trace in traces.items() if (found := calls_of(trace)) is not None}
    return [_with_calls(one, records) if one.kind in ACCUSING else one for one in findings]


def _with_calls(finding: Finding, records: Mapping[str, CallRecords]) -> Finding:
    if finding.checkpoint is None:
        return finding
    try:
        name = parse(finding.checkpoint)
    except ValueError:
        return finding
    calls = {
        side: call
        for side, record in records.items()
        if (call := record.call(name.kind.name, name.layer, finding.phase)) is not None
    }
    if not calls:
        return finding
    shown = {side: tuple(Shown(one, form(one, call.rows)) for one in call.arguments) for side, call in calls.items()}
    differences: list[Said] = []
    if calls.keys() == {CANDIDATE, REFERENCE}:
        both = beside(calls[CANDIDATE], calls[REFERENCE])
        shown = dict(zip((CANDIDATE, REFERENCE), both, strict=True))
        differences = [*_marked(both), *operator_differences(calls[CANDIDATE], calls[REFERENCE])]
    evidence = {
        **finding.evidence,
        "calls": {side: _call_evidence(call, shown[side]) for side, call in calls.items()},
        "call_differences": [text_of(one) for one in differences],
        "call_differences_told": differences,
        "read": {side: reading(call) for side, call in calls.items()},
    }
    return replace(finding, evidence=evidence)


def _marked(both: tuple[tuple[Shown, ...], tuple[Shown, ...]]) -> list[Said]:
    """Tensors that differ in dtype or shape."""
    found = []
    for mark in ("dtype", "shape"):
        ones = [[one for one in side if one.mark == mark] for side in both]
        for candidate, reference in zip(*ones, strict=True):
            texts = [f"{one.argument.name} {one.argument.dtype} {one.form}" for one in (candidate, reference)]
            found.append(said("call.mark", what=mark, candidate=texts[0], reference=texts[1]))
    return found


def _call_evidence(call: Call, arguments: Sequence[Shown]) -> dict[str, Any]:
    return {
        "function": call.where,
        "phase": call.phase,
        "step": call.step,
        "rows": call.rows,
        "arguments": [one.to_dict() for one in arguments],
        "operators": [
            {
                "name": one.name,
                "at": one.at[0] if one.at else "",
                "arguments": [Shown(given, form(given, call.rows)).to_dict() for given in one.arguments],
            }
            for one in call.operators
        ],
    }


def reading(call: Call) -> list[dict[str, str]]:
    """What to read of a call: its own function, and the way down to the device operator, each with its live line."""
    found = [{"what": role(call.place) or "tapped function", "place": call.place}] if call.place else []
    for one in call.operators:
        for place in reversed(one.at):
            what = role(place)
            if what:
                found.append({"what": what, "place": place, "operator": one.name})
    # Of the frames of one role the innermost does the work.
    chosen: dict[tuple[str, str], dict[str, str]] = {}
    for entry in found:
        chosen[entry["what"], entry.get("operator", "")] = entry
    return list(chosen.values())


def role(place: str) -> str:
    """What stands at a place, by the folder of its package; empty if that is nothing in particular."""
    return next((what for folder, what in ROLES if place.startswith(folder)), "")


__all__ = ["ACCUSING", "Shown", "beside", "calls_of", "canonical", "own_shape", "reading", "role", "with_calls"]
