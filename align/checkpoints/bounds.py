"""What rounding may do to an operator's result: ``operators.tsv``, which is its only home.

An element's error is measured in units of ``u × magnitude``: ``u`` is the unit roundoff of the model's dtype and the
magnitude is what :mod:`align.checkpoints.recompute` derives for the operator. One rounding to nearest moves a number by
at most one such unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: Bits of the significand, the hidden one included.
_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}


@dataclass(frozen=True)
class OperatorBound:
    """One row of ``operators.tsv``.

    Attributes:
        operator: as in the table of checkpoints.
        max_roundings: largest error of one element in units of ``u × magnitude``; 0 if the operator only copies.
        gain_roundings: how far the elements of one token may err in common, as a factor, in units of ``u``.
        derivation: why, in words.
    """

    operator: str
    max_roundings: float
    gain_roundings: float
    derivation: str


@lru_cache(maxsize=1)
def bounds() -> Mapping[str, OperatorBound]:
    """All rows, by operator. Operators that are not here are not recomputed."""
    lines = Path(__file__).with_name("operators.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == ["operator", "max_roundings", "gain_roundings", "derivation"], lines[0]
    found = {}
    for line in lines[1:]:
        operator, largest, gain, derivation = line.split("\t")
        found[operator] = OperatorBound(operator, float(largest), float(gain), derivation)
    return found


def unit_roundoff(dtype: object) -> float:
    """The largest relative error of one rounding to nearest: ``2 ** -precision`` (bfloat16 2^-8, float16 2^-11).

    ``dtype`` is a torch dtype or its name.

    Raises:
        ValueError: a dtype without a known precision.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _PRECISION:
        raise ValueError(f"unknown dtype {name!r}; valid: {', '.join(_PRECISION)}")
    return 2.0 ** -_PRECISION[name]
