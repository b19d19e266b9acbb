"""Every checkpoint of a result with its scale: what the map of layers and checkpoints shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any, Literal

from pydantic import Field

from align.compare.added import Added
from align.compare.checkpoint import CheckpointComparison
from align.compare.metrics import Metrics
from align.compare.policy import CHANNEL_ROWS, Allowance
from align.compare.spread import SHARES
from align.compare.tensors import TensorComparison
from align.result.parts import Documented, Number, Side
from align.result.plain import plain

#: Digits of the numbers here: they are looked at, and there are many.
_DIGITS = 4


class RowShare(Documented):
    """One row of a checkpoint."""

    request: str
    """Its request."""
    position: int
    """Of the token."""
    rel_l2: Number
    """Of this row alone."""


class SliceShare(Documented):
    """One channel or head of a checkpoint, over all rows."""

    index: int
    """Flat canonical channel, or head."""
    rel_l2: Number
    """Of this slice alone."""


class CellSpread(Documented):
    """How the distance between the sides is spread."""

    shares: list[float]
    """Shares of the rows, 0 to 1."""
    quantiles: list[Number]
    """Relative L2 that no more than such a share of the rows exceed from below; the last is the worst row's."""
    steps: dict[str, Number]
    """By step of the candidate: relative L2 of the rows that it computed."""
    rows: list[RowShare]
    """The worst rows, the worst first."""
    channels: list[SliceShare]
    """The worst channels, the worst first."""
    heads: list[SliceShare]
    """The worst heads; empty for a checkpoint without heads."""


class OwnError(Documented):
    """What the operator of one side added to its own recorded inputs."""

    verdict: Literal["within", "beyond", "not observable"]
    """Beyond what its dtype allows in some test."""
    why: str
    """Empty for ``within``."""
    operator: str
    """That was recomputed."""
    rows: int
    """How many rows were recomputed, on the rank and in the phase that is shown."""
    phase: str
    """Of the worst part."""
    rank: int
    """Of the worst part."""
    test: Literal["element", "row factor", "channel factor", "head factor", "row norm"]
    """Which of the tests is nearest to its limit, or farthest beyond it."""
    value: Number
    """What it measured: roundings of an element's magnitude; a factor minus 1; a root mean square error."""
    allowed: Number
    """The most that it may be, from the dtype and the operator alone."""
    ratio: Number
    """``value`` over ``allowed``."""


class Cell(Documented):
    """One checkpoint on both sides. Null is not known."""

    name: str
    """The checkpoint."""
    layer: int | None
    """Null for what is in front of the first layer and behind the last."""
    kind: str
    """Of the checkpoint: its name without the layer."""
    verdict: Literal["equal", "within", "beyond", "not observable", "not comparable"]
    """By the policy in use."""
    inputs: Literal["equal", "within", "beyond", "unknown"]
    """What its inputs are."""
    why: str
    """Of the verdict, with number and bound."""
    why_told: dict[str, Any] | None = None
    """The same as data; null unless beyond."""
    rows: int
    """Rows that were compared."""
    shape: list[int] = Field(default_factory=list)
    """Of the compared tensors in canonical form, the rows first; empty where digests alone were compared."""
    dtypes: dict[str, str] = Field(default_factory=dict)
    """By side."""
    estimated: bool
    """From random projections, because a side kept no values."""
    error: Number | None
    """Relative L2 of the whole: norm of the difference over the norm of the reference."""
    bound: float
    """What the policy allows the whole to be."""
    ratio: Number | None
    """The largest of whole, worst row, worst head and (from 64 rows on) worst channel, each over its own bound, and of
    rows with equal inputs over what their operator may differ by: above 1 it is beyond."""
    bounds: dict[str, float]
    """The bounds of ``token``, ``channel`` and ``head``."""
    predicted: float
    """Relative L2 that rounding alone predicts between two right sides at this depth."""
    judged_by: str
    """Where the bounds come from."""
    max_abs: Number | None = None
    """Largest absolute difference of an element."""
    max_rel: Number | None = None
    """Largest relative difference of an element; the seeds' threshold is in ``tensors.shown``."""
    cosine: Number | None = None
    """Of the two tensors as vectors."""
    differing: int | None = None
    """Of integers: rows that differ; null of other tensors."""
    seed: bool | None = None
    """Whether the seeds' thresholds accept it."""
    spread: CellSpread | None = None
    """Null of equal tensors, integers and digests."""
    own: dict[str, OwnError] = Field(default_factory=dict)
    """By side; absent where the operator was not recomputed."""


