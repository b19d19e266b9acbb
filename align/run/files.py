"""What stands in the way of a verdict on directories of `.pt` files: files that cannot be read or have no partner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from align.compare.coverage import percent_text
from align.compare.rows import keys_of
from align.compare.tensors import TensorComparison
from align.errors import UserError
from align.run.verdict import Verdict
from align.trace.pt import IndexedFiles, LooseFiles
from align.trace.reader import Trace

_SHOWN = 5
Sides = Mapping[str, Trace | LooseFiles]


def refuse_unreadable(verdict: Verdict, sides: Sides) -> None:
    """Stop where nothing else is wrong but a file that was asked for holds no tensor, whatever coverage is accepted.

    Raises:
        UserError: names the files with their reasons.
    """
    bad = [
        f"{path} {why}"
        for side in sides.values()
        if isinstance(side, IndexedFiles | LooseFiles)
        for path, why in side.unreadable.items()
    ]
    if verdict == "aligned" and bad:
        raise UserError(
            f"could not compare: {_listed(bad)}",
            "write these files again with torch.save(tensor, file), or remove them",
        )


def refuse_unmatched(verdict: Verdict, tensors: TensorComparison, sides: Sides, demanded: float) -> None:
    """Stop where nothing else is wrong but files have no partner, or one of another shape.

    Args:
        demanded: percent of the tensors of either side, counted over names and over names in each step.

    Raises:
        UserError: fewer were compared; names the files with their reasons.
    """
    reasons = _unmatched(tensors, sides)
    if verdict != "aligned" or not reasons:
        return
    percent = min(tensors.coverage["paired"].percent, _compared_percent(tensors, sides))
    if percent >= demanded:
        return
    offered = percent_text(floor(percent * 100) / 100)
    raise UserError(
        f"could not compare: nothing was found wrong, but {percent_text(percent)} % of the tensors were compared and "
        f"{demanded:g} % are demanded: {_listed(reasons)}",
        f"write both sides alike: the same names, ranks, steps and shapes; or accept it: --min-coverage {offered}",
    )


def _listed(reasons: Sequence[str]) -> str:
    more = "" if len(reasons) <= _SHOWN else f"; and {len(reasons) - _SHOWN} more"
    return "; ".join(reasons[:_SHOWN]) + more


def _steps(side: Trace | LooseFiles) -> list[int]:
    return [entry.step for entry in side.steps(side.ranks[0]) if not entry.dummy]


def _keys(side: Trace | LooseFiles, step: int) -> frozenset[str]:
    return frozenset().union(*(keys_of(side, rank, step) for rank in side.ranks))


def _compared_percent(tensors: TensorComparison, sides: Sides) -> float:
    """Of the names in each step of either side; 0 to 100."""
    compared = {one.name for one in tensors.checkpoints if one.compared}
    known = {one.name for one in tensors.checkpoints}
    first, second = (
        {(place, name) for place, step in enumerate(_steps(side)) for name in _keys(side, step) & known}
        for side in sides.values()
    )
    both = sum(name in compared for _, name in first & second)
    return 100.0 * both / max(len(first | second), 1)


def _unmatched(tensors: TensorComparison, sides: Sides) -> list[str]:
    """What was not compared, with the reason: files of one side, then steps of one side."""
    found = []
    for one in tensors.checkpoints:
        if not one.compared or one.rows_missing:
            found.append(_reason(one.name, one.why if not one.compared else "", sides))
    counts = {role: len(_steps(side)) for role, side in sides.items()}
    common = min(counts.values())
    for role, side in sides.items():
        entries = [entry for entry in side.steps(side.ranks[0]) if not entry.dummy]
        found += [f"{entry.file or f'step {entry.step}'} (a step of the {role} alone)" for entry in entries[common:]]
    return found


def _reason(name: str, why: str, sides: Sides) -> str:
    """A name with its file, if it lies on one side alone in some step; else why it was not compared."""
    for role, other in (("candidate", "reference"), ("reference", "candidate")):
        for mine, theirs in zip(_steps(sides[role]), _steps(sides[other]), strict=False):
            if name in _keys(sides[role], mine) and name not in _keys(sides[other], theirs):
                return f"{_file(sides[role], mine, name)} (on the {role} alone)"
    return f"{name} ({why})"


def _file(side: Trace | LooseFiles, step: int, name: str) -> str:
    path = side.file(step, name) if isinstance(side, LooseFiles) else None
    return name if path is None else str(path.relative_to(side.directory))
