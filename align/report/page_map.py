"""The map of layers and checkpoints, the drift, and the call sites, as data for the page's own script."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import Any

from align.compare.spread import SHARES
from align.report.page_numbers import Say, as_float, number, of_cell
from align.result.cells import Cell, CellSpread, DriftPoint
from align.result.schema import Result
from align.sentences import text_of

#: Ratios from which on a cell has the next shade; the last of :data:`SHADES` is beyond them all.
STEPS = (0.1, 0.33, 1.0, 3.0, 10.0)
SHADES = ("low", "mid", "high", "over", "far", "top")
#: Growth of error over prediction from one layer to the next that is a bend; the prediction's share of clean pairs.
BEND, CLEAN = 2.0, 2.0
#: Checkpoints that are listed as furthest apart, whatever is allowed: where everything is far off, the order tells.
FURTHEST = 10
#: Views: between the sides by error and by cosine, and what each side's operator added.
VIEWS = ("between", "cosine", "candidate", "reference")
_MEASURED = ("error", "floor", "bound", "ratio", "state")


def map_of(result: Result, say: Say, lang: str) -> dict[str, Any] | None:
    """Rows, columns and cells; ``None`` of a result without them."""
    cells = result.tensors.cells if result.tensors is not None else []
    if not cells:
        return None
    accused: dict[str, list[int]] = {}
    for at, finding in enumerate(result.findings):
        for name in dict.fromkeys((finding.checkpoint, finding.evidence.get("name"))):
            if name is not None:
                accused.setdefault(str(name), []).append(at + 1)
    columns = list(dict.fromkeys(one.kind for one in cells if one.layer is not None))
    layers = sorted({one.layer for one in cells if one.layer is not None})
    shared: dict[str, int] = {}
    place = {(one.layer, one.kind): at for at, one in enumerate(cells)}
    single = [at for at, one in enumerate(cells) if one.layer is None]
    return {
        "columns": columns,
        "layers": [{"layer": layer, "cells": [place.get((layer, kind)) for kind in columns]} for layer in layers],
        "single": single,
        "cells": [_cell(one, accused.get(one.name, []), say, lang, shared) for one in cells],
        "furthest": furthest(cells),
        "texts": list(shared),
        "shares": list(SHARES),
        "first": _first(cells, accused),
        "views": [view for view in VIEWS if view in ("between", "cosine") or any(view in one.own for one in cells)],
    }


def _first(cells: Sequence[Cell], accused: dict[str, list[int]]) -> int:
    """The cell to look at first: what the headline accuses, else the one nearest to its bounds."""
    named = [(min(accused[one.name]), at) for at, one in enumerate(cells) if one.name in accused]
    if named:
        return min(named)[1]
    return max(range(len(cells)), key=lambda at: as_float(cells[at].ratio) or 0.0)


def shade(verdict: str, ratio: Any) -> str:
    """How a cell looks; never by colour alone, its text says the ratio."""
    if verdict == "equal":
        return "same"
    if verdict not in ("within", "beyond"):
        return "none"
    value = as_float(ratio)
    if value is None:
        return "top" if verdict == "beyond" else "low"
    return next((name for name, limit in zip(SHADES, STEPS, strict=False) if value <= limit), SHADES[-1])


def short(verdict: str, ratio: Any) -> str:
    """The text in a cell."""
    if verdict == "equal":
        return "="
    if verdict not in ("within", "beyond"):
        return "–"
    value = as_float(ratio)
    if value is None:
        return "≠" if verdict == "beyond" else "·"
    if value == inf:
        return "∞"
    if value >= 100:
        return f"{value:.0f}" if value < 10000 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}".lstrip("0") if value >= 0.005 else ".00"


def _cell(cell: Cell, accused: list[int], say: Say, lang: str, shared: dict[str, int]) -> dict[str, Any]:
    def text(words: str) -> int:
        """Its place among the texts that cells have in common: there are many cells, and they say the same."""
        return shared.setdefault(words, len(shared))

    views = {"between": _view(cell.verdict, cell.ratio), "cosine": _by_cosine(cell)}
    for side, own in cell.own.items():
        views[side] = _view(own.verdict, own.ratio)
    return {
        "name": cell.name,
        "kind": cell.kind,
        "layer": cell.layer,
        "verdict": cell.verdict,
        "inputs": cell.inputs,
        "accused": accused,
        "views": views,
        "why": _why(cell, say, lang),
        "rows": cell.rows,
        "shape": cell.shape,
        "dtypes": [cell.dtypes.get(side, "") for side in ("candidate", "reference")],
        "estimated": cell.estimated,
        "numbers": [
            [
                text(one["what"]),
                *(one[key] for key in ("error", "floor", "bound", "ratio", "state")),
                text(one["source"]),
            ]
            for one in of_cell(cell, say)
        ],
        "others": _others(cell),
        "bound": cell.bound,
        "spread": None if cell.spread is None else _spread(cell.spread),
    }


def _view(verdict: str, ratio: Any) -> list[str]:
    return [shade(verdict, ratio), short(verdict, ratio), verdict]


def _by_cosine(cell: Cell) -> list[str]:
    """By the angle between both sides' tensors, which for small errors is their relative L2."""
    value = as_float(cell.cosine)
    if cell.verdict == "equal" or value is None:
        return _view(cell.verdict if cell.verdict == "equal" else "not observable", None)
    apart = max(0.0, 1 - value)
    text = "0" if apart == 0 else f"{apart:.0e}".replace("e-0", "e-")
    return [shade("within", sqrt(2 * apart) / cell.bound), text, cell.verdict]


