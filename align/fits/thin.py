"""Fewer rows of a large case: recomputing an operator for all of them, many times, would take too long."""

from __future__ import annotations

from dataclasses import replace

import torch

from align.fits.case import FitCase
from align.fits.measured import Measured

Tensor = torch.Tensor
#: Results that one recomputation may have, and the scores that it may take in attention.
RESULTS, SCORES = 1 << 18, 1 << 23
#: Rows that are kept at least.
_FEWEST = 64
#: Inputs with a row for each row of the result.
_BY_ROW = ("x", "q", "gate", "up", "a", "b", "logits")


def thinned(measured: Measured) -> Measured:
    """The case itself if it is small, or some of its rows.

    A quarter are the first positions, without gaps, as angles of rows far apart are ambiguous. The others are chosen
    at random, half of all among the rows that are beyond the noise.
    """
    case = measured.case
    T = len(case.bad)
    most = RESULTS * T // case.bad.numel()
    if case.has("k") and case.bad.dim() == 3:
        most = min(most, SCORES // max(1, case.bad.shape[1] * len(case.inputs["k"])))
    most = max(most, _FEWEST)
    if most >= T:
        return measured
    generator = torch.Generator().manual_seed(0)
    first = torch.argsort(case.positions, stable=True)[: most // 4]
    wrong = torch.nonzero(measured.null.tokens).flatten()
    some_wrong = wrong[torch.randperm(len(wrong), generator=generator)[: most // 2]]
    others = torch.randperm(T, generator=generator)[: most // 4]
    rows = torch.unique(torch.cat((first, some_wrong, others)))
    fewer = Measured(_chosen(case, rows), rows)
    return fewer if fewer.null.any else measured


def _chosen(case: FitCase, rows: Tensor) -> FitCase:
    T = len(case.bad)
    inputs = {name: x[rows] if name in _BY_ROW and len(x) == T else x for name, x in case.inputs.items()}
    return replace(
        case,
        bad=case.bad[rows],
        ref=case.ref[rows],
        noise=case.noise[rows] if isinstance(case.noise, Tensor) else case.noise,
        positions=case.positions[rows],
        requests=tuple(case.requests[int(row)] for row in rows) if case.requests else (),
        inputs=inputs,
        parameters={"seq_len": int(case.positions.max()) + 1, **case.parameters},
        others={name: x[rows] for name, x in case.others.items() if len(x) == T},
        previous=None,
    )
