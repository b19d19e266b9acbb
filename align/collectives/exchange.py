"""Whether tokens reached the experts that were chosen for them, and their results came home: relations of MoE kernels.

``dispatch`` sends every active row of every rank to the ranks of its experts. Expert ``e`` of ``E`` lives on rank
``e // (E / ranks)``. A rank must hold the rows expert by expert, of one expert rank by rank, of one rank in its own
order (CANN documentation, aclnnMoeDistributeDispatchV2), bit by bit, and count them so.

``combine`` sends the rows that the experts made of them home and adds them up: row ``t`` becomes
``sum over its choices of scale × the expert's row``. With ``k`` choices that rounds at most ``k`` products, ``k - 1``
sums and the result, each of a magnitude of ``sum |scale × row|``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import tiny
from align.collectives.record.types import CollectiveCall
from align.compare.bits import same_bits
from align.sentences import Said, said

Tensor = torch.Tensor
#: What is wrong, ranks that show it, and by how many roundings.
Outcome = tuple["Said | None", tuple[int, ...], float]
#: ``expert_token_nums_type`` of counts that add up.
_CUMULATIVE = 0
_SLACK = 1.02


@dataclass(frozen=True)
class Sent:
    """What one rank gives: ``rows [tokens, hidden]``, ``ids [tokens, k]``, and which rows take part."""

    rows: Tensor
    ids: Tensor
    active: Tensor

    @property
    def masked(self) -> Tensor:
        """bool ``[tokens, k]``."""
        return self.active if self.active.dim() == 2 else self.active[:, None].expand(self.ids.shape)


@dataclass(frozen=True)
class Routes:
    """Where every choice of every rank goes.

    Attributes:
        arriving: by rank: int64 ``[rows, 3]``: source (place in the group), token and choice of each row in order.
        numbers: by rank: int64 ``[local experts, ranks]``: how many rows each expert gets from each rank.
    """

    arriving: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]


def routes(sent: Sequence[Sent], experts: int) -> Routes:
    """Of all ranks, in the order of the group."""
    ranks, each = len(sent), experts // len(sent)
    triples = []
    for source, one in enumerate(sent):
        token, choice = one.masked.nonzero().unbind(1)
        expert = one.ids[token, choice].long()
        triples.append(torch.stack([expert, torch.full_like(token, source), token, choice], dim=1))
    every = torch.cat(triples)
    # Stable: of one expert and rank the rows stay in their own order.
    every = every[torch.argsort(every[:, 0] * ranks + every[:, 1], stable=True)]
    arriving, numbers = [], []
    for place in range(ranks):
        mine = every[(every[:, 0] // each) == place]
        arriving.append(mine[:, 1:])
        local = mine[:, 0] - place * each
        numbers.append(torch.bincount(local * ranks + mine[:, 1], minlength=each * ranks).reshape(each, ranks))
    return Routes(tuple(arriving), tuple(numbers))


def judge_dispatch(calls: Mapping[int, CollectiveCall]) -> Outcome:
    """Counts, order and bits of what every rank received.

    Raises:
        ValueError: the records do not fit together.
    """
    sent = [_sent(call, 0, 1, 2) for call in calls.values()]
    expected = routes(sent, _experts(calls))
    wrong: list[int] = []
    what: Said | None = None
    for place, (rank, call) in enumerate(calls.items()):
        found = _active(call, sent[place]) or _received(place, rank, call, sent, expected)
        if found is not None:
            wrong.append(rank)
            what = what or found
    return what, tuple(wrong), float("inf") if wrong else 0.0


def _active(call: CollectiveCall, one: Sent) -> Said | None:
    """The mask must hold this rank's tokens and no pads."""
    tokens = call.about.get("tokens")
    if tokens is None or not call.about.get("masked"):
        return None
    rows = one.masked.any(1)
    right = torch.arange(len(rows)) < int(tokens)
    if torch.equal(rows, right):
        return None
    return said("exchange.mask", rank=call.rank, active=int(rows.sum()), tokens=int(tokens))


def _received(place: int, rank: int, call: CollectiveCall, sent: Sequence[Sent], expected: Routes) -> Said | None:
    rows, numbers, counts = (call.tensors[f"out.{index}"] for index in range(3))
    due = expected.numbers[place]
    per_expert = due.sum(1)
    if call.about.get("expert_token_nums_type", 1) == _CUMULATIVE:
        per_expert = per_expert.cumsum(0)
    if numbers.long().tolist() != per_expert.tolist() or counts.long().tolist() != due.flatten().cumsum(0).tolist():
        return said("exchange.counts", rank=rank, held=numbers.tolist(), due=per_expert.tolist())
    where = expected.arriving[place]
    right = _rows_of(sent, where)
    if len(rows) == len(right) and same_bits(rows, right):
        return None
    if len(rows) != len(right):
        return said("exchange.length", rank=rank, held=len(rows), due=len(right))
    order = _order(rows, right)
    if order is not None:
        moved = [at for at, source in enumerate(order) if at != source]
        return said("exchange.order", rank=rank, moved=len(moved), rows=len(rows), row=moved[0], other=order[moved[0]])
    differ = (rows.view(torch.int16) != right.view(torch.int16)).any(1).nonzero().flatten()
    source, token, _ = where[int(differ[0])].tolist()
    return said("exchange.rows", rank=rank, differ=len(differ), rows=len(rows), source=call.group[source], token=token)