class DriftPoint(Documented):
    """The residual stream that enters a layer."""

    layer: int
    """Which."""
    error: Number
    """Relative L2 between the sides."""
    predicted: float
    """What rounding alone predicts there."""
    bound: float
    """What the policy allows there."""
    cosine: Number | None = None
    """Of both sides' whole tensors as vectors; null in results of an earlier version."""


class CallSite(Documented):
    """Where one side makes some checkpoints."""

    side: Side
    """Whose."""
    kinds: list[str]
    """Of the checkpoints."""
    layers: list[int | None]
    """Of the checkpoints; null for what exists once."""
    phases: list[str]
    """In whose first step the call was seen."""
    function: str
    """As the engine's tap table names it."""
    place: str
    """``file:line name`` of its definition as it ran; empty if it has none."""
    operators: list[list[str]]
    """Device operators that ran inside, with where they were called."""
    tensors: list[list[str]]
    """Argument, dtype and own shape of the tensors that it was given; ``T`` is a row per token."""


def cells_of(compared: TensorComparison) -> list[Cell]:
    """All checkpoints, layer 0 first."""
    return [_cell(compared, one) for one in compared.checkpoints]


def drift_of(compared: TensorComparison) -> list[DriftPoint]:
    """Layer by layer."""
    cosines = {
        one.layer: plain(one.metrics.cosine)
        for one in compared.checkpoints
        if one.kind == "block_in" and one.metrics is not None
    }
    return [
        DriftPoint(
            cosine=cosines.get(layer),
            layer=layer,
            error=_short(error),
            predicted=_float(predicted),
            bound=_float(compared.policy.allowance(f"layers.{layer}.block_in").whole),
        )
        for layer, error, predicted in compared.drift
    ]


def sites_of(compared: TensorComparison) -> list[CallSite]:
    """All calls that were recorded."""
    return [
        CallSite.model_validate(
            {
                "side": one.side,
                "kinds": list(one.kinds),
                "layers": list(one.layers),
                "phases": list(one.phases),
                "function": one.function,
                "place": one.place,
                "operators": [list(each) for each in one.operators],
                "tensors": [list(each) for each in one.tensors],
            }
        )
        for one in compared.sites
    ]


def _cell(compared: TensorComparison, one: CheckpointComparison) -> Cell:
    policy = compared.policy.without_floor() if one.estimated else compared.policy
    allowed, metrics = policy.allowance(one.name), one.metrics
    return Cell(
        name=one.name,
        layer=one.layer,
        kind=one.kind or one.name,
        verdict=one.verdict,
        inputs=one.inputs_state,
        why=one.why,
        why_told=plain(one.said),
        rows=one.rows,
        shape=list(one.shape),
        dtypes=dict(one.dtypes),
        estimated=one.estimated,
        error=None if metrics is None else _known(metrics.rel_l2),
        bound=_float(allowed.whole),
        ratio=_known(ratio_of(one, allowed)),
        bounds={name: _float(getattr(allowed, name)) for name in ("token", "channel", "head")},
        predicted=_float(policy.predicted(one.layer)),
        judged_by=policy.judged_by(one.name),
        max_abs=None if metrics is None else _known(metrics.max_abs),
        max_rel=None if metrics is None else _known(metrics.max_rel),
        cosine=None if metrics is None else plain(metrics.cosine),
        differing=metrics.rows_total if metrics is not None and metrics.rel_l2 is None else None,
        seed=one.seed,
        spread=_spread(one),
        own={side: own for side, added in one.added.items() if (own := own_error(added)) is not None},
    )


