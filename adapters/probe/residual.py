"""The error that each operator added on its own live inputs, computed inside the engine's worker.

Every operator of a step is recomputed in float32 from the inputs that were recorded, for a sample of the rows, and only
sums of the error are kept. Each element counts relative to its magnitude (:mod:`align.checkpoints.recompute`), so that
one outlier does not hide the others. :mod:`align.compare.residual` judges the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from adapters.base import RowSpan
from adapters.probe.lean import TopRows, head_sums, top_channels
from adapters.probe.residual_state import FloatWeights, History, Weights
from adapters.probe.residual_step import Step, StepResiduals, sample
from adapters.probe.residual_sums import ChannelSums, Sums
from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.recompute import Exact
from align.checkpoints.table import Kind, Name, Structure, kinds
from align.trace.format import (
    CHANNEL_RESIDUAL,
    HEAD_RESIDUAL,
    TOKEN_RESIDUAL,
    TOP_CHANNELS,
    TOP_ROWS,
    WORST_RESIDUAL,
)

__all__ = ["ResidualPass", "StepResiduals", "Weights", "sample"]

Tensor = torch.Tensor
#: Elements that are worked on at a time, so that they stay in the processor's cache.
CHUNK = 1 << 18
#: Scores of attention that are held at a time.
SCORES_CHUNK = 1 << 20


class ResidualPass:
    """Recomputes the operators of every step of one rank.

    Args:
        structure: of the model; ``structure.tp`` says which checkpoints exist. Tensors and weights are local shards.
        weights: live weights.
        dtype: the model's.
        sample_rows: rows of a step that are recomputed at most.
        seed: of the sampling.
        lean: keep the worst rows and channels of each phase instead of the sums of all.
        cache_bytes: room for float32 copies of weights. What does not fit is converted at each use.
    """

    def __init__(
        self,
        structure: Structure,
        weights: Weights,
        dtype: torch.dtype,
        sample_rows: int = 64,
        seed: int = 0,
        cache_bytes: int = 1 << 30,
        lean: bool = False,
    ) -> None:
        self._structure, self._dtype, self._lean = structure, dtype, lean
        self._weights = FloatWeights(weights, cache_bytes)
        self._unit = unit_roundoff(dtype)
        self._limit, self._seed = sample_rows, seed
        self._kinds = [kind for kind in kinds().values() if structure.has(kind)]
        self._run, self._count = 0, 0
        self._histories: dict[str, History] = {}
        self._channels: dict[str, dict[Kind, ChannelSums]] = {}
        self._rows: dict[str, dict[Kind, TopRows]] = {}

    def begin(self, run: int) -> None:
        """Start a run: histories and accumulated sums of the one before are forgotten."""
        self._run, self._count = run, 0
        self._histories.clear()
        self._channels.clear()
        self._rows.clear()
        self._weights.begin()

    def accumulated(self, phase: str) -> dict[str, Tensor]:
        """Sums over the rows recomputed in this run's steps of a phase.

        ``NAME#res_ch`` float32 ``[3, *channels]``; of a lean recording what is worst of them, see
        :mod:`adapters.probe.lean`.
        """
        found = {}
        for kind, sums in self._channels.get(phase, {}).items():
            for layer, channels in sums.layers():
                name = kind.at(layer if kind.per_layer else None)
                if not self._lean:
                    found[f"{name}{CHANNEL_RESIDUAL}"] = channels
                    continue
                found[f"{name}{TOP_CHANNELS}"] = top_channels(channels)
                found[f"{name}{HEAD_RESIDUAL}"] = head_sums(channels)
                found[f"{name}{TOP_ROWS}"] = self._rows[phase][kind].layer(layer)
        return found

    @torch.no_grad()
    def step(
        self,
        rows: Sequence[RowSpan],
        phase: str,
        positions: Tensor,
        token_ids: Tensor,
        values: Mapping[str, Tensor],
        logits_rows: Sequence[int],
        present: Mapping[str, set[int]] | None = None,
        number: int = 0,
    ) -> StepResiduals:
        """Recompute one step.

        Args:
            number: of the step, by which a lean recording names its worst rows.
            rows: spans of the step, T rows together.
            phase: under which channel sums are accumulated.
            positions: int64 ``[T]`` as the engine's rope reads them; keys are kept by the positions of ``rows``.
            token_ids: int64 ``[T]``.
            values: kind → recorded values on the CPU in the model's dtype: ``[L, T, *local]`` for kinds of a layer,
                ``[T, …]`` for what exists once (final_in and final_norm may have the rows of ``logits_rows`` alone),
                ``[R, vocab]`` for the logits. A kind that is missing is skipped.
            logits_rows: row of the step of each row of the logits.
            present: kind → layers that were recorded; a kind that is not in it has all.
        """
        assert len(positions) == len(token_ids) == sum(span.count for span in rows), "rows do not match"
        chosen = sample(rows, self._limit, hash((self._seed, self._run, self._count)))
        self._count += 1
        step = Step(
            rows,
            positions,
            token_ids,
            values,
            present or {},
            torch.tensor(chosen, dtype=torch.int64),
            torch.tensor(list(logits_rows), dtype=torch.int64),
            number,
        )
        result = StepResiduals(chosen, {})
        self._remember(step, result)
        for group in self._groups(values):
            try:
                self._recompute(step, group, phase, result)
            except (ValueError, RuntimeError, IndexError) as error:  # one bad record costs its own operator
                result.skipped.update({kind.name: f"{type(error).__name__}: {error}" for kind in group})
        return result

    def _groups(self, values: Mapping[str, Tensor]) -> list[list[Kind]]:
        """Recorded kinds with a known operator, in order; linear ones with the same input together."""
        groups: dict[str, list[Kind]] = {}
        for kind in self._kinds:
            operator = self._structure.operator(kind)
            if kind.name in values and operator in bounds():
                fused = operator == "linear" and kind.name != "logits"
                groups.setdefault(f"linear of {kind.inputs}" if fused else kind.name, []).append(kind)
        return list(groups.values())

    def _recompute(self, step: Step, group: list[Kind], phase: str, result: StepResiduals) -> None:
        """Recompute kinds that share their operator and inputs, over all layers, in chunks of layers."""
        kind = group[0]
        first = 1 if kind.name == "block_in" else 0  # the first block's input is the embedding, see below
        count = self._structure.layers if kind.per_layer else 1
        shift, arguments = self._arguments(kind, first)
        missing = [one.name for one in arguments if one.name not in step.values]
        if missing:
            result.skipped.update({one.name: f"{missing[0]} was not recorded" for one in group})
            return
        rows = step.chosen(kind)
        sums = {one.name: Sums(count, len(rows), step.take(one, rows).shape[2:], self._unit) for one in group}
        usable = torch.ones(count, dtype=torch.bool)
        for one in (*group, *arguments):
            moved = 0 if one in group else shift
            if one.per_layer and one.name in step.present:
                usable &= torch.tensor([layer + moved in step.present[one.name] for layer in range(count)])
        if len(rows):
            operator = self._operator(step, group, arguments, shift, rows, usable)
            width = sum(sums[one.name].width for one in group)
            each = max(1, CHUNK // (len(rows) * width))
            for low in range(first, count, each):
                high = min(count, low + each)
                for one, exact in zip(group, operator(low, high), strict=True):
                    sums[one.name].add(low, exact, step.take(one, rows, low, high))
            if first:
                usable[0] = self._first_input(step, sums["block_in"], rows)
        for one in group:
            self._emit(step, one, sums[one.name], rows, usable, phase, result)

    def _arguments(self, kind: Kind, layer: int) -> tuple[int, list[Kind]]:
        """The kinds that an operator reads, and the layers by which they are moved."""
        name = Name(kind, layer if kind.per_layer else None)
        if kind.name == "block_in" and self._structure.layers == 1:
            return -1, []
        found = self._structure.inputs(name)
        if not kind.per_layer and found and found[0].layer is not None:
            return self._structure.layers - 1, [one.kind for one in found]
        shift = next((one.layer - layer for one in found if one.layer is not None), 0)
        return shift, [one.kind for one in found]

    def _first_input(self, step: Step, sums: Sums, rows: Tensor) -> bool:
        """The input of layer 0 is the embedding, scaled if the model does that; whether that was recorded."""
        embed = kinds()["embed"]
        if embed.name not in step.values or 0 not in step.present.get("block_in", {0}):
            return False
        given, factor = step.take(embed, rows), self._structure.embed_scale
        exact = recompute.identity(given) if factor == 1.0 else recompute.scaled(given, factor)
        sums.add(0, exact, step.take(kinds()["block_in"], rows))
        return True

    def _operator(
        self, step: Step, group: list[Kind], arguments: list[Kind], shift: int, rows: Tensor, usable: Tensor
    ) -> Callable[[int, int], list[Exact]]:
        """What recomputes layers ``low … high - 1`` of every kind of the group."""
        kind = group[0]

        def inputs(low: int, high: int) -> list[Tensor]:
            return [step.take(one, rows, low + shift, high + shift) for one in arguments]

        name = self._structure.operator(kind)
        if name == "embedding":
            weight = self._embedding()
            ids = step.token_ids[rows]
            # The weight lives on the device; only the rows that are looked up leave it.
            looked_up = weight.index_select(0, ids.to(weight.device)).to("cpu")
            return lambda low, high: [_stacked(recompute.identity(looked_up))]
        if name == "identity":
            return lambda low, high: [recompute.identity(inputs(low, high)[0])]
        row_wise: dict[str, Callable[..., Exact]] = {
            "add": recompute.add,
            "gated_add": recompute.gated_add,
            "silu_mul": recompute.silu_mul,
            "gelu_mul": partial(recompute.gated, activation=self._structure.activation),
        }
        if name in row_wise:
            return lambda low, high: [row_wise[name](*inputs(low, high))]
        if name == "rms_norm":
            gamma = self._norm(kind, step.values[kind.name].dim() - kind.per_layer)
            eps = self._structure.eps
            return lambda low, high: [recompute.rms_norm(inputs(low, high)[0], gamma[low:high], eps)]
        if name == "rope":
            length = int(step.positions.max()) + 1
            inverse, factor = recompute.rope_frequencies(self._structure.rope, self._structure.head_dim, length)
            at = step.positions[rows]
            return lambda low, high: [recompute.rope(inputs(low, high)[0], at, inverse, factor)]
        if name == "attention":
            return lambda low, high: [self._attention(step, arguments[0], rows, usable, low, high)]
        assert name == "linear", name
        return lambda low, high: self._linear(step, group, inputs(low, high)[0], low)

    def _embedding(self) -> Tensor:
        weight = self._weights.raw("embed")
        if weight is None or weight.shape[0] < self._structure.vocab:
            raise ValueError("this rank does not hold the whole embedding")
        return weight

    def _norm(self, kind: Kind, axes: int) -> Tensor:
        layers: list[int | None] = list(range(self._structure.layers)) if kind.per_layer else [None]
        gamma = self._weights.vectors(kind.name, layers)
        if gamma is None:
            raise ValueError("its weight is not known")
        return gamma.reshape(gamma.shape[0], *[1] * (axes - 1), gamma.shape[1])

    def _linear(self, step: Step, group: list[Kind], x: Tensor, low: int) -> list[Exact]:
        """Products of layers ``low …``; ``x`` ``[l, R, *input]``."""
        flat = x.flatten(2).float()
        logits = group[0].name == "logits"
        limit = step.values["logits"].shape[1] if logits else None
        names = [kind.name for kind in group]
        matrices = []
        for index in range(len(flat)):
            matrix = self._weights.matrix(names, low + index if group[0].per_layer else None, limit)
            if matrix is None:
                raise ValueError("its weight is not known")
            if matrix.matrix.shape[1] != flat.shape[2] or (limit is not None and matrix.sizes[0] != limit):
                raise ValueError(f"its weight {tuple(matrix.matrix.shape)} does not fit")
            matrices.append(matrix)
        product = torch.empty(len(flat), flat.shape[1], matrices[0].matrix.shape[0])
        for index, matrix in enumerate(matrices):
            torch.mm(flat[index], matrix.matrix.T, out=product[index])
        lengths = torch.linalg.vector_norm(flat, dim=-1)
        norms = torch.stack([matrix.norms for matrix in matrices])
        found, start = [], 0
        for index, size in enumerate(matrices[0].sizes):
            part, end = product[..., start : start + size], start + size
            magnitude = recompute.linear_magnitude(part, lengths, norms[:, start:end], flat.shape[2], x.dtype)
            if matrices[0].biases[index] is not None:
                part = part + torch.stack([one.biases[index] for one in matrices]).unsqueeze(1)  # type: ignore[misc]
                magnitude.add_(part.abs())
            found.append(Exact(part, magnitude))
            start = end
        return found

    def _remember(self, step: Step, result: StepResiduals) -> None:
        """Keep the keys and values of all rows of the step, not only of the sampled ones."""
        keys, values = step.values.get("attn.key_states"), step.values.get("attn.value_states")
        if keys is None or values is None:
            return
        layers = torch.ones(keys.shape[0], dtype=torch.bool)
        for kind in ("attn.key_states", "attn.value_states"):
            if kind in step.present:
                layers &= torch.tensor([layer in step.present[kind] for layer in range(keys.shape[0])])
        if keys.shape != values.shape or keys.shape[1] != len(step.positions):
            result.skipped["attn.out"] = f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit"
            return
        start = 0
        for span in step.rows:
            history = self._histories.get(span.request)
            if history is None:
                history = self._histories[span.request] = History(keys.shape[0], keys.shape[2], keys.shape[3])
            here = slice(start, start + span.count)
            history.write(span.start, keys[:, here], values[:, here], layers)
            start += span.count

    def _attention(self, step: Step, query: Kind, rows: Tensor, usable: Tensor, low: int, high: int) -> Exact:
        """Attention of layers ``low …``; rows whose keys are not all known get an infinite magnitude."""
        taken = step.take(query, rows, low, high)
        value = torch.zeros(taken.shape)
        magnitude = torch.full(taken.shape, torch.inf)
        window, start = self._structure.window, 0
        for span in step.rows:
            mine = ((rows >= start) & (rows < start + span.count)).nonzero()[:, 0]
            at = rows[mine] - start + span.start
            start += span.count
            history = self._histories.get(span.request)
            if not len(mine) or history is None:
                continue
            end = int(at.max()) + 1
            first = 0 if window is None else max(0, int(at.min()) + 1 - window)
            known = history.known(first, end)
            each = max(1, SCORES_CHUNK // (len(mine) * end * taken.shape[2]))
            for base in range(low, high, each):
                top = min(high, base + each)
                if not bool((known & usable)[base:top].any()):
                    continue
                keys, values = history.read(base, top, end)
                exact = recompute.attention(
                    taken[base - low : top - low].index_select(1, mine),
                    at,
                    keys,
                    values,
                    self._structure.scale,
                    window,
                )
                unknown = ~known[base:top]
                exact.magnitude[unknown] = torch.inf
                value[base - low : top - low].index_copy_(1, mine, exact.value)
                magnitude[base - low : top - low].index_copy_(1, mine, exact.magnitude)
        return Exact(value, magnitude)

    def _emit(
        self, step: Step, kind: Kind, sums: Sums, rows: Tensor, usable: Tensor, phase: str, result: StepResiduals
    ) -> None:
        """Hand the sums out under the names of the checkpoints, and add those of the channels up."""
        good = usable & sums.seen
        accumulated = self._channels.setdefault(phase, {}).setdefault(kind, ChannelSums(sums.layers, sums.shape))
        accumulated.add(sums.channels, good)
        if self._lean:
            kept = self._rows.setdefault(phase, {}).setdefault(kind, TopRows(sums.layers))
            kept.add(step.number, rows, sums.tokens, good)
        largest = sums.largest(rows)
        for layer, fine in enumerate(good.tolist()):
            name = kind.at(layer if kind.per_layer else None)
            if fine:
                if not self._lean:
                    result.tensors[f"{name}{TOKEN_RESIDUAL}"] = sums.tokens[layer]
                result.tensors[f"{name}{WORST_RESIDUAL}"] = largest[layer]
            else:
                known = bool(usable[layer])
                result.skipped[name] = "no row could be recomputed" if known else "it or an input was not recorded"


def _stacked(exact: Exact) -> Exact:
    return Exact(exact.value[None], exact.magnitude[None])