def judge_combine(calls: Mapping[int, CollectiveCall]) -> Outcome:
    """What every rank got back for its tokens.

    Raises:
        ValueError: the records do not fit together.
    """
    ids = [_sent(call, 0, 1, 3) for call in calls.values()]
    known = routes(ids, _experts(calls))
    hidden = next(iter(calls.values())).tensors["in.0"].shape[-1]
    home = [torch.zeros(*one.ids.shape, hidden) for one in ids]
    for place, call in enumerate(calls.values()):
        rows = call.tensors["in.0"]
        where = known.arriving[place]
        if len(rows) != len(where):
            return said("exchange.length", rank=call.rank, held=len(rows), due=len(where)), (call.rank,), float("inf")
        for source in range(len(ids)):
            mine = where[:, 0] == source
            home[source][where[mine, 1], where[mine, 2]] = rows[mine].float()
    wrong: list[int] = []
    what: Said | None = None
    ratio = 0.0
    for place, (rank, call) in enumerate(calls.items()):
        scales, out = call.tensors["in.2"].float(), call.tensors["out.0"]
        active = ids[place].masked
        parts = home[place] * (scales * active)[..., None]
        total, size = parts.sum(1), parts.abs().sum(1) + tiny(out.dtype)
        takes_part = active.any(1)
        unit = unit_roundoff(out.dtype)
        error = (
            float(((out.float() - total).abs() / (unit * size))[takes_part].max()) if bool(takes_part.any()) else 0.0
        )
        ratio = max(ratio, error)
        choices = ids[place].ids.shape[1]
        if not error <= 2 * choices * _SLACK:
            wrong.append(rank)
            what = what or _combined(rank, out.float()[takes_part], home[place][takes_part], scales[takes_part], total)
    return what, tuple(wrong), ratio


def _combined(rank: int, out: Tensor, rows: Tensor, scales: Tensor, total: Tensor) -> Said:
    """The explanation of a wrong sum that leaves least."""
    candidates = {
        "twice": rows * scales[..., None].square(),
        "left_out": rows,
        "rows": rows.roll(1, 0) * scales[..., None],
        "choices": rows * scales.roll(1, 1)[..., None],
    }
    left = {name: float((out - one.sum(1)).norm() / out.norm().clamp_min(1e-30)) for name, one in candidates.items()}
    name = min(left, key=lambda one: left[one])
    if left[name] <= 0.02:
        return said(f"exchange.weights_{name}", rank=rank, residual=left[name])
    plain = (rows * scales[..., None]).sum(1)
    factor = float((out * plain).sum() / plain.square().sum().clamp_min(1e-30))
    return said("exchange.combine", rank=rank, factor=factor)


def _experts(calls: Mapping[int, CollectiveCall]) -> int:
    found = {int(call.about.get("moe_expert_num", 0)) for call in calls.values()}
    if len(found) != 1 or not min(found) or min(found) % len(calls):
        raise ValueError(f"the ranks name {sorted(found)} experts for {len(calls)} ranks")
    return found.pop()


def _sent(call: CollectiveCall, rows: int, ids: int, mask: int) -> Sent:
    chosen = call.tensors[f"in.{ids}"]
    active = call.tensors.get(f"in.{mask}")
    return Sent(
        call.tensors[f"in.{rows}"], chosen, torch.ones(len(chosen), dtype=torch.bool) if active is None else active
    )


def _rows_of(sent: Sequence[Sent], where: Tensor) -> Tensor:
    pieces = [sent[source].rows[token] for source, token, _ in where.tolist()]
    return torch.stack(pieces) if pieces else sent[0].rows[:0]


def _order(rows: Tensor, right: Tensor) -> list[int] | None:
    """``rows = right[order]`` bit by bit; ``None`` if they are no permutation. Rows in their places stay there."""
    keys = [[row.contiguous().view(torch.uint8).numpy().tobytes() for row in one] for one in (rows, right)]
    waiting: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys[1]):
        waiting.setdefault(key, []).append(at)
    found: list[int] = []
    for at, key in enumerate(keys[0]):
        places = waiting.get(key)
        if not places:
            return None
        found.append(places.pop(places.index(at) if at in places else 0))
    return found if found != list(range(len(found))) else None