def _cosine(value: Any) -> str:
    """With the digits that tell it from 1."""
    found = as_float(value)
    return "–" if found is None else f"{found:.8f}".rstrip("0").rstrip(".")


def furthest(cells: Sequence[Cell]) -> list[int]:
    """Places of the checkpoints that are furthest from their bounds, or beyond them most; those that differ alone."""
    ranked = sorted(range(len(cells)), key=lambda at: (-(as_float(cells[at].ratio) or 0.0), at))
    return [at for at in ranked if as_float(cells[at].ratio)][:FURTHEST]


def _others(cell: Cell) -> list[list[str]]:
    """Numbers of the seeds, which judge only if asked to."""
    found = {"max_abs": cell.max_abs, "max_rel": cell.max_rel, "cosine": cell.cosine}
    return [[name, number(value)] for name, value in found.items() if value is not None]


def _why(cell: Cell, say: Say, lang: str) -> str:
    if cell.why_told is not None:
        return text_of(cell.why_told, lang)
    if cell.verdict == "equal":
        return say("page.why_equal", rows=cell.rows)
    if cell.verdict == "within" and cell.error is not None:
        return say("page.why_within", error=number(cell.error), bound=number(cell.bound))
    return cell.why


def _spread(found: CellSpread) -> dict[str, Any]:
    return {
        "quantiles": found.quantiles,
        "steps": [list(map(int, found.steps)), list(found.steps.values())],
        "rows": [[one.request, one.position, one.rel_l2] for one in found.rows],
        "channels": [[one.index, one.rel_l2] for one in found.channels],
        "heads": [[one.index, one.rel_l2] for one in found.heads],
    }


def sites_of(result: Result) -> list[dict[str, Any]]:
    """Both sides' functions, by kinds and layers."""
    return [] if result.tensors is None else [one.model_dump(mode="json") for one in result.tensors.sites]


def drift_of(result: Result) -> dict[str, Any] | None:
    """Layer by layer, and where it bends; ``None`` if it was not measured.

    ``missing`` are the layers in front of which the sides were not compared: of these nothing is known.
    """
    points = result.tensors.drift if result.tensors is not None else []
    if result.tensors is None or not points:
        return None
    entered = {one.layer for one in result.tensors.cells if one.kind == "block_in" and one.layer is not None}
    return {
        "layers": [one.layer for one in points],
        "error": [as_float(one.error) for one in points],
        "predicted": [one.predicted for one in points],
        "bound": [one.bound for one in points],
        "equal": all(as_float(one.error) == 0 for one in points),
        "bend": bend_of(points),
        "missing": sorted(entered - {one.layer for one in points}),
        "cosine": ["–" if one.cosine is None else _cosine(one.cosine) for one in points],
    }


def bend_of(points: Sequence[DriftPoint]) -> int | None:
    """The layer in which the error leaves the slope of rounding; ``None`` if it does not.

    Between right sides error over prediction stays about the same from layer to layer, and below :data:`CLEAN`. The
    bend is the largest growth of it by at least :data:`BEND`. Where sides were equal bit by bit through a layer, any
    error behind the next one is a bend; behind layer 0 it is not, for the embedding is always equal.
    """
    found: tuple[float, int] | None = None
    for before, after in pairwise(points):
        last, value = (_share(one) for one in (before, after))
        if last == 0 and value > 0 and before.layer > points[0].layer:
            growth = inf
        else:
            growth = value / max(last, CLEAN / BEND) if value >= 1 else 0.0
        if growth >= BEND and (found is None or growth > found[0]):
            found = growth, before.layer
    return None if found is None else found[1]


def _share(one: DriftPoint) -> float:
    error = as_float(one.error)
    return inf if error is None else error / one.predicted
