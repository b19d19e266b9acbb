"""Made-up reduces of two or three ranks."""

from __future__ import annotations

import torch

from align.collectives.hypotheses import Reduced

Tensor = torch.Tensor
ROWS, CHANNELS = 7, 16
NAMES = [("r0", at) for at in range(4)] + [("r1", at) for at in range(3)]


def parts(ranks: int = 2, seed: int = 1, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> dict[int, Tensor]:
    """Each rank's summand ``[rows, 16]``."""
    generator = torch.Generator().manual_seed(seed)
    return {rank: torch.randn(rows, CHANNELS, generator=generator).to(dtype) for rank in range(ranks)}


def total(summands: dict[int, Tensor]) -> Tensor:
    """Rounded once, in their dtype."""
    return torch.stack([one.float() for one in summands.values()]).sum(0).to(next(iter(summands.values())).dtype)


def reduced(summands: dict[int, Tensor], results: dict[int, Tensor], **more: object) -> Reduced:
    return Reduced(summands, results, row_names=NAMES, **more)  # type: ignore[arg-type]
