"""What explains a wrong result of routed experts that several ranks share, from what one side recorded itself.

Each token's result is ``sum of weight × expert(row)``. With the checkpoint's experts, and the rows, ids and weights
that the side recorded, every way of going wrong between dispatch and combine has a result of its own: another expert
than the chosen one computed it (its local number taken for the global one, or numbers that are shifted), rows came home
in another order, their weights were applied twice or not at all, or a rank's part is missing or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from align.checkpoints.recompute import gated_mlp
from align.collectives.hypotheses import DOUBLED, PERMUTED, WEIGHTED, Tried, matched
from align.sentences import Said, raw, said

Tensor = torch.Tensor
ExpertWeights = Callable[[int], "tuple[Tensor, Tensor, Tensor]"]
#: Kinds of findings.
MAP, COMBINE = "expert_map", "combine_weights"
#: What a fit may leave, relative L2: far more than rounding in bfloat16 (0.005), far less than a wrong expert (1).
_LEFT = 0.03
#: Of what is left without the hypothesis.
_SHARE = 0.25
_SMALL = torch.finfo(torch.float32).tiny
#: Of rows that moved: how many must be like something, fewer than are looked at, and how many values they are held to.
_ALIKE, _FEW, _POOL = 0.8, 8, 4096


@dataclass
class Routed:
    """One layer of experts as one side recorded it.

    Attributes:
        x: what the experts read, ``[rows, hidden]``.
        ids: int ``[rows, top_k]``, global ids.
        weights: ``[rows, experts]``, by expert id.
        result: ``[rows, hidden]``, the sum over all ranks.
        experts: of the layer; ``ranks`` share them in a row, or each by its width if ``split``.
        expert: gives an expert's matrices.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    result: Tensor
    experts: int
    ranks: int
    split: bool
    expert: ExpertWeights
    _made: dict[int, Tensor] = field(default_factory=dict)

    def of_expert(self, number: int) -> Tensor:
        """What an expert makes of every row, float32."""
        if number not in self._made:
            self._made[number] = gated_mlp(self.x.float(), *self.expert(number)).value.float()
        return self._made[number]

    def mixed(
        self, of: Callable[[int], int] = int, share: Callable[[Tensor], Tensor] = lambda one: one, rank: int = -1
    ) -> Tensor:
        """The sum if expert ``of(e)`` computes for ``e`` and counts ``share(weight)``; of one rank's experts alone."""
        total = torch.zeros(self.result.shape)
        for number in self.ids.unique().tolist():
            if rank >= 0 and number // self.each != rank:
                continue
            rows = (self.ids == number).any(-1).nonzero()[:, 0]
            total[rows] += self.of_expert(of(number))[rows] * share(self.weights[rows, number].float())[:, None]
        return total

    @property
    def each(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks


def left(value: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return float((value.float() - expected).norm() / expected.norm().clamp_min(_SMALL))


def is_right(given: Routed) -> bool:
    """Whether the result is that of the chosen experts."""
    return left(given.result, given.mixed()) <= _LEFT


def needs(given: Routed, rank: int) -> bool:
    """Whether the chosen experts' result would be wrong without what one rank's experts make of these rows."""
    return not given.split and left(given.mixed() - given.mixed(rank=rank), given.mixed()) > _LEFT


def routed_tried(given: Routed) -> tuple[Tried, ...]:
    """Every hypothesis; empty if the result is right."""
    right = given.mixed()
    before = left(given.result, right)
    if before <= _LEFT:
        return ()
    return tuple(test(given, right, before) for test in (_parts, _map, _combine, _order))


def _fits(residual: float, before: float) -> bool:
    return residual <= _LEFT and residual <= _SHARE * before


def _maps(given: Routed) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Ways to take one expert for another."""
    count, each = given.experts, given.each
    yield "local", lambda one: one % each
    for step in (1, -1):
        yield "shift", lambda one, step=step: (one + step) % count  # type: ignore[misc]
        yield "within", lambda one, step=step: one // each * each + (one % each + step) % each  # type: ignore[misc]
    yield "ranks", lambda one: (one + each) % count
    yield "reverse", lambda one: one // each * each + each - 1 - one % each


def _map(given: Routed, right: Tensor, before: float) -> Tried:
    if given.split:
        return Tried(MAP, "not observable", said("routed.split"))
    best: tuple[float, str, int, Callable[[int], int]] | None = None
    for name, of in _maps(given):
        for rank in (-1, *range(given.ranks)):
            one = of if rank < 0 else (lambda e, of=of, rank=rank: of(e) if e // given.each == rank else e)
            residual = left(given.result, given.mixed(one))
            if best is None or residual < best[0]:
                best = residual, name, rank, one
    assert best is not None
    residual, name, rank, of = best
    fits = _fits(residual, before)
    moved = [(one, of(one)) for one in range(given.experts) if of(one) != one]
    about = [said("routed.expert", expert=one, other=other) for one, other in moved[:4]]
    key = f"routed.map_{name}" if fits else "routed.not_map"
    what = said(key, experts=about, residual=residual, before=before)
    ranks = tuple(range(given.ranks)) if rank < 0 else (rank,)
    numbers = {"map": name, "experts": {str(one): other for one, other in moved}} if fits else {}
    return Tried(MAP, "fits" if fits else "refuted", what, residual, ranks if fits else (), numbers)


def _combine(given: Routed, right: Tensor, before: float) -> Tried:
    chosen = {"twice": lambda one: one.square(), "left_out": torch.ones_like}
    residuals = {name: left(given.result, given.mixed(share=share)) for name, share in chosen.items()}
    name = min(residuals, key=lambda one: residuals[one])
    fits = _fits(residuals[name], before)
    what = said(f"routed.weights_{name}" if fits else "routed.not_weights", residual=residuals[name], before=before)
    numbers = {"weights": name} if fits else {}
    return Tried(COMBINE, "fits" if fits else "refuted", what, residuals[name], (), numbers)


def _order(given: Routed, right: Tensor, before: float) -> Tried:
    rows = len(right)
    order = matched(given.result.float(), right) if rows > 1 else None
    moved = [] if order is None else [(at, one) for at, one in enumerate(order.tolist()) if at != one]
    residual = before if order is None else left(given.result, right[order])
    if not moved or not _fits(residual, before):
        return _crossed(given, right)
    place, theirs = (raw(f"row {one}") for one in moved[0])
    what = said("hypothesis.permuted", moved=len(moved), rows=rows, place=place, theirs=theirs, residual=residual)
    return Tried(PERMUTED, "fits", what, residual, (), {"moved": len(moved), "rows": rows})


def _crossed(given: Routed, right: Tensor) -> Tried:
    """Whether the experts of one rank give rows what they made, or should have made, of other rows.

    Seen where one of a row's experts is on that rank: what the result has of it is like what some expert there makes of
    some row. A row of another group is not among those that are known, so that a few may be like none.
    """
    nothing = Tried(
        PERMUTED, "refuted", said("hypothesis.not_permuted", rows=len(right)), None, (), {"rows": len(right)}
    )
    if given.split:
        return nothing
    found = [one for rank in range(given.ranks) if (one := _crossing(given, right, rank)) is not None]
    if not found:
        return nothing if len(right) > _FEW else Tried(PERMUTED, "not observable", said("routed.few", rows=len(right)))
    rank, share, moved, rows = max(found, key=lambda one: (one[1], one[2]))
    if share < _ALIKE or moved < _ALIKE * rows / 2:
        return nothing
    what = said("routed.crossed", rank=rank, moved=moved, rows=rows, percent=100 * share)
    numbers = {"like": round(share, 3), "moved": moved, "rows": rows}
    return Tried(PERMUTED, "fits", what, None, (rank,), numbers)


def _crossing(given: Routed, right: Tensor, rank: int) -> tuple[int, float, int, int] | None:
    """``(rank, share of the rows that are like something, how many are not their own, rows)``; ``None`` of too few."""
    own = range(rank * given.each, (rank + 1) * given.each)
    here = given.ids // given.each == rank
    single = (here.sum(-1) == 1).nonzero()[:, 0][: _POOL // given.each]
    if len(single) < _FEW:
        return None
    number = given.ids[single][here[single]].long()
    share = given.weights[single, number].float()[:, None]
    rest = (right - given.mixed(rank=rank))[single]
    found = (given.result[single].float() - rest) / share.clamp_min(_SMALL)
    rows = min(len(right), _POOL // given.each)
    made = torch.cat([given.of_expert(one)[:rows] for one in own])
    distance, place = torch.cdist(found.double(), made.double()).min(1)
    # The rounding of the whole row is in what is left of it when the rest is taken away.
    size = made[place].double().norm(dim=1) + rest.double().norm(dim=1) / share[:, 0].double()
    like = distance <= _LEFT * size
    moved = like & (place != (number - own[0]) * rows + single)
    return rank, float(like.double().mean()), int(moved.sum()), len(single)


def _parts(given: Routed, right: Tensor, before: float) -> Tried:
    """How often each rank's experts are in the result."""
    if given.split:
        factor = float((given.result.float() * right).sum() / right.square().sum().clamp_min(_SMALL))
        residual = left(given.result, factor * right)
        twice = residual <= _LEFT and abs(factor - given.ranks) <= _LEFT * given.ranks
        key = "hypothesis.doubled" if twice else "hypothesis.not_doubled"
        what = said(key, ratio=factor, size=given.ranks, residual=residual)
        return Tried(
            DOUBLED, "fits" if twice else "refuted", what, residual, (), {"ratio": factor, "size": given.ranks}
        )
    parts = torch.stack([given.mixed(rank=rank) for rank in range(given.ranks)])
    columns = parts.double().flatten(1)
    value = given.result.double().flatten()
    solved = torch.linalg.lstsq(columns @ columns.T, (columns @ value)[:, None], driver="gelsd").solution.flatten()
    # Nothing says how often a part counts that is not there: where no row has an expert of that rank.
    sizes = columns.norm(dim=1)
    there = (sizes > _LEFT * sizes.max()).nonzero()[:, 0].tolist()
    factors = {rank: float(solved[rank]) for rank in there}
    residual = left(given.result, (solved @ columns).reshape(right.shape).float())
    told = [said("hypothesis.factor", factor=one, rank=rank) for rank, one in factors.items()]
    numbers = {"factors": {str(rank): round(one, 4) for rank, one in factors.items()}, "size": given.ranks}
    missing = [rank for rank, one in factors.items() if abs(one) <= _LEFT]
    doubled = all(abs(one - given.ranks) <= _LEFT * given.ranks for one in factors.values())
    plain = all(abs(one - round(one)) <= _LEFT for one in factors.values())
    if residual > _LEFT or not plain:
        what = said("hypothesis.not_weighted", factors=told, residual=residual)
        return Tried(WEIGHTED, "refuted", what, residual, (), numbers)
    if doubled:
        ratio = next(iter(factors.values()))
        what = said("hypothesis.doubled", ratio=ratio, size=given.ranks, residual=residual)
        return Tried(DOUBLED, "fits", what, residual, (), {**numbers, "ratio": ratio})
    if missing:
        what = said("hypothesis.left_out", missing=missing, factors=told, residual=residual)
        return Tried(WEIGHTED, "fits", what, residual, tuple(missing), {**numbers, "left_out": missing})
    return Tried(WEIGHTED, "fits", said("hypothesis.weighted", factors=told, residual=residual), residual, (), numbers)


def unexplained(why: str) -> tuple[Tried, ...]:
    """It could not be tried."""
    what: Said = raw(why)
    return (Tried(MAP, "not observable", what),)
