"""What explains a wrong result of a reduce: each hypothesis of design §8 with the number that speaks for or against it.

With ``p_r`` the summand of rank ``r`` and ``S`` their sum, what a rank holds may be

* ``p_r`` itself: the reduce is missing;
* ``n S``: it was done twice (``n`` ranks);
* by its bits something that this rank held before: a stale buffer;
* the rows of ``S`` in another order, or ``S`` read through a transposed view: permuted rows;
* ``S`` with the rows of one rank's summand in another order: that rank has another order of the batch;
* ``sum c_r p_r``: a rank is left out (0), or enters with a factor.

An expectation fits if no element is further from it than roundings of its magnitude allow. Pure functions of tensors
``[rows, channels]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import tiny
from align.compare.bits import same_bits
from align.sentences import Said, raw, said, text_of

Tensor = torch.Tensor
State = Literal["fits", "refuted", "not observable"]
#: Names of the hypotheses, which are kinds of findings; the first that fits is the one that is told.
MISSING, DOUBLED, STALE, PERMUTED, ORDER, WEIGHTED = (
    "missing_reduce", "doubled_reduce", "stale_buffer", "permuted_rows", "batch_order", "collective",
)  # fmt: skip
#: Roundings beyond those of one reduce: a second sum, a product with a factor.
_MORE_ROUNDINGS = 2
#: Rows whose order is sought; every row is held against every other.
_ROWS = 2048
#: How far from its whole number a coefficient may be, in units of the dtype's roundoff.
_COEFFICIENT = 4.0


@dataclass(frozen=True)
class Tried:
    """One hypothesis that was put to the test.

    Attributes:
        name: of the hypothesis; that of a kind of finding.
        state: ``fits``, ``refuted``, ``not observable``.
        what: with its numbers in words; of ``not observable`` the reason.
        residual: what it leaves unexplained, relative L2; ``None`` if it was not computed.
        ranks: whose results it explains.
        numbers: by name, JSON-able.
    """

    name: str
    state: State
    what: Said
    residual: float | None = None
    ranks: tuple[int, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "name": self.name,
            "state": self.state,
            "what": text_of(self.what),
            "sentence": self.what,
            "residual": self.residual,
            "ranks": list(self.ranks),
            "numbers": dict(self.numbers),
        }


@dataclass(frozen=True)
class Held:
    """Something that a rank held before: what, and its values."""

    what: str
    values: Tensor


@dataclass(frozen=True)
class Reduced:
    """One reduce as all ranks saw it.

    Attributes:
        parts: each rank's summand, ``[rows, channels]``.
        results: what each rank holds afterwards.
        earlier: what a rank held before, the newest first; ``None`` if nobody knows.
        heads: of which the channels may consist, for views by head.
        row_names: of the rows.
    """

    parts: Mapping[int, Tensor]
    results: Mapping[int, Tensor]
    earlier: Mapping[int, Sequence[Held]] | None = None
    heads: int = 0
    row_names: Sequence[tuple[str, int]] = ()

    @property
    def total(self) -> Tensor:
        """float32 ``[rows, channels]``."""
        return torch.stack([part.float() for part in self.parts.values()]).sum(0)

    @property
    def size(self) -> Tensor:
        """Magnitude of the total's elements."""
        return torch.stack([part.float().abs() for part in self.parts.values()]).sum(0)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype


def hypotheses_of(given: Reduced) -> tuple[Tried, ...]:
    """Every hypothesis about a reduce whose result is wrong on a rank at least."""
    wrong = wrong_ranks(given)
    if not wrong:
        return ()
    if not all(bool(part.float().isfinite().all()) for part in given.parts.values()):
        return (Tried(WEIGHTED, "not observable", said("hypothesis.not_finite")),)
    return tuple(test(given, wrong) for test in (_missing, _doubled, _stale, _permuted, _reordered, _weighted))


def first_fit(tried: Sequence[Tried]) -> Tried | None:
    """The one that is told."""
    return next((one for one in tried if one.state == "fits"), None)


def wrong_ranks(given: Reduced) -> list[int]:
    """Ranks whose result is not the sum. Where all are, those that differ from the first."""
    total, size = given.total, given.size
    wrong = [rank for rank, value in given.results.items() if not _near(given, value, total, size)]
    first = next(iter(given.results.values()), None)
    return wrong or [rank for rank, value in given.results.items() if first is None or not same_bits(value, first)]


