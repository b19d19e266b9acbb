"""Judges the error that an operator added, from the sums that were kept of it inside the worker.

With ``e`` the error and ``r`` the recomputed result of an element, both divided by the element's magnitude (see
:mod:`align.checkpoints.recompute`), and ``u`` the unit roundoff of the dtype, three things must hold for an operator
that only rounds:

* **element**: ``|e| <= c u`` for ``c`` roundings. A bound, not a matter of chance.
* **gain**: ``sum(e r) / sum(r r)``, the factor by which a token, channel or head is too large or too small. Roundings
  that do not know of each other have a deviation of at most ``sqrt(c / 3) u`` each (uniform over ``±u``), the gain one
  of ``sqrt(c / 3) u / sqrt(sum(r r))``; ``z`` times that is allowed, because very many are tested. What may err in
  common is allowed in full: ``gain_roundings`` within one token, and ``c`` within one channel, as the rows of a channel
  may be equal (a repeated token, attention to the first key alone) and are then rounded alike. For the same reason a
  head is tested as if its sums came from one row.
* **norm**: the root mean square of ``e`` over the channels of a token is at most that of independent roundings.

Everything is relative to magnitudes, which are never smaller than the result: so an outlier channel counts as one
channel and not as all of them. Pure functions; the policy is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, prod, sqrt
from typing import Any, Literal

import torch

from align.checkpoints.bounds import OperatorBound, bounds, unit_roundoff
from align.compare.reasons import RowName, Shown, Worst, place, reasons_of
from align.sentences import Said, text_of

__all__ = ["ResidualPolicy", "ResidualVerdict", "Worst", "judge", "largest_of", "place", "shown_by"]

Tensor = torch.Tensor
Outcome = Literal["within", "beyond", "not observable"]


@dataclass(frozen=True)
class ResidualPolicy:
    """What an operator's error may be, apart from any result.

    Attributes:
        dtype: the model's, by name.
        operators: bound of each operator.
        z: deviations allowed to sums of independent roundings. At 6 one of 1e9 tests fails by chance.
        slack: factor on the element's bound, for float32 arithmetic of kernel and recomputation.
    """

    dtype: str
    operators: Mapping[str, OperatorBound]
    z: float = 6.0
    slack: float = 1.02

    @classmethod
    def for_dtype(cls, dtype: str) -> ResidualPolicy:
        """The policy of ``operators.tsv``.

        Raises:
            ValueError: unknown dtype.
        """
        unit_roundoff(dtype)
        return cls(dtype=dtype, operators=dict(bounds()))

    @property
    def unit(self) -> float:
        """Unit roundoff of the dtype."""
        return unit_roundoff(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` restores it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ResidualPolicy:
        """Restore what :meth:`to_json` gave."""
        operators = {name: OperatorBound(**row) for name, row in data["operators"].items()}
        return cls(dtype=data["dtype"], operators=operators, z=data["z"], slack=data["slack"])


@dataclass(frozen=True)
class ResidualVerdict:
    """One operator's error and what it may be.

    Attributes:
        name: the checkpoint.
        operator: that produced it.
        verdict: ``within``, ``beyond`` or ``not observable``.
        why: one sentence for ``beyond`` and ``not observable``, empty otherwise.
        rows: how many rows were recomputed.
        ratio: largest element error in units of ``u × magnitude``.
        allowed: the most that ``ratio`` may be.
        row: which row of its step and which ``channel`` had it, or is not finite; -1 if unknown.
        gain_token, gain_channel, gain_head: worst gains; ``None`` if there was nothing to divide by.
        norm_token: worst root mean square error of a token.
        rel_l2: root of sum e² over sum r² of all tokens.
        row_name: (request, position) that shows it: of an element that is not finite, else of the token or element
            that is farthest beyond its limit. ``None`` if unknown, or if channels or heads alone are beyond.
        non_finite: elements that are not finite although the operator's exact result is.
        worst_by: the test that ``row_name`` is worst by: ``gain``, ``norm``, ``element``; empty without such a row.
        reasons: ``why``, as data.
        requests: of ``beyond``, the requests with a row that is beyond by itself, in the order of the rows. Others may
            be wrong as well, by less than one row can show.
        rows_beyond: how many of the rows are.
    """

    name: str
    operator: str
    verdict: Outcome
    why: str
    rows: int = 0
    ratio: float = 0.0
    allowed: float = 0.0
    row: int = -1
    channel: int = -1
    gain_token: Worst | None = None
    gain_channel: Worst | None = None
    gain_head: Worst | None = None
    norm_token: Worst | None = None
    rel_l2: float | None = None
    row_name: tuple[str, int] | None = None
    non_finite: int = 0
    worst_by: str = ""
    reasons: tuple[Said, ...] = ()
    requests: tuple[str, ...] = ()
    rows_beyond: int = 0


@dataclass(frozen=True)
class WorstSums:
    """What a lean recording keeps of a checkpoint's error in a phase, see :mod:`adapters.probe.lean`.

    Attributes:
        count: rows that were recomputed.
        total: ``[3]`` sums e², r², e·r over all of them.
        rows: ``[K, 3]`` sums of the worst rows; NaN where there are fewer.
        channels: ``[K, 4]`` flat channel and sums of the worst channels.
        heads: ``[H, 3]`` sums of every head.
        width: channels of a row.
    """

    count: int
    total: Tensor
    rows: Tensor
    channels: Tensor
    heads: Tensor
    width: int


def largest_of(maxima: Sequence[Tensor]) -> Tensor:
    """Fold ``NAME#res_max`` of several steps or ranks, ``[4]`` each: the largest ratio, and all counts.

    Row and channel are those of :func:`shown_by`.
    """
    worst = maxima[shown_by(maxima)].clone()
    worst[0] = max((one[0] for one in maxima), key=_size)
    worst[3] = sum(float(one[3]) for one in maxima)
    return worst


def shown_by(maxima: Sequence[Tensor]) -> int:
    """Which of several ``NAME#res_max`` says where: the first with an element that is not finite, else the largest."""
    assert maxima, "nothing to fold"
    broken = next((index for index, one in enumerate(maxima) if one[3] > 0), None)
    return max(range(len(maxima)), key=lambda index: _size(maxima[index][0])) if broken is None else broken


