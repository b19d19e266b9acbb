"""The best value of one unknown number: a grid, then a golden section around its best point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

_GOLDEN = (sqrt(5) - 1) / 2


def minimise(cost: Callable[[float], float], grid: Sequence[float], steps: int = 48) -> tuple[float, float]:
    """The argument and the smallest cost; the minimum is taken to lie next to the best point of the grid.

    ``cost`` may return NaN, which is worse than any number.
    """
    assert len(grid) > 1
    costs = [_number(cost(one)) for one in grid]
    best = min(range(len(grid)), key=costs.__getitem__)
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    one, two = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    cost_one, cost_two = _number(cost(one)), _number(cost(two))
    for _ in range(steps):
        if cost_one < cost_two:
            high, two, cost_two = two, one, cost_one
            one = high - _GOLDEN * (high - low)
            cost_one = _number(cost(one))
        else:
            low, one, cost_one = one, two, cost_two
            two = low + _GOLDEN * (high - low)
            cost_two = _number(cost(two))
    return min((cost_one, one), (cost_two, two), (costs[best], grid[best]))[1::-1]


def _number(value: float) -> float:
    return float("inf") if value != value else value
