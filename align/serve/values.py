"""A slice and a histogram of what both sides recorded of one checkpoint in one step, bounded in size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from align.compare.gather import gather, is_head, reconcile
from align.compare.pairing import pair_rows
from align.compare.rows import CANDIDATE, REFERENCE, PairedRow
from align.errors import UserError
from align.run.traces import TRACE, open_trace
from align.trace.format import MANIFEST
from align.trace.reader import Trace

#: Rows and channels of a slice, bars of a histogram, and elements of a side that are looked at.
ROWS, CHANNELS, BARS, ELEMENTS = 6, 8, 48, 1 << 22
#: Recordings of a side that may have values, the whole one first.
RECORDINGS = (TRACE, "closer")


class Values:
    """The recordings of one run. Not for several threads at once.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, tuple[Trace, Trace, tuple[PairedRow, ...]] | None] = {}

    def close(self) -> None:
        """Close the files."""
        for found in self._open.values():
            for trace in (found or ())[:2]:
                assert isinstance(trace, Trace)
                trace.close()
        self._open.clear()

    def read(self, name: str, step: int | None = None) -> dict[str, Any]:
        """Values of a checkpoint, JSON-able.

        Args:
            name: of the checkpoint.
            step: the candidate's; ``None`` for the first that has values.

        Returns:
            ``steps`` that can be asked for, ``step``, ``rows`` and ``channels`` that are shown, ``candidate``,
            ``reference`` and ``difference`` (``dtype``, ``shape``, ``slice``, ``low``, ``high``), ``histogram``
            (``edges``, ``candidate``, ``reference``), ``note``.

        Raises:
            LookupError: no recording has values of it, in that step.
            ValueError: it is no checkpoint, or a recording is damaged.
        """
        for recording in RECORDINGS:
            opened = self._recording(recording)
            if opened is None:
                continue
            candidate, reference, rows = opened
            chosen = [row for row in rows if not is_head(name) or None not in (row.candidate.head, row.reference.head)]
            steps = sorted({row.candidate.step for row in chosen})
            for one in steps if step is None else [step]:
                of_step = [row for row in chosen if row.candidate.step == one]
                found = _both(candidate, reference, name, of_step)
                if found is not None:
                    note = "" if recording == TRACE else recording
                    return {"steps": steps, "step": one, "note": note, **_shown(*found)}
        raise LookupError(f"no values of {name} were kept" + ("" if step is None else f" in step {step}"))

    def _recording(self, name: str) -> tuple[Trace, Trace, tuple[PairedRow, ...]] | None:
        if name not in self._open:
            places = [self._directory / side / name for side in (CANDIDATE, REFERENCE)]
            self._open[name] = None
            if all((place / MANIFEST).is_file() for place in places):
                try:
                    left, right = (open_trace(place) for place in places)
                except UserError as error:
                    raise ValueError(error.message) from error
                self._open[name] = left, right, pair_rows(left, right).rows
        return self._open[name]


def _both(
    candidate: Trace, reference: Trace, name: str, rows: Sequence[PairedRow]
) -> tuple[torch.Tensor, torch.Tensor, list[PairedRow]] | None:
    """The same rows of both sides; ``None`` where a side has no values of them."""
    if not rows:
        return None
    left = gather(candidate, name, [row.candidate for row in rows])
    right = gather(reference, name, [row.reference for row in rows])
    if left is None or right is None:
        return None
    both = sorted(set(left.rows) & set(right.rows))
    if not both:
        return None
    at = [{row: index for index, row in enumerate(side.rows)} for side in (left, right)]
    a, b, _ = reconcile(left.tensor[[at[0][row] for row in both]], right.tensor[[at[1][row] for row in both]])
    return a, b, [rows[row] for row in both]


def _shown(a: torch.Tensor, b: torch.Tensor, rows: Sequence[PairedRow]) -> dict[str, Any]:
    """The rows and channels that differ most, with their neighbours in nothing but order."""
    shape = [list(a.shape), list(b.shape)]
    dtypes = [str(one.dtype).removeprefix("torch.") for one in (a, b)]
    width = max(1, a[0].numel()) if len(a) else 1
    kept = max(1, min(len(a), ELEMENTS // width))
    left, right = (one[:kept].reshape(kept, -1)[:, :ELEMENTS].double() for one in (a, b))
    difference = (left - right).nan_to_num(nan=0.0, posinf=1e300, neginf=-1e300).abs()
    at_rows = difference.amax(1).topk(min(ROWS, kept)).indices.sort().values
    at_channels = difference.amax(0).topk(min(CHANNELS, difference.shape[1])).indices.sort().values

    def side(values: torch.Tensor, dtype: str, form: list[int]) -> dict[str, Any]:
        part = values[at_rows][:, at_channels]
        finite = values[torch.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
        return {"dtype": dtype, "shape": form, "slice": _plain(part.tolist()), "low": low, "high": high}

    named = [f"{row.key.request} {row.key.position}" for row in rows]
    return {
        "rows": [named[index] for index in at_rows.tolist()],
        "channels": at_channels.tolist(),
        CANDIDATE: side(left, dtypes[0], shape[0]),
        REFERENCE: side(right, dtypes[1], shape[1]),
        "difference": side(left - right, "float64", shape[0]),
        "histogram": _histogram(left, right),
    }


def _histogram(left: torch.Tensor, right: torch.Tensor) -> Mapping[str, Any] | None:
    """Both over the same edges; ``None`` without two different finite values."""
    finite = [one[torch.isfinite(one)] for one in (left, right)]
    if not all(one.numel() for one in finite):
        return None
    low, high = min(float(one.min()) for one in finite), max(float(one.max()) for one in finite)
    if not low < high:
        return None
    counts = [torch.histc(one, BARS, low, high).to(torch.int64).tolist() for one in finite]
    edges = [low + (high - low) * at / BARS for at in range(BARS + 1)]
    return {"edges": edges, CANDIDATE: counts[0], REFERENCE: counts[1]}


def _plain(rows: list[list[float]]) -> list[list[float | str]]:
    """Numbers that JSON has, and text for the others."""
    return [[value if isfinite(value) else str(value) for value in row] for row in rows]