def _size(ratio: Tensor) -> float:
    return inf if ratio.isnan() else float(ratio)


def _worst(values: Tensor, allowed: Tensor, known: Tensor) -> Worst | None:
    """The member with the largest ``|value| / allowed`` among those of ``known``; a limit of 0 allows 0 alone."""
    if not bool(known.any()):
        return None
    excess = (values.abs() / allowed).nan_to_num(nan=0.0, posinf=inf)  # 0 / 0: no error where none is allowed
    index = int(excess.masked_fill(~known, -1.0).argmax())
    return Worst(index, float(values[index]), float(allowed[index]))


def _gain(sums: Tensor, common: float, deviation: float, share: float = 1.0) -> tuple[Worst | None, Tensor]:
    """The worst gain of ``sums`` ``[..., 3]``, and which are beyond; of their squares a ``share`` is independent."""
    _, squared, product = sums.double().reshape(-1, 3).unbind(-1)
    known = squared > 0
    safe = squared.masked_fill(~known, 1.0)
    gains, limits = product / safe, common + deviation / (safe * share).sqrt()
    return _worst(gains, limits, known), known & ~(gains.abs() <= limits)


def judge(
    name: str,
    operator: str,
    policy: ResidualPolicy,
    *,
    tokens: Tensor | None = None,
    largest: Tensor | None = None,
    channels: Tensor | None = None,
    channel_rows: int = 0,
    width: int = 0,
    row_names: Sequence[RowName] = (),
    largest_name: RowName | None = None,
    step_maxima: Sequence[tuple[float, RowName]] = (),
    worst: WorstSums | None = None,
) -> ResidualVerdict:
    """Judge one checkpoint of one side.

    Args:
        name: the checkpoint.
        operator: that produced it, see :meth:`Structure.operator`.
        policy: what is allowed.
        tokens: ``[R, 3]`` sums of every recomputed row (``#res_tok``): e², r², e·r over channels. Steps are
            concatenated, ranks that hold shards are added. Rows of NaN could not be recomputed.
        largest: ``[4]`` (``#res_max``), folded by :func:`largest_of`.
        channels: ``[3, *channels]`` (``#res_ch``): the same sums over rows. Of two axes the first are heads.
        channel_rows: how many rows ``channels`` sums over; too high a count makes the test of heads milder, not wrong.
        width: number of channels of a row, if ``channels`` is not given.
        row_names: (request, position) of each row of ``tokens``.
        largest_name: (request, position) of the row of ``largest``.
        step_maxima: of each step the largest ratio and its row, as far as they are known.
        worst: what a lean recording kept instead of all ``tokens`` and ``channels``; ``row_names`` are of its rows.
    """
    if worst is not None:
        tokens, width, channel_rows = worst.rows, worst.width, worst.count
    bound = policy.operators.get(operator)
    if bound is None:
        return ResidualVerdict(name, operator, "not observable", f"the operator {operator} is not recomputed")
    known = None if tokens is None else ~tokens.isnan().any(1)
    rows = channel_rows if known is None or worst is not None else int(known.sum())
    if rows == 0 or largest is None:
        return ResidualVerdict(name, operator, "not observable", "no row was recomputed")
    unit = policy.unit
    count = bound.max_roundings
    deviation = sqrt(count / 3) * unit
    common = bound.gain_roundings * unit
    gain_token = norm = gain_channel = gain_head = None
    rel_l2: float | None = None
    wrong = torch.zeros(0, dtype=torch.bool)
    shape = () if channels is None else tuple(channels.shape[1:])
    width = prod(shape) if channels is not None else width
    if tokens is not None and known is not None:
        tokens = tokens.masked_fill(~known[:, None], 0.0)
        gain_token, wrong = _gain(tokens, common, policy.z * deviation)
        total = tokens.double().sum(0) if worst is None else worst.total.double()
        rel_l2 = sqrt(float(total[0] / total[1])) if float(total[1]) > 0 else None
        if width:
            rms = (tokens[:, 0].double() / width).sqrt()
            limit = sqrt(deviation**2 * (1 + policy.z * sqrt(2 / width)) + common**2)
            norm = _worst(rms, torch.full_like(rms, limit), known)
            wrong |= known & ~(rms <= limit)
    if worst is not None and channel_rows:
        gain_channel, _ = _gain(worst.channels[:, 1:], count * unit, policy.z * deviation)
        if gain_channel is not None:
            gain_channel = replace(gain_channel, index=int(worst.channels[gain_channel.index, 0]))
        gain_head, _ = _gain(worst.heads, common, policy.z * deviation, 1 / channel_rows)
    if channels is not None and channel_rows:
        gain_channel, _ = _gain(channels.reshape(3, -1).T, count * unit, policy.z * deviation)
        heads = channels.double().sum(-1).reshape(3, -1).T
        gain_head, _ = _gain(heads, common, policy.z * deviation, 1 / channel_rows)
    ratio, non_finite = float(largest[0]), int(largest[3])
    allowed = count * policy.slack
    measured = Shown(
        ratio, allowed, non_finite, int(largest[2]), largest_name, gain_token, gain_channel, gain_head, norm,
        row_names, has_heads=len(shape) > 1 or (worst is not None and len(worst.heads) > 1),
    )  # fmt: skip
    reasons, row_name, worst_by = reasons_of(measured)
    rows_wrong = [index for index, one in enumerate(wrong.tolist()) if one]
    showing = [row_names[index][0] for index in rows_wrong if index < len(row_names)]
    showing += [name[0] for size, name in step_maxima if not size <= allowed]
    return ResidualVerdict(
        name=name,
        operator=operator,
        verdict="beyond" if reasons else "within",
        why="; ".join(map(text_of, reasons)),
        rows=rows,
        ratio=ratio,
        allowed=allowed,
        row=int(largest[1]),
        channel=int(largest[2]),
        gain_token=gain_token,
        gain_channel=gain_channel,
        gain_head=gain_head,
        norm_token=norm,
        rel_l2=rel_l2,
        row_name=row_name,
        non_finite=non_finite,
        worst_by=worst_by if row_name is not None else "",
        reasons=reasons,
        requests=tuple(dict.fromkeys(showing)),
        rows_beyond=len(rows_wrong),
    )
