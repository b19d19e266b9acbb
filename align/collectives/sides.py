"""A tensor of one side, whose ranks hold parts of it, against the same rows of the other side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from align.checkpoints.table import Name
from align.collectives.blocks import block_map, ratio_to
from align.collectives.hypotheses import PERMUTED, Tried, matched
from align.collectives.shards import HEAD_MAP
from align.compare.gather import gather, is_head
from align.compare.rows import CANDIDATE, REFERENCE, Recorded, real_steps
from align.compare.tensors import TensorComparison
from align.sentences import raw, said

GATHER = "gather_order"
#: What an order of rows may leave, relative L2: more than clean noise, far less than 1.
_LEFT = 0.1
#: Engines pad the vocabulary to a multiple of this; without padding all parts are alike long.
_PADDED = 64
Tensor = torch.Tensor


def other_rows(
    side: str, step: int, name: str, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> tuple[list[int], Tensor] | None:
    """``(rows of this side's step, the same rows on the other side)``; ``None`` if none were recorded there."""
    other = REFERENCE if side == CANDIDATE else CANDIDATE
    head = is_head(name)
    pairs = [
        (place.head if head else place.index, getattr(row, other))
        for row in compared.pairing.rows
        for place in [getattr(row, side)]
        if place.step == step and (not head or (place.head is not None and getattr(row, other).head is not None))
    ]
    try:
        found = gather(traces[other], name, [place for _, place in pairs])
    except ValueError:
        return None
    if found is None:
        return None
    return [int(pairs[at][0]) for at in found.rows], found.tensor


def flat(value: Tensor) -> Tensor:
    """``[rows, …]`` as ``[rows, channels]``."""
    return value.reshape(len(value), -1)


def accused(name: Name, compared: TensorComparison, parallel: Sequence[str]) -> str | None:
    """The side whose operator was not seen to be right while the other's was; the only one with several ranks."""
    if len(parallel) == 1:
        return parallel[0]
    about = compared.get(str(name))
    right = [] if about is None else [side for side, added in about.added.items() if added.verdict == "within"]
    left = [side for side in parallel if side not in right]
    return left[0] if len(left) == 1 else None


def mapped(name: Name, side: str, compared: TensorComparison, traces: Mapping[str, Recorded]) -> Iterator[Tried]:
    """Whether blocks of the split axis equal other blocks of the other side."""
    trace, kind = traces[side], name.kind
    structure = trace.structure
    if structure is None or (kind.shard in ("", "partial") and kind.name != "logits"):
        return
    axis = "vocab" if kind.name == "logits" else kind.shard
    label = GATHER if kind.name == "logits" else HEAD_MAP
    count = structure.size(axis) if axis in ("heads", "kv_heads") else structure.tp
    for step, ours, theirs in _together(name, side, compared, traces):
        found = block_map(ours, theirs, count)
        if found is None:
            yield Tried(label, "not observable", said("hypothesis.no_other"))
            return
        if axis == "vocab" and structure.vocab % _PADDED and not found.fits:
            yield Tried(label, "not observable", said("hypothesis.padded", vocab=structure.vocab, tp=structure.tp))
            return
        blocks = [{"block": at, "is": other} for at, other in enumerate(found.order) if at != other]
        per_rank = max(1, count // structure.tp)
        ranks = tuple(sorted({one["block"] // per_rank for one in blocks})) if found.fits else ()
        about = [said("hypothesis.block", axis=axis, block=one["block"], other=one["is"]) for one in blocks[:8]]
        key = "hypothesis.blocks" if found.fits else "hypothesis.no_blocks"
        what = said(key, blocks=about, before=found.before, residual=found.after)
        numbers = {"blocks": blocks, "before": found.before, "step": step}
        yield Tried(label, "fits" if found.fits else "refuted", what, found.after, ranks, numbers)
        return


def whole(
    name: Name, side: str, size: int, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> Iterator[Tried]:
    """A whole tensor against the other side's: its size, and the order of its rows."""
    for _, ours, theirs in _together(name, side, compared, traces):
        yield ratio_to(ours, theirs, size)
        a, b = flat(ours).float(), flat(theirs).float()
        order = matched(a, b) if len(a) > 1 else None
        if order is None or not int((order != torch.arange(len(order))).sum()):
            yield Tried(PERMUTED, "refuted", said("hypothesis.not_permuted", rows=len(a)), numbers={"rows": len(a)})
            return
        left = float((a - b[order]).norm() / b.norm().clamp_min(1e-30))
        fits = left <= _LEFT
        moved = int((order != torch.arange(len(order))).sum())
        at = int((order != torch.arange(len(order))).nonzero()[0])
        place, source = raw(f"row {at}"), raw(f"row {int(order[at])}")
        what = (
            said("hypothesis.permuted", moved=moved, rows=len(a), place=place, theirs=source, residual=left)
            if fits
            else said("hypothesis.not_permuted_near", residual=left)
        )
        yield Tried(PERMUTED, "fits" if fits else "refuted", what, left, (), {"moved": moved, "rows": len(a)})
        return


def _together(
    name: Name, side: str, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The same rows of a step on this side and on the other, joined over ranks, step by step."""
    trace = traces[side]
    for entry in real_steps(trace):
        there = other_rows(side, entry.step, str(name), compared, traces)
        try:
            ours = trace.joined(entry.step, str(name))
        except ValueError:
            continue
        if there is not None and ours is not None and ours[there[0]].shape == there[1].shape:
            yield entry.step, ours[there[0]], there[1]
