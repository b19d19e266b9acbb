"""Right values in the wrong place: rows, heads and channels that moved, and memory that was read in another order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from align.fits.fit import Proposal
from align.fits.measured import FEWEST, LISTED, Measured
from align.sentences import said

Tensor = torch.Tensor
Move = Callable[[Tensor], Tensor]
#: More slices than this are not matched with each other.
_MOST = 8192


def propose(measured: Measured) -> Iterator[Proposal]:
    """Known orders first, which have nothing to fit; then whatever each wrong slice resembles."""
    for kind, name, move in _known(measured):
        value = move(measured.ref)
        yield Proposal(
            kind, value, measured.floor(move(measured.movable)), said("fit.order", order=name), {"order": name}
        )
    yield from _matched(measured, 0, "rows_moved", "row", measured.null.tokens)
    _, H, D = measured.shape
    if H > 1:
        yield from _matched(measured, 1, "heads_moved", "head", measured.null.heads)
    subject = "channel" if H == 1 else "dimension"  # the same of every head
    yield from _matched(measured, 2, "channels_moved", subject, measured.null.channels.reshape(H, D).any(0))


def _known(measured: Measured) -> Iterator[tuple[str, str, Move]]:
    T, H, D = measured.shape
    if D % 2 == 0 and D > 2:
        yield "channels_moved", "the halves of the last axis are exchanged", lambda x: x.roll(D // 2, -1)
        yield "channels_moved", "interleaved pairs stand as halves", lambda x: _regrouped(x, 2, D // 2)
        yield "channels_moved", "halves stand as interleaved pairs", lambda x: _regrouped(x, 2, 2)
    if H > 1:
        yield "heads_moved", "heads are moved up by 1", lambda x: x.roll(1, 1)
        yield "heads_moved", "heads are moved down by 1", lambda x: x.roll(-1, 1)
        kv = int(measured.case.number("kv_heads") or 1)
        if 1 < kv < H and H % kv == 0:
            to = f"{kv} key heads × {H // kv}"
            yield "heads_moved", f"heads are in the order {to}, transposed", lambda x: _regrouped(x, 1, kv)
            yield "heads_moved", f"heads are from the order {to}, transposed", lambda x: _regrouped(x, 1, H // kv)
        yield "transposed", "[heads, channels] is read as [channels, heads]", lambda x: _read(x, (T, H, D), 1)
        yield "transposed", "[channels, heads] is read as [heads, channels]", lambda x: _read(x, (T, D, H), 1)
        if T > 1:
            yield "transposed", "[tokens, heads] is read as [heads, tokens]", lambda x: _read(x, (T, H, D), 0)
            yield "transposed", "[heads, tokens] is read as [tokens, heads]", lambda x: _read(x, (H, T, D), 0)
    if T > 1 and H * D > 1:
        yield "transposed", "[tokens, channels] is read as [channels, tokens]", lambda x: _read(x, (T, H * D), 0)
        yield "transposed", "[channels, tokens] is read as [tokens, channels]", lambda x: _read(x, (H * D, T), 0)


def _read(x: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """The memory of ``x`` as ``shape``, with two neighbouring axes exchanged, as the shape of ``x`` again."""
    return x.reshape(shape).transpose(axis, axis + 1).reshape(x.shape)


def _regrouped(x: Tensor, axis: int, groups: int) -> Tensor:
    """An axis split into groups, and joined with the groups inside."""
    split: Tensor = x.unflatten(axis, (groups, x.shape[axis] // groups))
    return split.transpose(axis, axis + 1).flatten(axis, axis + 1)


def _matched(measured: Measured, axis: int, kind: str, subject: str, wrong: Tensor) -> Iterator[Proposal]:
    """Each slice of ``wrong`` is the slice of the reference that is nearest to it."""
    count, every = int(wrong.sum()), int(wrong.numel())
    if count == 0 or every < 2 or every > _MOST or measured.bad.numel() // every < FEWEST:
        return
    to = torch.nonzero(wrong).flatten()
    source = _nearest(measured, axis, to)
    shift = Counter((source - to).tolist()).most_common(1)[0][0]
    if shift and count > 2:
        shifted = (torch.arange(every) + shift) % every
        yield _moved(measured, axis, kind, torch.where(wrong, shifted, torch.arange(every)), 1, f"{shift:+d}", subject)
    mapping = torch.arange(every)
    mapping[to] = source
    yield _moved(measured, axis, kind, mapping, count, "", subject)


def _nearest(measured: Measured, axis: int, to: Tensor) -> Tensor:
    """For each wrong slice the index of the nearest slice of the reference, in units of typical bounds."""
    weight = measured.movable.square().mean(axis, keepdim=True).rsqrt()
    bad = (measured.bad * weight).movedim(axis, 0).flatten(1)[to]
    ref = (measured.ref * weight).movedim(axis, 0).flatten(1)
    sizes = ref.square().sum(1)
    found = [(sizes[None] - 2 * part @ ref.T).argmin(1) for part in bad.split(1024)]
    return torch.cat(found)


def _moved(measured: Measured, axis: int, kind: str, mapping: Tensor, free: int, shift: str, subject: str) -> Proposal:
    value = measured.ref.index_select(axis, mapping)
    bound = measured.floor(measured.movable.index_select(axis, mapping))
    changed = torch.nonzero(mapping != torch.arange(len(mapping))).flatten()
    pairs = [(int(one), int(mapping[one])) for one in changed[:LISTED]]
    parameters: dict[str, Any] = {"from": [list(pair) for pair in pairs], "moved_total": len(changed)}
    exchanged = bool((mapping[mapping] == torch.arange(len(mapping))).all())
    if shift:
        parameters["shift"] = int(shift)
        text = said("fit.shifted", count=len(changed), what=f"{subject}s", shift=shift)
    else:
        listed = [said("fit.one_is", to=to, source=source) for to, source in pairs[:6]]
        how = "exchanged in pairs" if exchanged else "in another order"
        if len(set(mapping.tolist())) < len(mapping):
            how = "repeated in the place of others"
        more = " …" if len(changed) > 6 else ""
        text = said("fit.moved", count=len(changed), what=f"{subject}s", how=how, listed=listed, more=more)
    if axis == 0 and measured.case.requests:
        names = measured.case.requests
        crossing = {(names[to], names[source]) for to, source in pairs if names[to] != names[source]}
        if crossing:
            parameters["requests"] = sorted([list(pair) for pair in crossing])
            rows = [said("fit.rows_of", to=to, source=source) for to, source in sorted(crossing)[:4]]
            text = said("list.semicolon", parts=[text, said("list.comma", parts=rows)])
    return Proposal(kind, value, bound, text, parameters, free, scoped=False)
