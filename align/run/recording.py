"""What a run records: which checkpoints keep their values within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from adapters.base import Request
from adapters.probe.spec import CaptureSpec
from align.case.schema import Case
from align.checkpoints.table import Kind, Structure, kinds
from align.errors import UserError

#: Values of one side that a run keeps at most unless told otherwise, in megabytes (10^6 bytes).
DEFAULT_BUDGET_MB = 512
#: bfloat16 and float16.
_BYTES_PER_VALUE = 2
_ALL = ("*",)


def rows_of(requests: Iterable[Request]) -> int:
    """Rows that one replay computes: every prompt token, and every generated one but the last.

    An engine that looks ahead computes the last one as well; it counts as one more per request.
    """
    return sum(len(request.token_ids) + request.max_new_tokens for request in requests)


def value_bytes(structure: Structure, kind: Kind, rows: int, requests: int, tokens: int) -> int:
    """Bytes of one checkpoint of this kind over a whole replay.

    Args:
        rows: see :func:`rows_of`.
        requests: how many.
        tokens: generated tokens per request, the longest; logits have one row per request and step.
    """
    per_row = 1
    for axis in kind.axes[1:]:
        per_row *= structure.size(axis)
    count = rows if kind.axes[0] == "tokens" else requests * tokens
    return count * per_row * (8 if kind.integer else _BYTES_PER_VALUE)


def estimated_bytes(structure: Structure, requests: Sequence[Request], values: Sequence[str] = _ALL) -> int:
    """Bytes of the values that the patterns keep, over a whole replay and all layers."""
    rows, tokens = rows_of(requests), max(request.max_new_tokens for request in requests)
    return sum(
        value_bytes(structure, name.kind, rows, len(requests), tokens)
        for name in structure.names()
        if kept(str(name), values)
    )


def kept(name: str, values: Sequence[str]) -> bool:
    """Whether a checkpoint's values are kept."""
    return any(fnmatchcase(name, pattern) for pattern in values)


def layer_pattern(layer: int) -> str:
    return f"layers.{layer}.*"


def default_values(structure: Structure, requests: Sequence[Request], budget: int) -> tuple[str, ...]:
    """Patterns of the values that a first look keeps: all if ``budget`` bytes hold them, else the first layer's.

    What exists once (embedding, final norm, logits) is kept either way: the head's rows are few.
    """
    if estimated_bytes(structure, requests) <= budget:
        return _ALL
    once = [kind.name for kind in kinds().values() if not kind.per_layer and structure.has(kind)]
    return (layer_pattern(0), *once)


def first_look(
    directory: Path,
    structure: Structure,
    requests: Sequence[Request],
    budget: int,
    values: Sequence[str] = (),
    lean: bool = False,
) -> CaptureSpec:
    """The capture that every run makes: digests and residuals of everything, values as far as the budget goes.

    Args:
        directory: the side's trace.
        values: patterns that the user asked for; they replace the choice by budget.
        lean: no values unless asked for, and of the rest the least that still names a fault.
    """
    chosen = tuple(values) or (() if lean else default_values(structure, requests, budget))
    return CaptureSpec(str(directory.absolute()), values=chosen, lean=lean)


def check_lean(lean: bool, tp: int) -> None:
    """Refuse what a lean recording cannot judge.

    Raises:
        UserError: several ranks: what they add up is judged from values.
    """
    if lean and tp > 1:
        raise UserError(
            "--lean does not go with tensor parallelism: what the ranks add up is judged from values",
            "leave out --lean, or bound the values with --values-budget",
        )


def rows_by_request(case: Case) -> dict[str, int]:
    """Rows that one replay computes of each request at most."""
    return {request.name: len(request.token_ids) + case.new_tokens(request) for request in case.requests}
