"""What a mask hides, from its values."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from align.fa.call import MaskFacts

#: Rows whose first visible column is kept.
MOST_ROWS = 1 << 16
#: Rows whose count of visible columns is kept.
MOST_VISIBLE = 1 << 12


def hidden(mask: torch.Tensor) -> torch.Tensor:
    """``True`` where a mask [..., Q, KV] hides: every value but 0, in each dtype that operators take."""
    return mask if mask.dtype == torch.bool else mask != 0


def mask_facts(mask: torch.Tensor, digest: bool = True) -> MaskFacts:
    """The facts of a mask [..., Q, KV]; its matrices are judged together.

    Raises:
        ValueError: it has fewer than two axes, or nothing in it.
    """
    if mask.dim() < 2 or not mask.numel():
        raise ValueError(f"a mask of shape {tuple(mask.shape)} has no rows and columns")
    hides = hidden(mask.detach()).reshape(-1, *mask.shape[-2:]).cpu()
    matrices, rows, columns = hides.shape
    upper_open = matrices * _above(rows, columns, 1) - _count(hides.triu(1))
    lower_hidden = _count(hides.tril())
    first = None
    if matrices * rows <= MOST_ROWS:
        first = _first_open(hides) if bool(hides[..., 0].any()) else ()
    pattern = _pattern(hides, upper_open, lower_hidden)
    visible = _visible(hides) if pattern == "other" and matrices * rows <= MOST_VISIBLE else None
    return MaskFacts(pattern, upper_open, lower_hidden, first, _digest(hides) if digest else "", visible)


def _pattern(hides: torch.Tensor, upper_open: int, lower_hidden: int) -> str:
    """By counting: four million places are compared with no second mask."""
    matrices, rows, columns = hides.shape
    total = _count(hides)
    if total == hides.numel():
        return "all"
    if not total:
        return "none"
    if not upper_open and not lower_hidden:
        return "causal"
    shift = columns - rows
    for name, first in (("causal right", 1 + shift), ("causal and diagonal", 0)):
        if total == matrices * _above(rows, columns, first) == _count(hides.triu(first)):
            return name
    for name, last in (("past", -1), ("past and diagonal", 0)):
        below = rows * columns - _above(rows, columns, last + 1)
        if total == matrices * below == _count(hides.tril(last)):
            return name
    return "other"


def _first_open(hides: torch.Tensor) -> tuple[int, ...]:
    """Of each row the first visible column, or the width."""
    # argmin gives the first smallest: of a row without a visible place that is column 0, which is hidden.
    at = hides.view(torch.uint8).argmin(dim=-1)
    at = torch.where(hides.all(dim=-1), torch.full_like(at, hides.shape[-1]), at)
    return tuple(at.reshape(-1).tolist())


def _visible(hides: torch.Tensor) -> tuple[int, ...] | None:
    """Of each row how many columns are visible, if those are its first ones."""
    counts = (~hides).sum(-1)
    first = torch.arange(hides.shape[-1]) < counts[..., None]
    return tuple(counts.reshape(-1).tolist()) if torch.equal(first, ~hides) else None


def _above(rows: int, columns: int, first: int) -> int:
    """Places on and above a diagonal."""
    return sum(min(columns, max(0, columns - row - first)) for row in range(rows))


def _count(flags: torch.Tensor) -> int:
    return int(flags.count_nonzero())


def _digest(hides: torch.Tensor) -> str:
    flat = hides.contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.numel())  # one byte a place; numpy may not be installed
    return hashlib.blake2b(data, digest_size=8, person=str(tuple(hides.shape[-2:]))[:16].encode()).hexdigest()
