"""Mixture of experts: the router's choice, its weights, and the mix of the experts' results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute.exact import Exact, Tensor, of_itself, tiny
from align.checkpoints.recompute.gated import activation_of
from align.checkpoints.recompute.matmul import linear, linear_magnitude

#: ``(gate, up, down)`` of an expert: ``[inner, hidden]`` twice and ``[hidden, inner]``.
ExpertWeights = Callable[[int], "tuple[Tensor, Tensor, Tensor]"]


@dataclass(frozen=True)
class Routing:
    """How a router chooses and weighs.

    Attributes:
        experts, top_k: of how many how many are chosen; zero experts count.
        scoring: what makes a score of a logit; ``softmax`` goes over all experts.
        renormalize: the weights of the chosen are divided by their sum.
        scale: factor on the weights.
        groups, kept_groups: experts are chosen from the best groups alone; 1 for all.
        group_score: a group's score: its best expert (DeepSeek-V2), or the sum of its best two (DeepSeek-V3).
        zero: how many of the experts, the last ones, have no weights and hand their token on (LongCat-Flash).
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    zero: int = 0


def expert_scores(logits: Tensor, routing: Routing, compute: torch.dtype = torch.float32) -> Exact:
    """Scores ``[R, experts]`` of recorded logits ``[R, experts]``; every rounding is relative to the score."""
    wide = logits.to(compute)
    scores = wide.sigmoid() if routing.scoring == "sigmoid" else wide.softmax(-1)
    return of_itself(scores, logits.dtype)


def choice_excess(
    logits: Tensor,
    ids: Tensor,
    routing: Routing,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """How wrong a choice is: by how much an expert that was not chosen beats a chosen one.

    Two scores may change places if rounding each of them once makes them do so; the excess is counted in units of
    ``u (|score| + |other score|)``. The choice is a set: the order of the ids does not matter.

    Args:
        logits: ``[R, experts]``.
        ids: int ``[R, top_k]``.
        dtype: whose unit counts.
        bias: float ``[experts]``, added to the scores for the choice alone.

    Returns:
        ``[R, top_k]``, 0 for a right choice, infinite for an id that does not exist or is chosen twice.
    """
    scores, magnitude = expert_scores(logits, routing, compute)
    if bias is not None:
        scores = scores + bias.to(compute)
        magnitude = magnitude + scores.abs()
    wrong = (ids < 0) | (ids >= routing.experts)
    safe = ids.long().clamp(0, routing.experts - 1)
    taken = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(1, safe, torch.ones_like(safe))
    wrong |= taken.gather(1, safe) > 1
    unit = unit_roundoff(dtype)
    candidates, excess = taken == 0, torch.zeros(safe.shape, dtype=compute)
    if routing.groups > 1:
        sure, behind = _groups(scores, magnitude, routing, unit)
        candidates &= sure
        excess = behind.gather(1, safe)
    mine, my_size = scores.gather(1, safe), magnitude.gather(1, safe)
    for column in range(safe.shape[1]):  # one chosen expert at a time: [R, experts]
        beaten = (scores - mine[:, column, None]) / (unit * (magnitude + my_size[:, column, None]))
        worst = beaten.masked_fill(~candidates, 0.0).clamp_min(0.0).amax(-1)
        excess[:, column] = torch.maximum(excess[:, column], worst)
    return excess.masked_fill(wrong, torch.inf)


def _groups(scores: Tensor, magnitude: Tensor, routing: Routing, unit: float) -> tuple[Tensor, Tensor]:
    """Per expert: whether its group is kept however scores round, and by how much its group is behind the kept ones."""
    shape = (len(scores), routing.groups, -1)
    best = scores.reshape(shape).topk(1 if routing.group_score == "best" else 2, -1)
    value, size = best.values.sum(-1), magnitude.reshape(shape).gather(-1, best.indices).sum(-1)
    ordered = value.sort(-1, descending=True)
    last = ordered.values[:, routing.kept_groups - 1, None]
    last_size = size.gather(1, ordered.indices[:, routing.kept_groups - 1, None])
    spread = unit * (size + last_size)
    behind = ((last - value) / spread).clamp_min(0.0)
    sure = torch.ones_like(value, dtype=torch.bool)
    if routing.kept_groups < routing.groups:
        sure = value - ordered.values[:, routing.kept_groups, None] > 2 * spread
    each = routing.experts // routing.groups
    return sure.repeat_interleave(each, 1), behind.repeat_interleave(each, 1)


def expert_weights(logits: Tensor, ids: Tensor, routing: Routing, compute: torch.dtype = torch.float32) -> Exact:
    """The weight of each chosen expert, 0 for the others: ``[R, experts]``.

    ``ids`` int ``[R, top_k]`` are those that were chosen, right or not. Score, sum of the chosen, quotient and scaling
    round relative to the weight.

    Raises:
        ValueError: an id beyond the experts.
    """
    if bool(((ids < 0) | (ids >= routing.experts)).any()):
        raise ValueError(f"expert ids go from {int(ids.min())} to {int(ids.max())}, there are {routing.experts}")
    scores = expert_scores(logits, routing, compute).value
    weights = scores * torch.zeros_like(scores).scatter_(1, ids.long(), 1.0)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return of_itself(weights * routing.scale, logits.dtype)


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str = "silu",
    compute: torch.dtype = torch.float32,
) -> Exact:
    """``down(activation(gate(x)) × up(x))``, ``[R, hidden]``: an expert, of which only the two ends are recorded.

    The last product rounds as in :func:`linear`. What comes before it errs element by element: the two products (two
    roundings each of their magnitudes M), the activation and its product (three). With ``h = a(gate) up``, a rounding
    that is uniform between its limits has a third of their square as variance: ``s² = (2 (M_gate a'(gate) up)² +
    2 (M_up a(gate))² + 3 h²) / 3``. These roundings do not know of each other, so that they move the result by a
    deviation of ``u sqrt(W² s²)``. Three times that, under a bound of two roundings, allows six deviations.

    Raises:
        ValueError: an activation that is not recomputed.
    """
    function = activation_of(activation)
    first, second = linear(x, gate, None, compute), linear(x, up, None, compute)
    active = function.value(first.value)
    inner = active * second.value
    by_gate = (first.magnitude * function.slope(first.value) * second.value).square_()
    by_up = (second.magnitude * active).square_()
    variance = by_gate.add_(by_up).mul_(2).add_(inner.square(), alpha=3).div_(3)
    wide = down.to(compute)
    product = inner @ wide.T
    norms = torch.linalg.vector_norm(wide, dim=-1)
    magnitude = linear_magnitude(product, torch.linalg.vector_norm(inner, dim=-1), norms, inner.shape[-1], x.dtype)
    moved = (variance @ wide.square().T).sqrt_()
    return Exact(product, magnitude.add_(moved, alpha=3.0))


