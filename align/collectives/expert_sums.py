"""What explains that a layer of experts does not give the sum of its ranks' parts, each with its number.

With ``R`` the routed experts' sum and ``S`` what the shared ones add, a rank may hold its own part alone (the reduce is
missing), or ``a R + b S``: a factor of the group's size is a reduce that was done twice, on one of both or on all; a
factor of 0 is a part that was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from align.collectives.hypotheses import DOUBLED, MISSING, WEIGHTED, State, Tried
from align.compare.expert_sum import ExpertParts
from align.sentences import said

Tensor = torch.Tensor
#: What a fit may leave, relative L2: far more than rounding in bfloat16, far less than a part of one rank.
_LEFT = 0.02
_SMALL = torch.finfo(torch.float32).tiny


def wrong_ranks(parts: ExpertParts, results: Mapping[int, Tensor]) -> list[int]:
    """Ranks that do not hold the sum, relative L2."""
    total = parts.expected.total
    return [rank for rank, value in results.items() if _left(value, total) > _LEFT]


def sums_tried(parts: ExpertParts, results: Mapping[int, Tensor]) -> tuple[Tried, ...]:
    """Every hypothesis about one step; empty if no rank is wrong by more than rounding."""
    wrong = wrong_ranks(parts, results)
    if not wrong:
        return ()
    return _missing(parts, results, wrong), *_factors(parts, results, wrong)


def _left(value: Tensor, expected: Tensor) -> float:
    wide = value.float()
    return float((wide - expected).norm() / expected.norm().clamp_min(_SMALL))


def _missing(parts: ExpertParts, results: Mapping[int, Tensor], wrong: Sequence[int]) -> Tried:
    left = max(_left(results[rank], parts.own(rank)) for rank in wrong)
    fits = left <= _LEFT
    key = "hypothesis.experts_missing" if fits else "hypothesis.experts_not_missing"
    what = said(key, ranks=list(wrong), residual=left)
    return Tried(MISSING, "fits" if fits else "refuted", what, left, tuple(wrong) if fits else ())


def _factors(parts: ExpertParts, results: Mapping[int, Tensor], wrong: Sequence[int]) -> tuple[Tried, Tried]:
    shared = parts.shared_sum
    columns = [parts.routed_sum, *([] if shared is None else [shared])]
    basis = torch.stack([one.double().flatten() for one in columns])
    size = len(parts.routed)
    found, left = {}, 0.0
    for rank in wrong:
        value = results[rank].double().flatten()
        solved = torch.linalg.lstsq(basis @ basis.T, (basis @ value)[:, None], driver="gelsd").solution.flatten()
        found[rank] = [round(one, 4) for one in solved.tolist()]
        left = max(left, _left(results[rank], (solved @ basis).reshape(columns[0].shape).float()))
    routed, beside = (*found[wrong[0]], 1.0)[:2]
    numbers = {
        "factors": {str(rank): one for rank, one in found.items()}, "routed": routed, "shared": beside, "size": size,
    }  # fmt: skip
    about = {"routed": routed, "shared": beside, "size": size, "residual": left}
    many = [_near(one, size) for one in (routed, beside)]
    none = [_near(one, 0) for one in (routed, beside)]
    plain = [_near(one, 1) for one in (routed, beside)]
    clear = left <= _LEFT and all(any(of) for of in zip(many, none, plain, strict=True))
    doubled: State = "fits" if clear and any(many) and not any(none) else "refuted"
    which = "both" if all(many) or (many[0] and shared is None) else "routed" if many[0] else "shared"
    key = f"hypothesis.experts_doubled_{which}" if doubled == "fits" else "hypothesis.experts_not_doubled"
    ratio = {"ratio": routed if many[0] else beside, "part": which} if doubled == "fits" else {}
    first = Tried(
        DOUBLED, doubled, said(key, **about), left, tuple(wrong) if doubled == "fits" else (), numbers | ratio
    )
    absent: State = "fits" if clear and any(none) else "refuted"
    lost = "routed" if none[0] else "shared"
    key = f"hypothesis.experts_without_{lost}" if absent == "fits" else "hypothesis.experts_factors"
    gone = {"part": lost} if absent == "fits" else {}
    return first, Tried(
        WEIGHTED, absent, said(key, **about), left, tuple(wrong) if absent == "fits" else (), numbers | gone
    )


def _near(value: float, whole: float) -> bool:
    return abs(value - whole) <= _LEFT * max(1.0, whole)
