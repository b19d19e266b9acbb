"""Collects what the taps of one rank see in a step, and writes it when the step ends.

Tensors are copied at hook time, because kernels write in place. All layers of a kind share one buffer
``[layers, T, …]``, so that what is derived from them is computed for all layers at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.callbook import CallBook, Tapped
from adapters.probe.digests import DigestPass
from adapters.probe.dispatch import ROUTED, Dispatch
from adapters.probe.lean import RowChoice
from adapters.probe.residual import ResidualPass, Weights
from adapters.probe.routing import RoutingReplay
from adapters.probe.slots import positions_of
from adapters.probe.spec import CaptureSpec
from adapters.probe.transplant import Transplant
from adapters.probe.watch import Watch
from align.checkpoints.shards import shards
from align.checkpoints.table import Name, Structure, kinds
from align.trace.calls import CALLS_FILE, HOST_FILE, call_lines
from align.trace.format import POSITIONS, TOKEN_IDS, TOKEN_RESIDUAL, StepEntry, checkpoint_of
from align.trace.writer import TraceWriter

#: Sums over steps are rewritten at most this often, and at the last step of a run.
_FLUSH_SECONDS = 1.0
#: Bytes that the buffers of one step may take.
MAX_BUFFER_BYTES = 6 << 30


class Recorder:
    """One rank's records of one launch.

    Args:
        weights: the live parameters, for the residual.
        block_size: tokens in one block of the cache.
    """

    def __init__(
        self,
        structure: Structure,
        rank: int,
        tp_rank: int,
        weights: Weights,
        block_size: int,
        dtype: torch.dtype,
        dp_rank: int = 0,
    ) -> None:
        self.structure, self.rank, self.tp_rank, self.dp_rank = structure, rank, tp_rank, dp_rank
        self._weights, self._block_size, self._dtype = weights, block_size, dtype
        self._spec: CaptureSpec | None = None
        self._run = 0
        self._writer: TraceWriter | None = None
        self._names = list(structure.names())
        self._kept: frozenset[str] = frozenset()
        #: Kind → layers (None for what exists once) that something is made of.
        self._wanted: dict[str, set[int | None]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._residual: ResidualPass | None = None
        self._digest: DigestPass | None = None
        #: Of a lean recording.
        self._choice: RowChoice | None = None
        self._step: _Step | None = None
        self._flushed = 0.0
        self._unwritten: set[str] = set()
        self._last = -1
        self._book = CallBook()
        self._watch = Watch(self._book)
        #: What could not be looked at of calls, as far as the trace says it.
        self._told: dict[str, str] = {}
        #: Checkpoints that no tap could be hung up for, with the reason.
        self.missing: dict[str, str] = {}
        #: What is replaced in this run before it is recorded.
        self.transplant: Transplant | None = None
        #: Whose experts routers use in this run.
        self.routing: RoutingReplay | None = None

    # ---------------------------------------------------------------------------------------------------- steps

    @property
    def active(self) -> bool:
        """Whether a step is being recorded."""
        return self._step is not None

    def begin(
        self, spec: CaptureSpec, run: int, step: int, phase: str, rows: Sequence[RowSpan], last: bool = False
    ) -> None:
        """A forward over ``rows`` is about to run; ``last``: it is the last one of the run."""
        self.start(spec, run)
        self._step = _Step(step, phase, tuple(rows), last)
        self._last = step
        self._step.failures.update(self.missing)
        self._book.begin(step, phase, self._step.count)
        self._watch.begin(step, phase)
        self._tell_rows(self._step.rows)

    def start(self, spec: CaptureSpec, run: int) -> None:
        """Begin to record a run, unless it is being recorded."""
        if run == self._run and spec == self._spec:
            return
        self._last = -1
        self._told.clear()
        self._book = CallBook()
        self._watch = Watch(self._book)
        if self.structure.tp > 1:
            self._watch.failures["floats from the host"] = "not looked for under tensor parallelism"
        if self._writer is not None:
            self._flush()  # a run that ended early had no last step
            self._writer.close()
        self._spec, self._run = spec, run
        parts = shards(self.structure, self.tp_rank)
        self._writer = TraceWriter(
            Path(spec.directory), self.rank, self.tp_rank, self.structure.tp, parts, self.dp_rank
        )
        self._kept = frozenset(
            str(name) for name in self._names if any(fnmatchcase(str(name), pattern) for pattern in spec.values)
        )
        everything = spec.residual or spec.digest
        self._wanted = {}
        for name in self._names:
            if everything or name.kind.always or str(name) in self._kept:
                self._wanted.setdefault(name.kind.name, set()).add(name.layer)
        self._residual = self._digest = None
        if spec.residual:
            self._residual = ResidualPass(
                self.structure, self._weights, self._dtype,
                sample_rows=spec.sample_rows, seed=spec.seed, lean=spec.lean,
            )  # fmt: skip
            self._residual.begin(run)
        if spec.digest:
            self._digest = DigestPass(parts, spec.seed, spec.lean)
        self._choice = RowChoice() if spec.lean else None
        given = spec.transplant
        self.transplant = None if given is None else Transplant(given, self.structure, self.rank, self.tp_rank)
        self.routing = None if spec.routing is None else RoutingReplay(spec.routing)

    def reorder(self, requests: Sequence[str]) -> None:
        """The engine batches the step's spans in this order."""
        if self._step is not None:
            spans = {row.request: row for row in self._step.rows}
            assert sorted(requests) == sorted(spans), f"a batch of {requests}, but the step computes {list(spans)}"
            self._step.rows = tuple(spans[request] for request in requests)
            self._tell_rows(self._step.rows)

    def _tell_rows(self, rows: tuple[RowSpan, ...]) -> None:
        """To whom replaces rows of the step."""
        if self.transplant is not None:
            self.transplant.rows = rows
        if self.routing is not None:
            self.routing.begin(rows)

    @property
    def own_rows(self) -> int | None:
        """Tokens of the running step among the rows that this rank sends to experts; ``None`` if it is not recorded."""
        step = self._step
        if step is None or not step.dispatch.method:
            return None
        part = step.dispatch.parts.get(ROUTED[0])
        return step.count if part is None else part.rows

    def sent(self, dispatch: Dispatch) -> None:
        """How the tokens of the running step reach the experts is known."""
        if self._step is not None:
            self._step.dispatch = dispatch

    def dummy(self, tokens: int = 0) -> None:
        """A forward without requests is about to run; the trace says so, and nothing of it is kept but its length."""
        self._step = None
        self._watch.end()
        if self._writer is not None:
            self._writer.write_dummy(self._last, tokens)

    # ----------------------------------------------------------------------------------------------------- calls

    def watching(self) -> AbstractContextManager[None]:
        """Around the synchronous parts of a step's forward: see what is computed on the host meanwhile.

        Not under tensor parallelism, where it has not been tried enough.
        """
        return nullcontext() if self.structure.tp > 1 else self._watch.watching()

    @property
    def listening(self) -> bool:
        """Whether anybody wants to know of the calls of this step; it does not change within one."""
        return self._book.noting or self._watch.on

    def enter(self, tapped: Tapped, layer: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A tapped function is about to be called with these arguments."""
        self._book.enter(tapped, layer, args, kwargs)
        self._watch.given(tapped.parameters, args, kwargs)

    def leave(self) -> None:
        """The tapped function that was entered last has ended."""
        self._book.leave()

    # ------------------------------------------------------------------------------------------------------ taps

    def wants(self, checkpoint: str, layer: int | None) -> bool:
        """Whether something is made of it. An unknown layer is: its record then says that it is unknown."""
        kind = kinds().get(checkpoint)
        if kind is None:
            return True
        wanted = self._wanted.get(checkpoint, set())
        return layer in wanted if kind.per_layer == (layer is not None) else bool(wanted)

    def put(self, checkpoint: str, layer: int | None, value: Any) -> None:
        """Copy one canonical tensor ``[T or more, …]``; the first of a name in a step counts."""
        step = self._step
        assert step is not None
        kind = kinds().get(checkpoint)
        if kind is None:
            step.about[checkpoint] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            return
        if kind.per_layer != (layer is not None):
            raise ValueError("it is not known which layer this is of" if kind.per_layer else "it belongs to no layer")
        rows = len(step.rows) if checkpoint == "logits" else step.count
        part = step.dispatch.parts.get(checkpoint)
        if part is not None:
            value, rows = value[part.skip :], part.rows
        if value.shape[0] < rows:
            raise ValueError(f"{value.shape[0]} rows were seen, the step has {rows}")
        place = 0 if layer is None else layer
        seen = step.present.get(checkpoint, set())
        if place in seen:
            raise ValueError("it was computed twice in one step")
        held = self._buffers.get(checkpoint)
        if seen and held is not None and (held.shape[1:], held.dtype) != (value[:rows].shape, value.dtype):
            other = f"{held.dtype} {list(held.shape[2:])}"
            raise ValueError(f"{value.dtype} {list(value.shape[1:])} per row, but {other} in other layers")
        self._buffer(checkpoint, value[:rows])[place].copy_(value[:rows])
        step.present[checkpoint] = {*seen, place}
        self._book.after = kind.at(layer)

    def _buffer(self, checkpoint: str, value: Tensor) -> Tensor:
        layers = self.structure.layers if kinds()[checkpoint].per_layer else 1
        shape = (layers, *value.shape)
        buffer = self._buffers.get(checkpoint)
        if buffer is None or buffer.shape != shape or buffer.dtype != value.dtype:
            self._buffers.pop(checkpoint, None)
            size = sum(one.numel() * one.element_size() for one in self._buffers.values())
            if size + layers * value.numel() * value.element_size() > MAX_BUFFER_BYTES:
                raise MemoryError(
                    f"the records of a step of {value.shape[0]} rows exceed {MAX_BUFFER_BYTES >> 30} GiB; "
                    "use shorter prompts, or fewer in one step"
                )
            buffer = self._buffers[checkpoint] = torch.empty(shape, dtype=value.dtype)
        return buffer

    def fail(self, checkpoint: str, layer: int | None, error: Exception) -> None:
        """A tap could not do its work; the record is missing, and the step says why."""
        if self._step is not None:
            kind = kinds().get(checkpoint)
            name = checkpoint if kind is None or (layer is None) == kind.per_layer else kind.at(layer)
            self._step.failures.setdefault(name, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """The forward is over: derive, and write."""
        step, self._step = self._step, None
        if step is None:
            return
        assert self._writer is not None and self._spec is not None
        self._write_calls()
        if self.transplant is not None:
            self.transplant.leave()
        try:
            token_ids, positions = self._inputs(step)
            tensors: dict[str, Tensor] = {TOKEN_IDS: token_ids, POSITIONS: positions}
            self._slots(step, positions)
            values = {kind: self._buffers[kind] for kind in step.present}
            # Digests of shards and summands add up over the ranks, and those of anything else do not.
            apart = {*step.dispatch.parts, *(step.dispatch.whole if self.structure.tp > 1 else ())}
            for name in self._names:
                place = 0 if name.layer is None else name.layer
                always = name.kind.always or name.kind.name in apart
                if place in step.present.get(name.kind.name, ()) and (always or str(name) in self._kept):
                    tensors[str(name)] = values[name.kind.name][place]
            if self.routing is not None:
                tensors.update(self.routing.used)
                step.failures.update(self.routing.failures)
            values = {kind: value for kind, value in values.items() if kind not in apart}
            present = {kind: layers for kind, layers in step.present.items() if kind in values}
            chosen = None if self._choice is None else self._choice.choose(step.rows)
            if self._digest is not None:
                tensors.update(self._digest.step(step.rows, step.phase, values, present, chosen or ()))
            sampled: list[int] = []
            if self._residual is not None:
                shaped = {kind: buffer if kinds()[kind].per_layer else buffer[0] for kind, buffer in values.items()}
                if POSITIONS in step.failures:  # as they should be
                    positions = torch.cat([torch.arange(row.start, row.start + row.count) for row in step.rows])
                ends = [index - 1 for index in _ends(step.rows)]
                found = self._residual.step(
                    step.rows, step.phase, positions, token_ids, shaped, ends, present=present, number=step.step
                )
                sampled = list(found.sampled)
                tensors.update(found.tensors)
                step.failures.update({f"{name}{TOKEN_RESIDUAL}": why for name, why in found.skipped.items()})
            entry = StepEntry(
                step=step.step,
                phase=step.phase,
                rows=step.rows,
                sampled=tuple(sampled),
                logits_rows=tuple((row.request, row.start + row.count - 1) for row in step.rows),
                digested=chosen,
                noted=() if chosen is None else self._noted(step, tensors),
                failures=step.failures,
                experts=step.dispatch.to_dict() if self.structure.experts else {},
            )
            self._writer.write_step(entry, tensors)
            self._unwritten.add(step.phase)
            if step.last or time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._flush()
        finally:
            step.present.clear()

    def _noted(self, step: _Step, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Checkpoints that were seen in a step, and of which nothing is kept."""
        kept = {checkpoint_of(key) for key in tensors}
        seen = (name for name in self._names if (name.layer or 0) in step.present.get(name.kind.name, ()))
        return tuple(str(name) for name in seen if str(name) not in kept)

    def _write_calls(self) -> None:
        """What the step's calls were given, and what came from the host."""
        assert self._writer is not None
        calls, operators = self._book.end()
        failures = {**self._book.failures, **self._watch.failures}
        new = {what: why for what, why in failures.items() if what not in self._told}
        self._told.update(new)
        self._writer.write_lines(CALLS_FILE, call_lines(calls, operators, new))
        self._writer.write_lines(HOST_FILE, [asdict(move) for move in self._watch.end()])

    def _flush(self) -> None:
        """Write the sums of the phases that went on since they were last written."""
        assert self._writer is not None
        for which, source in (("residual", self._residual), ("digest", self._digest)):
            if source is not None and not (which == "digest" and self._choice is not None):
                for phase in sorted(self._unwritten):
                    self._writer.write_accumulated(which, phase, source.accumulated(phase))
        self._unwritten.clear()
        self._flushed = time.monotonic()

    def _inputs(self, step: _Step) -> tuple[Tensor, Tensor]:
        """Token ids and positions as the engine fed them, int64 ``[T]``."""
        found = []
        for name in (TOKEN_IDS, POSITIONS):
            value = step.about.get(name)
            if isinstance(value, Tensor) and value.numel() >= step.count:
                found.append(value.reshape(-1)[: step.count].long().contiguous())
            else:
                step.failures.setdefault(name, "the engine's input was not seen")
                found.append(torch.full((step.count,), -1, dtype=torch.int64))
        return found[0], found[1]

    def _slots(self, step: _Step, positions: Tensor) -> None:
        """Cache slots in canonical form: the position that the block table gives each slot, −1 for a foreign one."""
        kind = "attn.kv_start_indices"
        if kind not in step.present:
            return
        tables = step.about.get("block_tables")
        why = "the block table was not seen"
        if isinstance(tables, Tensor):
            try:
                counts = [row.count for row in step.rows]
                self._buffers[kind] = positions_of(self._buffers[kind], tables, counts, self._block_size)
                return
            except (ValueError, RuntimeError) as error:
                why = f"{type(error).__name__}: {error}"
        for layer in step.present.pop(kind):
            step.failures.setdefault(kinds()[kind].at(layer), why)


class _Step:
    """What is known of the running step."""

    def __init__(self, step: int, phase: str, rows: tuple[RowSpan, ...], last: bool) -> None:
        self.step, self.phase, self.rows, self.last = step, phase, rows, last
        self.count = sum(row.count for row in rows)
        #: Kind → layers that were seen (0 for what exists once).
        self.present: dict[str, set[int]] = {}
        self.about: dict[str, Any] = {}
        self.dispatch = Dispatch()
        self.failures: dict[str, str] = {}


def _ends(rows: Sequence[RowSpan]) -> list[int]:
    """Index behind the last row of each span."""
    ends, total = [], 0
    for row in rows:
        total += row.count
        ends.append(total)
    return ends


__all__ = ["MAX_BUFFER_BYTES", "Name", "Recorder"]