def expert_mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert: ExpertWeights,
    activation: str = "silu",
    compute: torch.dtype = torch.float32,
    first_zero: int | None = None,
) -> Exact:
    """``sum of weight × expert(x)`` over the chosen experts, ``[R, hidden]``.

    Args:
        x: ``[R, hidden]``.
        ids: int ``[R, top_k]``.
        weights: ``[R, experts]``, by expert id.
        expert: gives an expert's matrices; asked once for each that was chosen, in order.
        first_zero: experts from this one on are zero experts: each hands ``x`` itself on, the input of the layer and
            not what the other experts made of it.

    Each expert rounds as :func:`gated_mlp`; the weight and the weighted result round (two roundings of it). The sum may
    be kept in the model's dtype: each of its ``top_k`` roundings is at most ``u`` times the sum of the sizes; with
    random signs twice ``sqrt(top_k)`` of them are possible.
    """
    value = torch.zeros(x.shape, dtype=compute)
    magnitude = torch.full(x.shape, tiny(x.dtype), dtype=compute)
    terms = math.sqrt(ids.shape[1])
    for index in ids.unique().tolist():
        rows = (ids == index).any(-1).nonzero()[:, 0]
        if first_zero is not None and index >= first_zero:
            one = of_itself(x[rows].to(compute), x.dtype)
        else:
            one = gated_mlp(x[rows], *expert(int(index)), activation, compute)
        share = weights[rows, index].to(compute)[:, None]
        part = one.value * share
        value.index_add_(0, rows, part)
        magnitude.index_add_(0, rows, one.magnitude * share.abs() + part.abs() * (1 + terms))
    return Exact(value, torch.maximum(magnitude, value.abs()))
