"""The result: one explanation that fits, and what was proposed before it was tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

import torch

from align.sentences import Said, text_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Proposal:
    """What the accused result would be if a fault of some kind were there.

    Attributes:
        kind: a row of ``kinds.tsv``.
        value: float64 of the case's shape.
        bound: of the same shape, what rounding may add to it.
        text: what was found, one clause with its numbers.
        parameters: numbers and names, JSON-able.
        free: how many numbers were fitted or chosen to make it.
        scoped: whether it may hold for some rows, heads or channels alone.
    """

    kind: str
    value: Tensor
    bound: Tensor
    text: Said
    parameters: Mapping[str, Any] = field(default_factory=dict)
    free: int = 0
    scoped: bool = True


@dataclass(frozen=True)
class Fit:
    """One kind of fault that explains an error.

    Attributes:
        kind: a row of ``kinds.tsv``.
        explains: whether it reproduces the recorded result down to the noise. Otherwise it is a pattern: what is
            known of an error that nothing reproduces.
        share: of the error's energy that is explained, over the elements that are beyond the noise (over all if none
            is by itself); ``None`` for patterns.
        residual: root mean square of what is left, in units of the noise bound; ``None`` for patterns.
        parameters: the fitted numbers and names; ``tokens``, ``heads`` or ``channels`` if only some are concerned.
        free: how many numbers were fitted: fewer is simpler.
        told: the evidence, one sentence.
    """

    kind: str
    explains: bool
    share: float | None
    residual: float | None
    parameters: Mapping[str, Any]
    free: int
    told: Said

    @property
    def text(self) -> str:
        """``told``, in English."""
        return text_of(self.told)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; numbers that are not finite become text."""
        plain: dict[str, Any] = _plain({**asdict(self), "parameters": dict(self.parameters), "text": self.text})
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Fit:
        """The inverse of :meth:`to_dict`, but for numbers that became text."""
        return cls(**{key: value for key, value in plain.items() if key != "text"})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
