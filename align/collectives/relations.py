"""Whether recorded collectives did what they promise: relations that hold whatever the model is (design §8).

=================  ====================================================================================================
all_reduce         every rank's result is the sum (max, min, product, mean) of what all put in, equal bit by bit
all_gather         every rank's result is what all put in, one after the other in the group's order
gather             the same at the root alone
reduce_scatter     each rank's result is its piece of the sum
all_to_all         piece ``i`` that a rank gets is the piece that rank ``i`` gave for it
dispatch           each row is with the ranks of its experts, expert by expert, see :mod:`align.collectives.exchange`
combine            each row is the weighted sum of what its experts made of it
broadcast          every rank's result is what the root had
barrier            nothing but the order
=================  ====================================================================================================

A sum of ``n`` numbers in the tensors' dtype errs by at most ``n - 1`` roundings of ``sum |in|``, see
:mod:`align.compare.collective`; integers are exact. What was not recorded is ``not observable``, never right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import tiny
from align.collectives.exchange import judge_combine, judge_dispatch
from align.collectives.record.types import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    COMBINE,
    DISPATCH,
    GATHER,
    REDUCE_SCATTER,
    CollectiveCall,
)
from align.compare.bits import same_bits
from align.sentences import Said, said

Tensor = torch.Tensor
Verdict = Literal["right", "wrong", "not observable"]
Calls = Mapping[int, CollectiveCall]
#: As in :mod:`align.compare.residual`: for float32 arithmetic of kernel and recomputation.
_SLACK = 1.02


class Key(NamedTuple):
    """What belongs together: the calls of one group at one place of its sequence."""

    group: tuple[int, ...]
    group_name: str
    in_group: int


@dataclass(frozen=True)
class Judged:
    """One collective, by its relation.

    Attributes:
        key: which.
        operation: one of :data:`align.collectives.record.types.OPERATIONS`.
        verdict: ``right``, ``wrong``, ``not observable``.
        what: why; ``None`` for ``right``.
        ranks: whose result is wrong.
        ratio: largest error in roundings of its magnitude; 0 for copies.
        calls: the records, by rank.
    """

    key: Key
    operation: str
    verdict: Verdict
    what: Said | None
    ranks: tuple[int, ...]
    ratio: float
    calls: Calls


def together(records: Mapping[int, Iterable[CollectiveCall]]) -> dict[Key, dict[int, CollectiveCall]]:
    """Records of all ranks, by what belongs together, in the order of the lowest rank."""
    found: dict[Key, dict[int, CollectiveCall]] = defaultdict(dict)
    for rank in sorted(records):
        for call in records[rank]:
            found[Key(call.group, call.group_name, call.in_group)][rank] = call
    return dict(found)


def judge_call(key: Key, calls: Calls) -> Judged:
    """Judge one collective; whatever is wrong with a record makes it ``not observable`` and nothing else."""
    operation = next(iter(calls.values())).operation
    try:
        verdict, what, ranks, ratio = _judge(key, operation, calls)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        verdict, what, ranks, ratio = "not observable", said("relation.broken", error=str(error)), (), 0.0
    return Judged(key, operation, verdict, what, ranks, ratio, calls)


_Outcome = tuple[Verdict, Said | None, tuple[int, ...], float]


def _unseen(what: Said) -> _Outcome:
    return "not observable", what, (), 0.0


def _judge(key: Key, operation: str, calls: Calls) -> _Outcome:
    absent = [rank for rank in key.group if rank not in calls]
    if absent:
        return _unseen(said("relation.absent", ranks=absent))
    if len({call.operation for call in calls.values()}) > 1:
        return _unseen(said("relation.apart"))
    open_ = [rank for rank, call in calls.items() if not call.ended]
    if open_:
        return _unseen(said("relation.open", ranks=open_))
    if operation == BARRIER:
        return "right", None, (), 0.0
    lacking = {rank: call.why for rank, call in calls.items() if not call.values}
    if lacking:
        by_sums = _checksums(operation, calls)
        if by_sums is not None:
            return by_sums
        rank, why = next(iter(lacking.items()))
        return _unseen(said("relation.no_values", rank=rank, why=why or "not recorded"))
    ordered = {rank: calls[rank] for rank in key.group}
    if operation in (DISPATCH, COMBINE):
        what, ranks, ratio = (judge_dispatch if operation == DISPATCH else judge_combine)(ordered)
        return ("wrong" if what is not None else "right"), what, ranks, ratio
    if operation == ALL_REDUCE:
        return _reduced(ordered)
    if operation == REDUCE_SCATTER:
        return _scattered(ordered)
    expected = _expected(operation, ordered)
    counted = _counts(ordered) if operation == ALL_TO_ALL else None
    if counted is not None:
        return counted
    wrong = [rank for rank, tensors in expected.items() if not _copied(_outs(ordered[rank]), tensors)]
    if not wrong:
        return "right", None, (), 0.0
    return "wrong", _copy_said(operation, ordered, expected, wrong[0]), tuple(wrong), 0.0


def _checksums(operation: str, calls: Calls) -> _Outcome | None:
    """What checksums alone say: copies must be equal. A sum is not seen so; unequal results are wrong all the same."""
    outs = {rank: call.checksum_out for rank, call in calls.items()}
    if operation == ALL_REDUCE and all(outs.values()) and len(set(outs.values())) > 1:
        first = next(iter(outs))
        wrong = tuple(rank for rank, one in outs.items() if one != outs[first])
        return "wrong", said("relation.unequal", first=first, rank=wrong[0]), wrong, 0.0
    root = next(iter(calls.values())).root
    if operation == BROADCAST and root is not None and root in calls and all(outs.values()) and calls[root].checksum_in:
        source = calls[root].checksum_in
        wrong = tuple(rank for rank, one in outs.items() if one != source)
        what = said("relation.not_root", rank=wrong[0], root=root) if wrong else None
        return ("wrong" if wrong else "right"), what, wrong, 0.0
    return None


# --------------------------------------------------------------------------------------------------------------- sums


def _reduced(calls: Calls) -> _Outcome:
    ins = [_one(_ins(call), "in") for call in calls.values()]
    outs = {rank: _one(_outs(call), "out") for rank, call in calls.items()}
    return _sums(ins, outs, {rank: slice(None) for rank in outs}, calls)


def _scattered(calls: Calls) -> _Outcome:
    ins = [torch.cat([one.reshape(-1) for one in _ins(call)]) for call in calls.values()]
    outs = {rank: _one(_outs(call), "out").reshape(-1) for rank, call in calls.items()}
    places, start = {}, 0
    for rank, value in outs.items():
        places[rank] = slice(start, start + value.numel())
        start += value.numel()
    if start != ins[0].numel():
        raise ValueError(f"the ranks' pieces have {start} elements of {ins[0].numel()}")
    return _sums(ins, outs, places, calls, equal=False)


def _sums(
    ins: Sequence[Tensor], outs: Mapping[int, Tensor], places: Mapping[int, slice], calls: Calls, equal: bool = True
) -> _Outcome:
    if len({one.shape for one in ins}) > 1:
        raise ValueError("the ranks put in different shapes")
    reduce = next(iter(calls.values())).reduce or "sum"
    expected, size, roundings = _combined(ins, reduce)
    wrong, shown, ratio = [], None, 0.0
    for rank, out in outs.items():
        whole = expected[places[rank]]
        if out.shape != whole.shape:
            raise ValueError(f"rank {rank} holds {list(out.shape)} of {list(whole.shape)}")
        error = _ratio(out, whole, None if size is None else size[places[rank]])
        ratio = max(ratio, error)
        if error > roundings:
            wrong.append(rank)
            shown = shown or said("relation.sum", reduce=reduce, rank=rank, ratio=error, allowed=roundings)
    if not wrong and equal:
        first, *others = outs
        wrong = [rank for rank in others if not same_bits(outs[rank], outs[first])]
        shown = said("relation.unequal", first=first, rank=wrong[0]) if wrong else None
    return ("wrong" if wrong else "right"), shown, tuple(wrong), ratio


def _combined(ins: Sequence[Tensor], reduce: str) -> tuple[Tensor, Tensor | None, float]:
    """``(what the ranks' tensors make together, magnitude, roundings allowed)``; no magnitude for what is exact.

    Raises:
        ValueError: an operation that is not known.
    """
    floats = ins[0].is_floating_point()
    wide = torch.stack([one.double() if floats else one.long() for one in ins])
    count = len(ins)
    if reduce in ("max", "min"):
        return (wide.amax(0) if reduce == "max" else wide.amin(0)), None, 0.0
    if reduce in ("sum", "avg", "mean"):
        share = 1 if reduce == "sum" else count
        total = wide.sum(0)
        if not floats:
            return (total if share == 1 else total // share), None, 0.0
        return total / share, wide.abs().sum(0) / share, (count - 1 + (share > 1)) * _SLACK
    if reduce in ("product", "prod"):
        total = wide.prod(0)
        return total, total.abs() if floats else None, (count - 1) * _SLACK if floats else 0.0
    raise ValueError(f"the reduce {reduce!r} is not known")


def _ratio(out: Tensor, expected: Tensor, size: Tensor | None) -> float:
    """The largest error in roundings; infinite for anything that is not exact where it must be."""
    if not out.numel():
        return 0.0
    if size is None:
        same = (out.to(expected.dtype) == expected) | (out.double().isnan() & expected.double().isnan())
        return 0.0 if bool(same.all()) else float("inf")
    wide = out.double()
    limit = torch.finfo(out.dtype).max
    excused = ~expected.isfinite() | (wide.isinf() & (size >= 0.998 * limit))
    error = (wide - expected).abs() / (unit_roundoff(out.dtype) * (size + tiny(out.dtype)))
    error = error.masked_fill(~wide.isfinite(), float("inf")).masked_fill(excused, 0.0)
    return float(error.max())


# ------------------------------------------------------------------------------------------------------------- copies


def _expected(operation: str, calls: Calls) -> dict[int, list[Tensor]]:
    """What each rank must hold; ranks that must hold nothing are left out."""
    ranks = list(calls)
    if operation == BROADCAST:
        return dict.fromkeys(ranks, _ins(calls[_root(calls)]))
    if operation in (ALL_GATHER, GATHER):
        every = [_one(_ins(call), "in") for call in calls.values()]
        return dict.fromkeys(ranks if operation == ALL_GATHER else [_root(calls)], every)
    assert operation == ALL_TO_ALL, operation
    pieces = {rank: _pieces(call, len(ranks)) for rank, call in calls.items()}
    return {rank: [pieces[source][at] for source in ranks] for at, rank in enumerate(ranks)}


def _counts(calls: Calls) -> _Outcome | None:
    """Rows that a rank sends to another one must be as many as that one expects; ``None`` if they are."""
    for at, (rank, call) in enumerate(calls.items()):
        for place, source in enumerate(calls):
            given = calls[source].sent
            if call.received and given and call.received[place] != given[at]:
                held = said("relation.expected", rank=rank, source=source, held=call.received[place], due=given[at])
                return "wrong", held, (rank,), 0.0
    return None


def _root(calls: Calls) -> int:
    root = next(iter(calls.values())).root
    if root is None or root not in calls:
        raise ValueError("the root is not known")
    return root


def _pieces(call: CollectiveCall, count: int) -> list[Tensor]:
    """What a rank gives to each: its list, the parts that it says, or equal parts of its one tensor.

    Raises:
        ValueError: one tensor that has no equal parts: the counts were not recorded.
    """
    given = _ins(call)
    if len(given) == count and not call.sent:
        return given
    one = _one(given, "in")
    if call.sent:
        return list(one.split(list(call.sent)))
    if not one.dim() or len(one) % count or call.given != call.got:
        raise ValueError("how many rows go to which rank was not recorded")
    return list(one.chunk(count))


def _copied(outs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether the tensors hold the same bits one after the other, whatever they are packed into."""
    if len(outs) == len(expected):
        return all(same_bits(one.reshape(-1), other.reshape(-1)) for one, other in zip(outs, expected, strict=True))
    return same_bits(torch.cat([one.reshape(-1) for one in outs]), torch.cat([one.reshape(-1) for one in expected]))


def _copy_said(operation: str, calls: Calls, expected: Mapping[int, list[Tensor]], rank: int) -> Said:
    """What is wrong with a copy; if the pieces stand in another order, that order."""
    if operation == BROADCAST:
        return said("relation.not_root", rank=rank, root=next(iter(calls.values())).root)
    parts = [one.reshape(-1) for one in expected[rank]]
    outs = _outs(calls[rank])
    flat = torch.cat([one.reshape(-1) for one in outs])
    sizes = [one.numel() for one in parts]
    ranks = list(calls)
    if len(set(sizes)) == 1 and flat.numel() == sum(sizes):
        order = [
            next((ranks[at] for at, part in enumerate(parts) if same_bits(piece, part)), None)
            for piece in flat.split(sizes[0])
        ]
        if None not in order and order != ranks:
            return said("relation.order", operation=operation, rank=rank, order=order, expected=ranks)
    return said("relation.copy", operation=operation, rank=rank)


def _ins(call: CollectiveCall) -> list[Tensor]:
    return _named(call, "in.")


def _outs(call: CollectiveCall) -> list[Tensor]:
    return _named(call, "out.")


def _named(call: CollectiveCall, prefix: str) -> list[Tensor]:
    found = {int(name.removeprefix(prefix)): one for name, one in call.tensors.items() if name.startswith(prefix)}
    return [one for _, one in sorted(found.items())]


def _one(tensors: Sequence[Tensor], what: str) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors were recorded as {what}, one was expected")
    return tensors[0]
