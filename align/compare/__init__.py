"""Comparison of two sides. Pure functions: what to do about a result is decided elsewhere."""

from align.compare.noise import NoisePolicy, ulp
from align.compare.tokens import Difference, RequestComparison, TokenComparison, compare_tokens

__all__ = ["Difference", "NoisePolicy", "RequestComparison", "TokenComparison", "compare_tokens", "ulp"]