def _near(given: Reduced, value: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Whether no element is further from what is expected than rounding allows."""
    roundings = len(given.parts) - 1 + _MORE_ROUNDINGS
    allowed = roundings * unit_roundoff(given.dtype) * (size + tiny(given.dtype))
    return bool(((value.float() - expected).abs() <= allowed).all())


def _residual(value: Tensor, expected: Tensor) -> float:
    wide = value.float()
    return float((wide - expected).norm() / wide.norm().clamp_min(torch.finfo(torch.float32).tiny))


# --------------------------------------------------------------------------------------------------- each hypothesis


def _missing(given: Reduced, wrong: Sequence[int]) -> Tried:
    equal = {}
    for rank in wrong:
        part, value = given.parts.get(rank), given.results[rank]
        if part is None:
            return Tried(MISSING, "not observable", said("hypothesis.no_part", rank=rank))
        equal[rank] = float((part == value).float().mean())
    fits = all(share == 1.0 for share in equal.values()) and len(given.parts) > 1
    what = said(
        "hypothesis.missing" if fits else "hypothesis.not_missing", ranks=list(wrong), share=min(equal.values())
    )
    left = max(_residual(given.results[rank], given.parts[rank].float()) for rank in wrong)
    numbers = {"equal_elements": {str(rank): share for rank, share in equal.items()}}
    return Tried(MISSING, "fits" if fits else "refuted", what, left, tuple(wrong) if fits else (), numbers)


def _doubled(given: Reduced, wrong: Sequence[int]) -> Tried:
    total, size, count = given.total, given.size, len(given.parts)
    ratios, left, fits = {}, 0.0, True
    for rank in wrong:
        value = given.results[rank].float()
        ratio = float((value * total).sum() / (total * total).sum().clamp_min(torch.finfo(torch.float32).tiny))
        ratios[rank] = ratio
        left = max(left, _residual(value, ratio * total))
        fits &= _near(given, value, count * total, count * size)
    ratio = ratios[wrong[0]]
    key = "hypothesis.doubled" if fits else "hypothesis.not_doubled"
    what = said(key, ratio=ratio, size=count, residual=left)
    numbers = {"ratio": ratio, "size": count, "ratios": {str(rank): one for rank, one in ratios.items()}}
    return Tried(DOUBLED, "fits" if fits else "refuted", what, left, tuple(wrong) if fits else (), numbers)


def _stale(given: Reduced, wrong: Sequence[int]) -> Tried:
    if given.earlier is None:
        return Tried(STALE, "not observable", said("hypothesis.no_earlier"))
    held, looked = {}, 0
    for rank in wrong:
        for one in given.earlier.get(rank, ()):
            looked += 1
            if same_bits(one.values, given.results[rank]):
                held[rank] = one.what
                break
    if not looked:
        return Tried(STALE, "not observable", said("hypothesis.no_earlier"))
    if len(held) < len(wrong):
        return Tried(STALE, "refuted", said("hypothesis.not_stale", count=looked), numbers={"compared": looked})
    what = said("hypothesis.stale", ranks=list(held), what=held[wrong[0]])
    return Tried(STALE, "fits", what, 0.0, tuple(held), {"holds": {str(rank): one for rank, one in held.items()}})


def _views(given: Reduced) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Ways to read ``[rows, channels]`` wrongly: transposed taken for contiguous, by elements and by heads."""
    rows, channels = given.total.shape
    yield "transposed", lambda one: one.t().reshape(rows, channels)
    yield "transposed back", lambda one: one.reshape(channels, rows).t()
    heads = given.heads
    if heads > 1 and channels % heads == 0:
        yield "heads first", lambda one: one.view(rows, heads, -1).transpose(0, 1).reshape(rows, channels)
        yield "heads last", lambda one: one.reshape(heads, rows, -1).transpose(0, 1).reshape(rows, channels)


def _permuted(given: Reduced, wrong: Sequence[int]) -> Tried:
    total, size = given.total, given.size
    count = len(total)
    if count < 2:
        return Tried(PERMUTED, "not observable", said("hypothesis.one_row"))
    for name, view in _views(given):
        if all(_near(given, given.results[rank], view(total), view(size)) for rank in wrong):
            left = max(_residual(given.results[rank], view(total)) for rank in wrong)
            what = said("hypothesis.permuted_view", view=name, residual=left)
            return Tried(PERMUTED, "fits", what, left, tuple(wrong), {"view": name})
    left = 0.0
    moved: list[tuple[int, int]] = []
    for rank in wrong:
        order = matched(given.results[rank].float(), total)
        if order is None:
            return Tried(PERMUTED, "refuted", said("hypothesis.not_permuted", rows=count), numbers={"rows": count})
        left = max(left, _residual(given.results[rank], total[order]))
        if not _near(given, given.results[rank], total[order], size[order]):
            what = said("hypothesis.not_permuted_near", residual=left)
            return Tried(PERMUTED, "refuted", what, left, numbers={"rows": count})
        moved = moved or _moved(order)
    if not moved:
        return Tried(PERMUTED, "refuted", said("hypothesis.not_permuted", rows=count), numbers={"rows": count})
    return Tried(PERMUTED, "fits", *_ordered("hypothesis.permuted", given, moved, left, wrong))


def _reordered(given: Reduced, wrong: Sequence[int]) -> Tried:
    """One rank's summand with its rows in another order."""
    if len(given.total) < 2:
        return Tried(ORDER, "not observable", said("hypothesis.one_row"))
    best = float("inf")
    # The last rank first: that rank 0 is right and another one is not is by far the more frequent.
    for source in reversed(list(given.parts)):
        rest = given.total - given.parts[source].float()
        left = 0.0
        moved: list[tuple[int, int]] = []
        for rank in wrong:
            remaining = given.results[rank].float() - rest
            order = matched(remaining, given.parts[source].float())
            if order is None:
                break
            expected = rest + given.parts[source].float()[order]
            left = max(left, _residual(given.results[rank], expected))
            if not _near(given, given.results[rank], expected, given.size + given.size[order]):
                break
            moved = moved or _moved(order)
        else:
            if moved:
                what, residual, _, numbers = _ordered("hypothesis.reordered", given, moved, left, wrong, rank=source)
                return Tried(ORDER, "fits", what, residual, (source,), {**numbers, "rank": source})
        best = min(best, left or float("inf"))
    return Tried(ORDER, "refuted", said("hypothesis.not_reordered"), None if best == float("inf") else best)


def _weighted(given: Reduced, wrong: Sequence[int]) -> Tried:
    """The factor of every rank's summand, by least squares."""
    ranks, unit = list(given.parts), unit_roundoff(given.dtype)
    columns = torch.stack([part.double().flatten() for part in given.parts.values()])
    gram = columns @ columns.T
    factors: dict[int, list[float]] = {}
    left, fits = 0.0, True
    for rank in wrong:
        solved = torch.linalg.lstsq(gram, columns @ given.results[rank].double().flatten()[:, None], driver="gelsd")
        factors[rank] = solved.solution.flatten().tolist()
        expected = sum(
            (factor * part.float() for factor, part in zip(factors[rank], given.parts.values(), strict=True)),
            torch.zeros_like(given.total),
        )
        left = max(left, _residual(given.results[rank], expected))
        fits &= _near(given, given.results[rank], expected, given.size * max(1.0, *map(abs, factors[rank])))
    shown = factors[wrong[0]]
    away = [other for other, factor in zip(ranks, shown, strict=True) if abs(factor - 1) > _COEFFICIENT * unit / 4]
    told = [said("hypothesis.factor", factor=factor, rank=rank) for rank, factor in zip(ranks, shown, strict=True)]
    missing = [rank for rank, factor in zip(ranks, shown, strict=True) if abs(factor) <= _COEFFICIENT * unit]
    key = "hypothesis.weighted" if fits and away else "hypothesis.not_weighted"
    if fits and missing:
        key = "hypothesis.left_out"
    numbers = {
        "factors": {str(rank): [round(one, 6) for one in found] for rank, found in factors.items()},
        "left_out": missing,
        "away": away,
    }
    what = said(key, factors=told, residual=left, missing=missing)
    state: State = "fits" if fits and away else "refuted"
    return Tried(WEIGHTED, state, what, left, tuple(missing or away) if state == "fits" else (), numbers)


# ------------------------------------------------------------------------------------------------------ order of rows


def matched(values: Tensor, rows: Tensor) -> Tensor | None:
    """``order`` with ``values ≈ rows[order]``, ``[rows]``; ``None`` if the rows that are nearest are no permutation.

    Rows that are already in their place stay there.
    """
    count = len(rows)
    if count > _ROWS or values.shape != rows.shape or not bool(values.isfinite().all()):
        return None
    distance = torch.cdist(values.double(), rows.double())
    own = distance.diagonal()
    nearest, order = distance.min(1)
    order = torch.where(own <= nearest * (1 + 1e-6), torch.arange(count), order)
    return order if len(set(order.tolist())) == count else None


def _moved(order: Tensor) -> list[tuple[int, int]]:
    return [(at, source) for at, source in enumerate(order.tolist()) if at != source]


def _ordered(
    key: str, given: Reduced, moved: Sequence[tuple[int, int]], left: float, wrong: Sequence[int], **more: Any
) -> tuple[Said, float, tuple[int, ...], dict[str, Any]]:
    at, source = moved[0] if moved else (0, 0)
    names = given.row_names
    place = said("place.row", request=names[at][0], position=names[at][1]) if at < len(names) else raw(f"row {at}")
    theirs = (
        said("place.row", request=names[source][0], position=names[source][1])
        if source < len(names)
        else raw(f"row {source}")
    )
    count = len(given.total)
    what = said(key, moved=len(moved), rows=count, place=place, theirs=theirs, residual=left, **more)
    numbers = {"moved": len(moved), "rows": count, "first": [at, source]}
    return what, left, tuple(wrong), numbers
