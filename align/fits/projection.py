"""Linear layers: bias, transposed weights, and the part of one rank that was not reduced."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.fits.operators import linear, proposal
from align.sentences import said


def propose(measured: Measured) -> Iterator[Proposal]:
    """What each change gives. A bias left out or added twice is among the terms."""
    case = measured.case
    if not case.has("x", "weight"):
        return
    dtype = getattr(torch, case.dtype)
    x, weight, bias = case.inputs["x"], case.inputs["weight"], case.inputs.get("bias")
    out, inner = weight.shape
    if out == inner:
        exact = linear(x, weight.T, bias, dtype)
        yield proposal(measured, "weight_transposed", exact, said("fit.transposed"), {"how": "transposed"})
    elif out > 1 and inner > 1:
        exact = linear(x, weight.reshape(inner, out).T, bias, dtype)
        text = said("fit.read_transposed")
        yield proposal(measured, "weight_transposed", exact, text, {"how": "read as [in, out]"})
    ranks = int(case.number("tp") or 1)
    if ranks > 1 and inner % ranks == 0:
        part = inner // ranks
        for rank in range(ranks):
            one = slice(rank * part, (rank + 1) * part)
            exact = linear(x[:, one], weight[:, one], bias, dtype)
            text = said("fit.part_of_rank", rank=rank, ranks=ranks)
            yield proposal(measured, "partial_sum", exact, text, {"rank": rank, "ranks": ranks})
