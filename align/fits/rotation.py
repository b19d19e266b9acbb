"""Rotary embedding as complex numbers: one number for each pair of channels, one angle for each frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import Exact, rope_frequencies, tiny

Tensor = torch.Tensor
WIDE = torch.float64


@dataclass(frozen=True)
class Rotation:
    """Frequencies and how channels are paired.

    Attributes:
        inverse: float64 ``[rotated / 2]``, angle per position in radians.
        factor: on cos and sin.
        interleaved: pairs are neighbours (gptj); otherwise the halves (neox).
    """

    inverse: Tensor
    factor: float = 1.0
    interleaved: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, Any], head_dim: int, positions: Tensor) -> Rotation | None:
        """As the model's parameters say; ``None`` if they say too little."""
        rope = parameters.get("rope")
        if rope is None:
            return None
        length = parameters.get("seq_len") or int(positions.max()) + 1
        try:
            inverse, factor = rope_frequencies(rope, head_dim, int(length))
        except ValueError:
            return None
        return cls(inverse.to(WIDE), factor, bool(parameters.get("interleaved", False)))

    def pairs(self, x: Tensor) -> Tensor:
        """``[T, H, D]`` → complex ``[T, H, rotated / 2]``."""
        half = len(self.inverse)
        wide = x[..., : 2 * half].to(WIDE)
        if self.interleaved:
            return torch.complex(wide[..., ::2].contiguous(), wide[..., 1::2].contiguous())
        return torch.complex(wide[..., :half].contiguous(), wide[..., half:].contiguous())

    def joined(self, pairs: Tensor, rest: Tensor) -> Tensor:
        """The inverse of :meth:`pairs`; channels that are not rotated are those of ``rest`` ``[T, H, D]``."""
        parts = (pairs.real, pairs.imag)
        rotated = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return torch.cat((rotated, rest[..., rotated.shape[-1] :].to(WIDE)), -1)

    def angles(self, positions: Tensor) -> Tensor:
        """float64 ``[T, rotated / 2]``."""
        return positions.to(WIDE)[:, None] * self.inverse[None, :]

    def turned(self, x: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
        """``x`` ``[T, H, D]`` turned by ``angles`` ``[T, rotated / 2]``."""
        turn = torch.polar(torch.full_like(angles, factor), angles)
        return self.joined(self.pairs(x) * turn[:, None, :], x)

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """The embedding itself."""
        return self.turned(x, self.angles(positions), self.factor)

    def undo(self, y: Tensor, positions: Tensor) -> Tensor:
        """What was embedded, from the result."""
        return self.turned(y, -self.angles(positions), 1 / self.factor)

    def magnitude(self, x: Tensor, angles: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        """``|x cos| + |x' sin|``, as :func:`align.checkpoints.recompute.rope` derives it; float32 angles included."""
        moved = 2.0**-23 * angles.abs() / unit_roundoff(dtype)
        cos, sin = (angles.cos().abs() + moved)[:, None] * factor, (angles.sin().abs() + moved)[:, None] * factor
        pairs = self.pairs(x)
        one, two = pairs.real.abs(), pairs.imag.abs()
        return self.joined(torch.complex(one * cos + two * sin, two * cos + one * sin), x).abs() + tiny(dtype)

    def exact(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Exact:
        """Value and magnitude of the embedding of ``x``."""
        angles = self.angles(positions)
        return Exact(self.turned(x, angles, self.factor), self.magnitude(x, angles, self.factor, dtype))
