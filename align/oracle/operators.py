"""The executor of one task on one step's rows, or on the rows of many steps: float64 results, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from align.checkpoints import recompute
from align.checkpoints.recompute import Exact
from align.checkpoints.shards import split
from align.checkpoints.table import Structure
from align.oracle.facts import Facts
from align.oracle.plan import Task
from align.oracle.types import NotObservableError
from align.oracle.weights import CheckpointWeights

Tensor = torch.Tensor
F64 = torch.float64
#: Elements of a result that are worked on at a time (32 MB of float64, about ten times that with all that is derived).
CHUNK = 1 << 22
#: Rows that share one pass over a weight at least.
MIN_ROWS = 64

Chunk = tuple[slice, Exact]


class Operators:
    """Recomputes operators that know no other row than their own: all but attention.

    Args:
        weights: ``None`` if the checkpoint's files are not there.
    """

    def __init__(self, structure: Structure, facts: Facts, weights: CheckpointWeights | None, missing: str) -> None:
        self._structure, self._facts, self._weights, self._missing = structure, facts, weights, missing

    def run(self, task: Task, inputs: tuple[Tensor, ...], rank: int, fed: Tensor | None) -> Iterator[Chunk]:
        """``(rows, result)`` in order.

        Args:
            inputs: ``[R, …]`` in the task's order.
            rank: whose summand it is, -1 for the whole.
            fed: int64 ``[R]``: token ids of the embedding, positions of the rope.

        Raises:
            NotObservableError: a weight is missing or does not fit.
        """
        operator = task.operator
        if operator == "linear":
            yield from self._linear(task, inputs[0].flatten(1), rank)
        elif operator == "rope":
            assert fed is not None
            yield from self._rope(inputs[0], fed)
        elif operator == "embedding":
            assert fed is not None
            yield from self._embedding(fed)
        else:
            for here in _slices(len(inputs[0]), max(1, prod(inputs[0].shape[1:]))):
                yield here, self._row_wise(task, [one[here] for one in inputs])

    def _row_wise(self, task: Task, inputs: list[Tensor]) -> Exact:
        operator = task.operator
        if operator == "identity":
            return recompute.identity(inputs[0], F64)
        if operator == "scale":
            return recompute.scaled(inputs[0], self._structure.embed_scale, F64)
        if operator == "add":
            return recompute.add(inputs[0], inputs[1], F64)
        if operator in ("silu_mul", "gelu_mul"):
            return recompute.gated(inputs[0], inputs[1], self._facts.activation, F64)
        if operator == "rms_norm":
            return self._norm(task, inputs[0])
        if operator == "all_reduce":
            wide = [one.to(F64) for one in inputs]
            size = torch.stack([one.abs() for one in wide]).sum(0).add_(recompute.tiny(inputs[0].dtype))
            return Exact(torch.stack(wide).sum(0), size)
        if operator == "topk_weights":
            routing = self._facts.routing
            assert routing is not None
            return recompute.expert_weights(inputs[0], inputs[1], routing, F64)
        if operator == "gated_add":
            return recompute.gated_add(inputs[0], inputs[1], inputs[2], F64)
        if operator == "expert_mix":
            return self._mix(task, *inputs)
        assert operator == "gated_mlp", operator
        return self._shared(task, inputs[0])

    def _norm(self, task: Task, x: Tensor) -> Exact:
        weight = self._read(task)
        eps, offset = self._structure.eps, self._facts.norm_offset
        if weight.numel() == x.shape[-1]:
            return recompute.rms_norm(x, weight, eps, F64, offset)
        if weight.numel() == prod(x.shape[1:]):  # one norm over all heads
            exact = recompute.rms_norm(x.flatten(1), weight, eps, F64, offset)
            return Exact(exact.value.view(x.shape), exact.magnitude.view(x.shape))
        raise NotObservableError(f"a norm weight of {weight.numel()} elements does not fit {list(x.shape[1:])}")

    # ------------------------------------------------------------------------------------------------- weights

    def weights(self) -> CheckpointWeights:
        """The files.

        Raises:
            NotObservableError: there are none.
        """
        if self._weights is None:
            raise NotObservableError(self._missing)
        return self._weights

    def _name(self, task: Task) -> str:
        kind, layer = task.name.kind.name, task.name.layer
        found = self.weights().name(kind, layer)
        if found is None:
            raise NotObservableError(f"the checkpoint's files have no weight for {task.name}")
        return found

    def _read(self, task: Task) -> Tensor:
        return self.weights().read(self._name(task))

    def _expert_part(self, part: str, layer: int | None, expert: int = 0) -> Tensor:
        name = self.weights().of_experts(part, layer, expert)
        if name is None:
            raise NotObservableError(
                f"the checkpoint's files have no weight {part} of expert {expert} in layer {layer}"
            )
        return self.weights().read(name)

    def sinks(self, layer: int | None) -> Tensor | None:
        """The sinks of a layer's heads ``[heads]``, if the model has any."""
        name = None if self._weights is None else self._weights.of_experts("attn.sinks", layer)
        return None if name is None else self.weights().read(name)

    # ----------------------------------------------------------------------------------------------- operators

    def _linear(self, task: Task, x: Tensor, rank: int) -> Iterator[Chunk]:
        weights, name = self.weights(), self._name(task)
        out, inner = weights.shape(name)
        kind = task.name.kind.name
        limit = self._structure.vocab if kind == "logits" else out
        columns = None
        if rank >= 0 and self._structure.tp > 1:
            part = split(inner, self._structure.tp, rank % self._structure.tp)
            columns, inner = slice(part.start, part.start + part.count), part.count
        if inner != x.shape[1] or limit > out:
            raise NotObservableError(f"{name} of shape {[out, inner]} does not fit an input of {x.shape[1]} channels")
        bias_name = weights.name(kind, task.name.layer, bias=True)
        bias = None if bias_name is None or rank > 0 else weights.read(bias_name).to(F64)
        for here in _slices(len(x), limit, MIN_ROWS):
            wide = x[here].to(F64)
            product, norms = torch.empty(len(wide), limit, dtype=F64), torch.empty(limit, dtype=F64)
            for start, piece in weights.pieces(name, columns):
                matrix = piece[: limit - start].to(F64)
                end = start + len(matrix)
                torch.mm(wide, matrix.T, out=product[:, start:end])
                norms[start:end] = torch.linalg.vector_norm(matrix, dim=1)
            lengths = torch.linalg.vector_norm(wide, dim=1)
            magnitude = recompute.linear_magnitude(product, lengths, norms, inner, x.dtype)
            if bias is not None:
                product += bias
                magnitude += product.abs()
            exact = Exact(product, magnitude)
            if kind == "logits" and self._facts.logits_softcap is not None:
                exact = recompute.soft_cap(exact, self._facts.logits_softcap)
            yield here, exact

    def _rope(self, x: Tensor, positions: Tensor) -> Iterator[Chunk]:
        longest = int(positions.max()) + 1 if len(positions) else 0
        try:
            inverse, factor = recompute.rope_frequencies(self._facts.rope, x.shape[-1], longest)
        except ValueError as error:
            raise NotObservableError(str(error)) from error
        for here in _slices(len(x), prod(x.shape[1:])):
            yield here, recompute.rope(x[here], positions[here], inverse, factor, F64, self._facts.interleaved)

    def _embedding(self, ids: Tensor) -> Iterator[Chunk]:
        weights = self.weights()
        name = weights.name("embed", None)
        if name is None:
            raise NotObservableError("the checkpoint's files have no embedding")
        rows, width = weights.shape(name)
        if bool(((ids < 0) | (ids >= rows)).any()):
            raise NotObservableError(f"token ids beyond the embedding of {rows} rows")
        for here in _slices(len(ids), width):
            distinct, where = ids[here].unique(return_inverse=True)
            table = torch.cat([weights.read(name, slice(one, one + 1)) for one in distinct.tolist()])
            yield here, recompute.embedding(where, table, F64)

    def _mix(self, task: Task, x: Tensor, ids: Tensor, shares: Tensor) -> Exact:
        layer, routing = task.name.layer, self._facts.routing
        assert routing is not None
        if bool(((ids < 0) | (ids >= routing.experts)).any()):
            raise NotObservableError(f"expert ids beyond the {routing.experts} experts were recorded")

        def expert(index: int) -> tuple[Tensor, Tensor, Tensor]:
            gate, up, down = (self._expert_part(part, layer, index) for part in ("gate", "up", "down"))
            return gate, up, down

        routing = self._facts.routing
        first_zero = None if routing is None or not routing.zero else routing.experts - routing.zero
        return recompute.expert_mix(x, ids, shares, expert, self._facts.activation, F64, first_zero)

    def _shared(self, task: Task, x: Tensor) -> Exact:
        layer = task.name.layer
        gate, up, down = (self._expert_part(f"shared_{part}", layer) for part in ("gate", "up", "down"))
        return recompute.gated_mlp(x, gate, up, down, self._facts.activation, F64)

    def choice(self, task: Task, logits: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Excess of the recorded choice, ``[R, top_k]``, see :func:`align.checkpoints.recompute.choice_excess`."""
        routing = self._facts.routing
        assert routing is not None
        name = None if self._weights is None else self._weights.of_experts("router_bias", task.name.layer)
        if self._weights is None and routing.scoring == "sigmoid":
            raise NotObservableError(self._missing)
        bias = None if name is None else self.weights().read(name, dtype=torch.float32)  # engines keep it so
        return recompute.choice_excess(logits, ids, routing, dtype, bias, F64)


def _slices(rows: int, width: int, least: int = 1) -> Iterator[slice]:
    each = max(least, CHUNK // max(1, width))
    for start in range(0, rows, each):
        yield slice(start, min(rows, start + each))
