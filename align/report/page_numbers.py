"""The numbers of a finding, each with its scale: error, floor, bound, ratio, and where the bound comes from.

A number without a scale says nothing, so that a row without a bound does not exist: what must be exact has the bound 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf, isfinite
from typing import Any

from align.result.cells import Cell, OwnError, alike_parts
from align.result.parts import Finding
from align.result.schema import Result
from align.sentences import text_of

#: ``say(key, **values)``.
Say = Callable[..., str]
#: ``what``, ``error``, ``floor``, ``bound``, ``ratio``, ``state`` and ``source``: texts, and a state by its key.
Row = dict[str, Any]


def number(value: Any) -> str:
    """Four digits that count; what is not finite as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return "∞" if value == "inf" else str(value)
    if isinstance(value, int):
        return str(value)
    return "∞" if value == inf else f"{value:.4g}"


def as_float(value: Any) -> float | None:
    """A number of a result; ``None`` of what is not known or no number."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return None if found != found else found


def row(what: str, error: Any, bound: Any, source: str, floor: Any = None, ratio: Any = None) -> Row:
    """One measured number. ``ratio`` is of error over bound; where that cannot be formed, by state alone."""
    value, limit = as_float(error), as_float(bound)
    if ratio is None and value is not None and limit is not None:
        ratio = value / limit if limit else (inf if value else 0.0)
    share = as_float(ratio)
    state = "unknown" if share is None else "beyond" if not share <= 1 else "within"
    return {
        "what": what,
        "error": number(error),
        "floor": number(floor),
        "bound": number(bound),
        "ratio": "–" if share is None else number(share) if isfinite(share) else "∞",
        "state": state,
        "source": source,
    }


def numbers_of(result: Result, finding: Finding, say: Say) -> list[Row]:
    """All that is known in numbers about what a finding accuses."""
    cell = cell_of(result, finding)
    rows = list(_exact(result, finding, say))
    if finding.evidence.get("ratio") is not None and finding.evidence.get("allowed") is not None:
        about = {"side": _side(finding, say), "rows": finding.evidence.get("rows", "?")}
        what = say("page.number_element", **about)
        rows.append(row(what, finding.evidence["ratio"], finding.evidence["allowed"], say("page.from_operator")))
    if cell is not None:
        rows += of_cell(cell, say, skip_element=bool(rows))
    if result.diagnosis is not None and result.diagnosis.checkpoint == finding.checkpoint:
        for side, one in result.diagnosis.sides.items():
            what = say("page.number_float64", side=say(f"side.{side}"), rows=one.rows)
            rows.append(row(what, one.roundings, one.allowed, say("page.from_float64"), ratio=one.ratio))
    transplant = finding.evidence.get("transplant") or {}
    for one in (transplant.get("readings") or ())[:1]:
        floor = one.get("floor") or {}
        for key in ("none", "inputs", "output"):
            what = say(f"page.number_transplant_{key}", name=one.get("name", "?"))
            rows.append(row(what, one.get(key), floor.get("allowed"), say("page.from_floor"), floor.get("clean")))
    return rows


def cell_of(result: Result, finding: Finding) -> Cell | None:
    """The map's cell of what a finding accuses."""
    if result.tensors is None:
        return None
    names = (finding.checkpoint, finding.evidence.get("name"))
    return next((one for one in result.tensors.cells if one.name in names), None)


def _side(finding: Finding, say: Say) -> str:
    return say(f"side.{finding.side or 'both'}")


def _exact(result: Result, finding: Finding, say: Say) -> Iterator[Row]:
    """What must be exact: counts with the bound 0, and of how many."""
    evidence, side = finding.evidence, finding.side or ""
    ledger, collectives = result.ledger.get(side), result.collectives.get(side)
    arguments = result.arguments.get(side)
    scope = evidence.get("scope") if isinstance(evidence.get("scope"), Mapping) else {}
    if finding.path == "A":
        for name in ("written", "missed", "handed"):
            if scope and scope.get(name):
                yield row(say(f"page.number_{name}"), scope[name], 0, say("page.from_ledger"))
        if ledger is not None and ledger.observable:
            what = say("page.number_ledger", records=ledger.records)
            yield row(what, ledger.faults, 0, say("page.from_ledger"))
    if finding.path == "C" and collectives is not None and collectives.observable:
        total = sum(one.right + one.wrong for one in collectives.rows)
        wrong = sum(one.wrong for one in collectives.rows)
        if wrong:  # of one that is missing, those that were made tell nothing
            yield row(say("page.number_collectives", total=total), wrong, 0, say("page.from_collectives"))
    if finding.path == "FA" and arguments is not None:
        wrong = sum(one.calls for one in arguments.groups if one.severity == "ERROR")
        what = say("page.number_arguments", total=arguments.calls)
        yield row(what, wrong, 0, say("page.from_rules"))
    if finding.kind == "weights":
        yield row(say("page.number_weight_rows"), evidence.get("rows_total"), 0, say("page.from_files"))
        yield row(say("page.number_weights"), evidence.get("max_abs"), 0, say("page.from_files"))


def of_cell(cell: Cell, say: Say, skip_element: bool = False) -> list[Row]:
    """Of one checkpoint: between the sides, and what each operator added to its own inputs."""
    rows: list[Row] = []
    if cell.differing is not None:
        rows.append(row(say("page.number_integers", rows=cell.rows), cell.differing, 0, say("page.from_exact")))
    elif cell.error is not None:
        what = say("page.number_between", rows=cell.rows)
        source = say("page.from_derived") if cell.judged_by == "derived" else cell.judged_by
        rows.append(row(what, cell.error, cell.bound, source, cell.predicted))
        spread = cell.spread
        if spread is not None:
            for name, one, key in (
                ("token", spread.rows[:1], "page.number_row"),
                ("head", spread.heads[:1], "page.number_head"),
                ("channel", spread.channels[:1], "page.number_channel"),
            ):
                if one and name in cell.bounds:
                    what = say(key, **one[0].model_dump(exclude={"rel_l2"}))
                    rows.append(row(what, one[0].rel_l2, cell.bounds[name], source, None))
        for part in alike_parts(cell.why_told):
            about = {"place": text_of(part["place"]), "rows": cell.rows}
            rows.append(row(say("page.number_alike", **about), part["value"], part["limit"], say("page.from_alike")))
    for side, own in cell.own.items():
        if not (skip_element and own.test == "element" and own.verdict == "beyond"):
            rows.append(of_own(side, own, say))
    return rows


def of_own(side: str, own: OwnError, say: Say) -> Row:
    """What the operator of one side added."""
    about = {"side": say(f"side.{side}"), "test": say(f"page.test_{own.test.replace(' ', '_')}"), "rows": own.rows}
    return row(say("page.number_own", **about), own.value, own.allowed, say("page.from_operator"), ratio=own.ratio)
