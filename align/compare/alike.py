"""Rows whose operator read the same bits on both sides: their results may differ by the operator's roundings alone.

With equal inputs each side is off from the exact result by at most ``c u`` of an element's magnitude
(``operators.tsv``, :mod:`align.checkpoints.recompute`), so two sides differ by at most twice that, and so does the
relative L2 of a row, times the norm of the magnitudes over that of the result (:func:`row_limit`). That is far below
what carried tensors may differ by, and it covers rows that the operator residual did not sample.

Left out: attention, whose result depends on the rows before; sums over ranks, which :mod:`align.compare.collective`
judges; products with a bias, whose size is not known here; sides with different layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import torch

from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.table import Name, Structure, parse
from align.compare.metrics import SLICE_FLOOR
from align.compare.rows import PairedRow, Recorded

Tensor = torch.Tensor
#: As of the element's bound in :mod:`align.compare.residual`: for float32 arithmetic.
SLACK = 1.02
_SINGLE = 2.0**-24
_ATTENTION_BIASED = ("attn.q", "attn.k", "attn.v")


@dataclass(frozen=True)
class Unlike:
    """The row that is farthest beyond its limit.

    Attributes:
        index: among the rows that were compared.
        rel_l2, limit: of its result, and what two right kernels reach.
        rows_total: how many rows are beyond.
        rows_alike: how many rows have equal inputs.
    """

    index: int
    rel_l2: float
    limit: float
    rows_total: int
    rows_alike: int


@dataclass
class Alike:
    """Remembers which rows of each checkpoint are equal, while checkpoints are compared in order.

    Attributes:
        structure: of both sides; ``None`` judges nothing.
        dtype: the model's.
        rows: how many rows are paired.
        config: of the model.
    """

    structure: Structure | None
    dtype: str
    rows: int
    config: Mapping[str, Any] = field(default_factory=dict)
    _equal: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, candidate: Recorded, reference: Recorded, rows: int) -> Alike:
        """For two traces; what their structures do not have in common is not judged."""
        one, other = candidate.structure, reference.structure
        same = one is not None and other is not None and one.tp == other.tp
        return cls(other if same else None, reference.dtype, rows, reference.manifest.get("model") or {})

    def note(self, name: str, indices: Sequence[int], a: Tensor, b: Tensor) -> None:
        """Remember the values ``[N, *channels]`` of both sides at the paired rows ``indices`` ``[N]``."""
        if self.structure is None or a.dtype != b.dtype or not a.is_floating_point():
            return
        equal = torch.zeros(self.rows, dtype=torch.bool)
        # Bits, so that NaN equals itself.
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        left, right = (side.contiguous().view(whole).flatten(1) for side in (a, b))
        equal[torch.tensor(indices)] = (left == right).all(1)
        self._equal[name] = equal

    def judge(
        self, name: str, indices: Sequence[int], rows: Sequence[PairedRow], a: Tensor, b: Tensor
    ) -> Unlike | None:
        """The worst row whose inputs are equal and whose result is not within its roundings; ``None`` if none is."""
        parsed = self._judged(name)
        if parsed is None or self.structure is None:
            return None
        sources = [self._equal.get(str(one)) for one in self.structure.inputs(parsed)]
        alike = torch.ones(self.rows, dtype=torch.bool)
        for source in sources:
            alike &= torch.zeros_like(alike) if source is None else source
        chosen = alike[torch.tensor(indices)].nonzero()[:, 0]
        if not len(chosen):
            return None
        x, y = a[chosen].flatten(1).float(), b[chosen].flatten(1).float()
        same = (x == y) | (x.isnan() & y.isnan())
        off = (x - y).masked_fill(same, 0.0).nan_to_num_(torch.inf, torch.inf, torch.inf).double().norm(dim=1)
        # As for slices: a row far smaller than the others is judged as if it were half as large as they are.
        sizes = y.nan_to_num(0.0, 0.0, 0.0).double().norm(dim=1)
        below = sizes.clamp(min=SLICE_FLOOR * float(sizes.median()))
        relative = torch.where(off == 0, 0.0, off / below)
        operator = self.structure.operator(parsed.kind)
        inner = prod(
            self.structure.size(axis) for one in self.structure.inputs(parsed)[:1] for axis in one.kind.axes[1:]
        )
        limits = torch.tensor(
            [row_limit(operator, self.dtype, inner, rows[index].key.position) for index in chosen.tolist()],
            dtype=torch.float64,
        )
        beyond = ~(relative <= limits)
        if not bool(beyond.any()):
            return None
        excess = torch.where(beyond, (relative / limits).nan_to_num(nan=torch.inf), -1.0)
        worst = int(excess.argmax())
        return Unlike(int(chosen[worst]), float(relative[worst]), float(limits[worst]), int(beyond.sum()), len(chosen))

    def _judged(self, name: str) -> Name | None:
        try:
            parsed = parse(name)
        except ValueError:
            return None
        kind = parsed.kind
        if self.structure is None or kind.integer or kind.shard == "partial" or self._biased(kind.name):
            return None
        operator = self.structure.operator(kind)
        # Attention depends on the rows before, and what a gate lets through may cancel the other summand.
        return parsed if operator in bounds() and operator not in ("attention", "gated_add") else None

    def _biased(self, kind: str) -> bool:
        everywhere = bool(self.config.get("attention_bias"))
        some = everywhere or any(
            one in (self.config.get("architectures") or ()) for one in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
        )
        if kind in _ATTENTION_BIASED:
            return some
        return (kind == "attn.o" and everywhere) or (kind.startswith("mlp.") and bool(self.config.get("mlp_bias")))


def row_limit(operator: str, dtype: str, inner: int = 1, position: int = 0) -> float:
    """Relative L2 by which two right kernels' results of one row may differ if their inputs are equal.

    Twice ``max_roundings × u`` times the norm of the magnitudes over that of the result, which is 1 where magnitudes
    are the result; 2 for ``linear``, whose magnitude adds the typical size of an output, and float32 accumulation over
    ``inner`` products (``2 sqrt(inner) × 2^-24 × |x| |w|`` where ``|y|`` is about ``|x| |w| / sqrt(inner)``); and
    ``sqrt(2)`` for ``rope``, as ``|x cos| + |x' sin|`` of a pair is at most that, with a float32 angle off by ``2^-23``
    of itself, which is at most the position.

    Args:
        operator: of ``operators.tsv``.
        dtype: the model's, by name.
        inner: length of a product's sums.
        position: of the row.
    """
    unit = unit_roundoff(dtype)
    spread = unit
    if operator == "linear":
        spread = 2 * unit + 2 * inner * _SINGLE
    elif operator == "rope":
        spread = sqrt(2) * (unit + 2 * _SINGLE * position)
    return 2 * SLACK * bounds()[operator].max_roundings * spread
