"""How far the logprobs of two right engines may lie apart, from the dtype alone.

Both engines round the last logits to the model's dtype. A logit of magnitude ``m`` is then off by at most
half a unit in the last place, ``ulp(m) / 2``. The margin between two ids is a difference of two logits, and
two engines disagree about it by at most ``2 * 2 * ulp / 2 = 2 ulp`` from this last rounding alone: that is
the floor, below which no disagreement means anything.

Rounding inside the layers adds to it. Errors that do not know of each other grow with the root of their
number: with about 10 roundings per layer, ``L`` layers, a relative error of 0.4 ulp each and logits of
deviation 2, one side's logits are off by ``0.0095 * sqrt(L)`` in bfloat16, two sides differ by sqrt(2) more,
and the largest of thousands of samples is four times that: about ``0.9 * sqrt(L)`` floors. (Measured against
float32 with the golden engine, one side: 0.074 for 4 layers, 0.27 for 30; predicted: 0.08 and 0.21 to 0.31
for deviations of 2 to 3.) The cap is three times the prediction for two sides. Logprobs that differ by more
are not rounding, and then only the floor is excused: a fault must not cover itself with the noise that it
makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, isfinite, log2, sqrt
from statistics import NormalDist

#: Bits of the significand, the hidden one included.
PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}

#: Typical magnitude of the best logit of the presets (7 to 8 for qwen3); the ulp is taken there.
LOGIT_MAGNITUDE = 7.0
FLOOR_ULPS = 2
#: The cap in floors, for one layer; grows with the root of the number of layers.
CAP_FLOORS = 3
#: A run shows some hundred logprobs; the largest difference of this many is what right engines may differ by.
MANY = 4000
#: A largest difference of fewer than this says nothing about that of many.
FEW = 10


def ulp(magnitude: float, dtype: str) -> float:
    """Distance between neighbouring values of ``dtype`` around ``magnitude`` (normal range).

    Raises:
        ValueError: unknown dtype, or a magnitude that is not a positive finite number.
    """
    if dtype not in PRECISION:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(PRECISION)}")
    if not isfinite(magnitude) or magnitude <= 0:
        raise ValueError(f"the magnitude must be positive and finite, got {magnitude}")
    return float(2.0 ** (floor(log2(magnitude)) - PRECISION[dtype] + 1))


@dataclass(frozen=True)
class NoisePolicy:
    """What counts as noise between two sides' logprobs (natural log), apart from any result.

    Attributes:
        floor: differences up to this are always noise.
        cap: a run that is noisier than this is not excused by its noise.
    """

    floor: float
    cap: float

    def __post_init__(self) -> None:
        if not (isfinite(self.floor) and isfinite(self.cap) and 0 <= self.floor <= self.cap):
            raise ValueError(f"noise needs 0 <= floor <= cap, got floor={self.floor} cap={self.cap}")

    @classmethod
    def for_dtype(cls, dtype: str, layers: int = 4, logit_magnitude: float = LOGIT_MAGNITUDE) -> NoisePolicy:
        """The policy of a dtype and a number of decoder layers; see the module's text for the derivation."""
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        base = FLOOR_ULPS * ulp(logit_magnitude, dtype)
        return cls(floor=base, cap=CAP_FLOORS * sqrt(layers) * base)

    def at(self, peak: float, dtype: str) -> NoisePolicy:
        """This policy for logits of magnitude ``peak``, as a run recorded it: two units in the last place there.

        The cap stays: larger logits make the last rounding coarser, not the roundings before it.
        """
        if not isfinite(peak) or peak <= 0:
            return self
        return NoisePolicy(floor=min(self.cap, max(self.floor, FLOOR_ULPS * ulp(peak, dtype))), cap=self.cap)

    def tolerance(self, measured: float, samples: int = MANY) -> float:
        """By how much two right engines may differ about one logprob: the noise, at least the floor.

        The largest of ``samples`` differences stands for that of :data:`MANY`: for errors of a normal distribution both
        are known multiples of its deviation (60 samples: 2.3, 4,000: 3.6). Above the cap only the floor is explained.
        """
        if measured > self.cap:
            return self.floor
        reached = measured * _expected_maximum(MANY) / _expected_maximum(min(max(samples, FEW), MANY))
        return max(min(reached, self.cap), self.floor)


def _expected_maximum(samples: int) -> float:
    """Of independent normal samples, in deviations (Blom 1958)."""
    return NormalDist().inv_cdf((samples - 0.375) / (samples + 0.25))