def ratio_of(one: CheckpointComparison, allowed: Allowance) -> float | None:
    """How near a checkpoint comes to its bounds: above 1 it is beyond; ``None`` without a measured distance.

    The bounds are those of :meth:`align.compare.policy.TensorPolicy.judge`: of all rows and of those of each phase,
    and for rows with equal inputs what their operator alone may differ by.
    """
    if one.metrics is None or one.metrics.rel_l2 is None:
        return None
    found = list(_ratios(one.metrics, one.rows, allowed))
    for metrics in one.phases.values():
        rows = metrics.elements * one.rows // max(1, one.metrics.elements)
        found += _ratios(metrics, rows, allowed)
    found += [float(part["value"]) / float(part["limit"]) for part in alike_parts(one.said) if part["limit"]]
    return max(found) if all(isfinite(value) for value in found) else inf


def _ratios(metrics: Metrics, rows: int, allowed: Allowance) -> Iterator[float]:
    if metrics.rel_l2 is not None:
        yield metrics.rel_l2 / allowed.whole
    slices = [(metrics.worst_token, allowed.token), (metrics.worst_head, allowed.head)]
    if rows >= CHANNEL_ROWS:
        slices.append((metrics.worst_channel, allowed.channel))
    yield from (worst.rel_l2 / limit for worst, limit in slices if worst is not None)


def alike_parts(sentence: Any) -> Iterator[Mapping[str, Any]]:
    """Parts of a verdict's reason that are about rows with equal inputs."""
    if isinstance(sentence, Mapping):
        if sentence.get("say") == "carried.alike":
            yield sentence
        for part in sentence.get("parts") or ():
            yield from alike_parts(part)


def own_error(added: Added) -> OwnError | None:
    """The part of an operator's own error that is nearest to its limit; ``None`` if nothing was measured."""
    chosen: tuple[float, str, float, float] | None = None
    part = None
    for candidate in added.parts:
        judged = candidate.residual
        if judged.verdict == "not observable":
            continue
        tests = [("element", inf if judged.non_finite else judged.ratio, judged.allowed)]
        tests += [
            (name, abs(worst.value), worst.allowed)
            for name, worst in (
                ("row factor", judged.gain_token),
                ("channel factor", judged.gain_channel),
                ("head factor", judged.gain_head),
                ("row norm", judged.norm_token),
            )
            if worst is not None
        ]
        for name, value, limit in tests:
            ratio = value / limit if limit else (inf if value else 0.0)
            if chosen is None or not ratio <= chosen[0]:
                chosen, part = (ratio, name, value, limit), candidate
    if chosen is None or part is None:
        return None
    ratio, name, value, limit = chosen
    return OwnError.model_validate(
        {
            "verdict": added.verdict,
            "why": added.why,
            "operator": part.residual.operator,
            "rows": part.residual.rows,
            "phase": part.phase,
            "rank": part.rank,
            "test": name,
            "value": _short(value),
            "allowed": _short(limit),
            "ratio": _short(ratio),
        }
    )


def _spread(one: CheckpointComparison) -> CellSpread | None:
    found = one.spread
    if found is None:
        return None
    return CellSpread(
        shares=list(SHARES),
        quantiles=[_short(value) for value in found.quantiles],
        steps={str(step): _short(value) for step, value in found.steps},
        rows=[RowShare(request=name, position=at, rel_l2=_short(value)) for name, at, value in found.rows],
        channels=[SliceShare(index=at, rel_l2=_short(value)) for at, value in found.channels],
        heads=[SliceShare(index=at, rel_l2=_short(value)) for at, value in found.heads],
    )


def _known(value: float | None) -> Number | None:
    return None if value is None else _short(value)


def _short(value: float) -> Number:
    found: Number = plain(_float(value))
    return found


def _float(value: float) -> float:
    """With as many digits as count here."""
    return float(f"{value:.{_DIGITS}g}")
