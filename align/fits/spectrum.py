"""What the differences in angle of rotated pairs say about frequencies and positions.

``seen`` is complex ``[T, F]``: for each row and frequency the sum over heads of ``bad × conj(ref)``. Its argument is
the angle by which ``bad`` is turned further than ``ref``, its size how well that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from align.fits.search import minimise

Tensor = torch.Tensor
WIDE = torch.float64
#: Positions beyond the last one that a row may have been given.
_BEYOND = 4096
#: Frequency estimates between two that the positions can tell apart.
_FINER = 8


def phases(bad: Tensor, ref: Tensor) -> Tensor:
    """``seen`` of complex pairs ``[T, H, F]``; rows that are right count too, as they bound the angles."""
    return (bad * ref.conj()).sum(1)


def agreement(seen: Tensor, positions: Tensor, errors: Tensor) -> float:
    """How much of ``seen`` frequencies that are off by ``errors`` ``[F]`` explain, in its own units."""
    turn = torch.polar(torch.ones_like(seen.real), -positions.to(WIDE)[:, None] * errors[None, :])
    return float((seen * turn).real.sum())


def frequency_errors(seen: Tensor, positions: Tensor) -> Tensor:
    """By how much each frequency is off, in radians per position, float64 ``[F]``: the peak of its spectrum."""
    start, stop = int(positions.min()), int(positions.max())
    length = 1
    while length < (stop - start + 1) * _FINER:
        length *= 2
    line = torch.zeros(length, seen.shape[1], dtype=seen.dtype)
    line.index_add_(0, positions - start, seen)
    steps = torch.fft.fftfreq(length, dtype=WIDE) * (2 * torch.pi)
    offset = torch.polar(torch.ones(length, dtype=WIDE), -steps * start)
    peak = (torch.fft.fft(line, dim=0) * offset[:, None]).real.argmax(0)
    found: Tensor = steps[peak]
    where = positions.to(WIDE)[:, None]
    for _ in range(4):  # least squares of the angles that are left, which are small now
        left = seen * torch.polar(torch.ones_like(seen.real), -where * found[None, :])
        weight = seen.abs() * where.square()
        found = found + (left.imag * where).sum(0) / weight.sum(0).clamp_min(1e-300)
    return found


def fit_base(seen: Tensor, positions: Tensor, inverse: Tensor, expected: float, known: Sequence[float]) -> float:
    """The base that explains most: frequencies are ``base^(-j / F)`` times the expected ones' remainder."""
    count = len(inverse)
    exponents = torch.arange(count, dtype=WIDE) / count
    measured = inverse + frequency_errors(seen, positions)
    usable = (measured > 0) & (exponents > 0)
    guesses = [float(torch.log(torch.tensor(expected)))]
    if bool(usable.any()):
        logs = -torch.log(measured[usable] / inverse[usable]) / exponents[usable]
        weight = (inverse[usable] * exponents[usable]).square() * seen.abs().sum(0)[usable]
        guesses.append(guesses[0] + float((logs * weight).sum() / weight.sum()))
        guesses += [guesses[0] + float(one) for one in logs]
    guesses += [float(torch.log(torch.tensor(base, dtype=WIDE))) for base in known]

    def cost(log_base: float) -> float:
        changed = inverse * torch.exp((guesses[0] - log_base) * exponents)
        return -agreement(seen, positions, changed - inverse)

    return float(torch.exp(torch.tensor(_around(cost, guesses, 2e-3), dtype=WIDE)))


def fit_stretch(seen: Tensor, positions: Tensor, inverse: Tensor, known: Sequence[float]) -> float:
    """The factor on all frequencies that explains most."""
    ratios = 1 + frequency_errors(seen, positions) / inverse
    guesses = [1.0, *(float(one) for one in ratios), *known]

    def cost(factor: float) -> float:
        return -agreement(seen, positions, inverse * (factor - 1))

    return _around(cost, guesses, 1e-3)


def _around(cost: Callable[[float], float], guesses: Sequence[float], width: float) -> float:
    """The best of some guesses, made better nearby."""
    best = min(guesses, key=cost)
    reach = width * max(abs(best), 1.0)
    return minimise(cost, [best + reach * step / 16 for step in range(-16, 17)], 40)[0]


def best_positions(seen: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """int64 ``[T]``: the position that explains each row best, of those from 0 to a little beyond the last."""
    most = int(positions.max()) + 1
    tried = torch.arange(most + min(_BEYOND, most + 64))
    table = torch.polar(torch.ones(len(inverse), len(tried), dtype=WIDE), -inverse[:, None] * tried[None, :].to(WIDE))
    own = torch.polar(torch.ones_like(seen.real), positions.to(WIDE)[:, None] * inverse[None, :])
    turned = seen * own
    return torch.cat([(part @ table).real.argmax(1) for part in turned.split(256)])


def part_of_a_position(seen: Tensor, inverse: Tensor) -> float:
    """By which part of a position, between -1 and 1, all rows are turned too far: one angle for each frequency."""

    def cost(moved: float) -> float:
        turn = torch.polar(torch.ones_like(inverse), -moved * inverse)
        return -float((seen * turn[None, :]).real.sum())

    return minimise(cost, [step / 32 for step in range(-32, 33)])[0]
