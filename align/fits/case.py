"""What is to be explained: one accused checkpoint, what it should be, and all that may explain the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from align.checkpoints.bounds import unit_roundoff

Tensor = torch.Tensor
#: What each operator calls its inputs; ``?`` marks those that may be missing.
INPUTS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("x", "weight"),
    "linear": ("x", "weight", "bias?"),
    "rope": ("x",),
    "attention": ("q", "k", "v", "sinks?"),
    "silu_mul": ("gate", "up"),
    "gelu_mul": ("gate", "up"),
    "add": ("a", "b"),
    "topk_weights": ("logits",),
}


@dataclass(frozen=True)
class FitCase:
    """One accused checkpoint of one side.

    Attributes:
        name: of the checkpoint, ``layers.2.attn.q_rope``.
        operator: that produces it, as in ``operators.tsv``; another name limits the fits to those of any operator.
        bad: ``[T, *channels]``, what was recorded. Of two channel axes the first are heads.
        ref: of the same shape, what is expected: recomputed in float64 from the inputs that this side recorded
            (``against="oracle"``), or recorded by the other side (``against="other"``).
        noise: of the same shape, the largest error of each element that a right kernel may have; or a number relative
            to the magnitude, for which the element's own and the root mean square of its row are added.
        positions: int64 ``[T]``, of the rows in their requests.
        dtype: the model's, ``bfloat16``.
        against: where ``ref`` comes from. The other side's errs as well, so twice as much may err in common.
        requests: whose the rows are, ``T`` names; empty if all are of one request.
        inputs: what the operator read, see :data:`INPUTS`. Of ``attention`` ``k`` and ``v`` hold all keys and values
            ``[S, kv_heads, head_dim]`` of one request, key j at position j, and all rows are of that request.
        parameters: what is known of the model and the call: ``eps``, ``rope`` (as :func:`rope_frequencies` reads it),
            ``interleaved`` (of rope, false for halves), ``seq_len``, ``scale``, ``window``, ``softcap``, ``head_dim``,
            ``hidden``, ``kv_heads``, ``tp``, ``layers``, ``activation``, ``routed_scaling_factor``. What is missing
            is not tried.
        others: tensors of other checkpoints that the result may have been exchanged with, by name: as they should be,
            so not computed from ``bad``.
        weights: other weights that may have been used, by name.
        previous: ``[≥ T, *channels]``, what the same buffer held before.
    """

    name: str
    operator: str
    bad: Tensor
    ref: Tensor
    noise: Tensor | float
    positions: Tensor
    dtype: str
    against: Literal["oracle", "other"] = "oracle"
    requests: tuple[str, ...] = ()
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    previous: Tensor | None = None

    def __post_init__(self) -> None:
        """Check what everything else relies on.

        Raises:
            ValueError: shapes that do not belong together, no rows, integers, or an unknown dtype.
        """
        unit_roundoff(self.dtype)
        if not (self.bad.is_floating_point() and self.ref.is_floating_point()):
            raise ValueError(f"{self.name}: integers are equal or not; there is nothing to fit")
        shape = tuple(self.bad.shape)
        if len(shape) not in (2, 3) or not prod(shape):
            raise ValueError(f"{self.name}: a fit needs rows of channels or of heads and channels, not {list(shape)}")
        if tuple(self.ref.shape) != shape:
            raise ValueError(f"{self.name}: recorded {list(shape)}, expected {list(self.ref.shape)}")
        if isinstance(self.noise, Tensor) and tuple(self.noise.shape) != shape:
            raise ValueError(f"{self.name}: recorded {list(shape)}, bounds {list(self.noise.shape)}")
        if tuple(self.positions.shape) != shape[:1]:
            raise ValueError(f"{self.name}: {shape[0]} rows, positions {list(self.positions.shape)}")
        if self.requests and len(self.requests) != shape[0]:
            raise ValueError(f"{self.name}: {shape[0]} rows, {len(self.requests)} names of requests")
        wanted = INPUTS.get(self.operator, ())
        strangers = [name for name in self.inputs if name not in wanted and name + "?" not in wanted]
        if wanted and strangers:
            raise ValueError(f"{self.name}: {self.operator} has no input {strangers[0]!r}; valid: {', '.join(wanted)}")

    @property
    def unit(self) -> float:
        """Unit roundoff of the dtype."""
        return unit_roundoff(self.dtype)

    def has(self, *names: str) -> bool:
        """Whether all these inputs are given."""
        return all(name in self.inputs for name in names)

    def number(self, name: str) -> float | None:
        """A parameter as a number; ``None`` if it is not given."""
        value = self.parameters.get(name)
        return None if value is None else float(value)
