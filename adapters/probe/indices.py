"""Records what every step of one rank writes into and reads from the paged cache (path A); see :mod:`align.ledger`.

Nothing of the cache is kept but checksums: of the rows just before they are written, and, just before attention, of the
rows that its block table names, as far as they are not what they were when they were last looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.cache_calls import CacheCalls, CallListener, Read, Write
from adapters.probe.callsite import frames
from adapters.probe.hung import Hung
from adapters.probe.index_rows import Handed, indices_of, spans_of
from adapters.probe.taps import Tap, parameters_of, resolve
from align.ledger.record.checksum import cache_sums, row_sums
from align.ledger.record.files import LedgerWriter
from align.ledger.record.reads import ReadMemory
from align.ledger.record.types import IndexRecord, Indices, Pool, Span

#: Files whose line is named as the place of a call (seed 003, path A); the innermost frame's where none is among them.
_FILES = ("kernels/dlinfer/fill_kv_cache.py", "kernels/dlinfer/pagedattention.py", "attention/attention_v1.py")
_DEPTH = 8
#: Attributes of the engines' attention metadata that hold block tables.
_TABLES = ("block_offsets", "block_tables")


class IndexRecorder:
    """Of one rank; :meth:`begin` and :meth:`end` bracket a step, :meth:`attention` the attention of a layer in it.

    Args:
        layers: of the model.
        reserved: blocks that no request may own.
        caches: keys and values of each layer as they were built, ``[blocks, block_size, …]``; empty if not known.
        dp_rank: data-parallel group of the rank.
        made: where the engine makes indices; see :func:`adapters.probe.index_makers.made_at`.
        calls: hears besides of the operators' arguments.
    """

    def __init__(
        self,
        writer: LedgerWriter,
        rank: int,
        layers: int,
        reserved: tuple[int, ...] = (),
        caches: Sequence[tuple[Tensor, Tensor]] = (),
        dp_rank: int = 0,
        made: Mapping[str, str] | None = None,
        calls: CallListener | None = None,
    ) -> None:
        self._dp_rank, self._made = dp_rank, dict(made or {})
        self._writer, self._rank, self._layers, self._reserved = writer, rank, layers, reserved
        self._caches = caches
        #: Whether the cache was zero when it was built: only then does a row that is not tell anything.
        self._clean = bool(caches) and not any(_used_rows(one) for pair in caches for one in pair)
        self._memory = ReadMemory(layers)
        self._step: _Step | None = None
        self._run = self._last = 0
        self._dummies = 0
        self._begun = False
        self._pool = Pool(1, 0, reserved)
        self._heard, self._calls = calls, CacheCalls(self, calls)

    # ---------------------------------------------------------------------------------------------------- steps

    @property
    def active(self) -> bool:
        """Whether a forward is being recorded."""
        return self._step is not None

    def begin(self, run: int, step: int, phase: str, rows: Sequence[RowSpan]) -> None:
        """A forward over ``rows`` is about to run."""
        self.end()
        if run != self._run:
            self._memory = ReadMemory(self._layers)  # requests of another run are others
        self._run, self._last = run, step
        self._step = _Step(step, phase, tuple(rows), self._layers)
        if not self._begun:
            self._begun = True
            self._step.dirty = self._dirty()

    def reorder(self, requests: Sequence[str]) -> None:
        """The engine batches the step's spans in this order."""
        if self._step is not None and not self._step.dummy:
            spans = {row.request: row for row in self._step.rows}
            self._step.rows = tuple(spans[request] for request in requests if request in spans)

    def dummy(self, idle: bool = False, run: int | None = None) -> None:
        """A forward without requests is about to run; it ends when another one begins.

        Args:
            idle: it keeps a data-parallel rank in lockstep with the others.
            run: that it belongs to; that of the last step if not given.
        """
        self.end()
        if run is not None and run != self._run:
            self._run, self._last, self._memory = run, 0, ReadMemory(self._layers)
        self._dummies += 1
        self._step = _Step(self._last, "dummy", (), self._layers, dummy=True, idle=idle)

    def end(self) -> None:
        """The forward is over: write what was seen of it."""
        step, self._step = self._step, None
        if step is None or (step.dummy and not step.slots):
            return
        self._writer.write(self._record(step))

    def close(self) -> None:
        """Nothing more will be recorded."""
        self.end()
        self._writer.close()

    def _dirty(self) -> int | None:
        if not self._clean or self._dummies:
            return None
        return sum(_used_rows(one) for pair in self._caches for one in pair)

    # ------------------------------------------------------------------------------------------------ attention

    @contextmanager
    def attention(self, layer: int, metadata: Any) -> Iterator[None]:
        """The attention of a layer runs meanwhile."""
        step = self._step
        if step is None:
            yield
            return
        step.layer = layer
        if self._heard is not None:
            self._heard.at(layer)
        found = (getattr(metadata, name, None) for name in _TABLES)
        step.tables = next((one for one in found if isinstance(one, Tensor)), None)
        with self._calls:
            yield

    def before_write(self, call: Write) -> None:
        """Rows are about to be written."""
        step = self._step
        if step is None:
            return
        step.pool = Pool(int(call.key_cache.shape[1]), int(call.key_cache.shape[0]), self._reserved)
        step.slots[step.layer] = call.slots.detach().to("cpu", torch.int64, copy=True).reshape(-1)
        step.lossy = call.key_cache.dtype != call.key.dtype
        step.caches[step.layer] = (call.key_cache, call.value_cache)
        if not step.lossy:
            step.written[step.layer] = torch.stack([row_sums(call.key), row_sums(call.value)], -1)
        if step.layer == 0:
            step.key_rows = int(call.key.shape[0])
            step.dtypes["slots"] = str(call.slots.dtype).removeprefix("torch.")
            step.calls["write"] = _place()

    def after_write(self, call: Write) -> None:
        """Rows were written; where the cache holds another dtype, what they became is what counts."""
        step = self._step
        if step is None or not step.lossy:
            return
        slots = step.slots[step.layer]
        inside = (slots >= 0) & (slots < call.key_cache.shape[0] * call.key_cache.shape[1])
        sums = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
        for index, one in enumerate((call.key_cache, call.value_cache)):
            sums[inside, index] = cache_sums(one, slots[inside])
        step.written[step.layer] = sums

    def before_read(self, call: Read) -> None:
        """Attention is about to read the rows that its table names."""
        step = self._step
        if step is None:
            return
        tables = step.tables if call.tables is None else call.tables
        if tables is None:
            raise LookupError("neither the operator nor the attention's metadata has a block table")
        held = tables.detach().to("cpu", torch.int64, copy=True)
        handed = Handed(held, call.q_lens, call.kv_lens, call.q_starts)
        step.handed[step.layer] = handed
        step.paged = call.tables is not None
        if step.reader_block is None or step.pool is None or step.reader_block == step.pool.block_size:
            step.reader_block = call.block_size  # of the first layer that takes another one
        if step.layer == 0:
            step.dtypes["tables"] = str(tables.dtype).removeprefix("torch.")
            step.calls["read"] = _place()
        if step.dummy or step.pool is None:
            return
        keys, values = (call.keys, call.values) if step.paged else step.caches[step.layer]
        slots = step.slots_to_read(handed)
        inside = slots >= 0
        sums = torch.zeros((slots.shape[0], 2), dtype=torch.int64)
        for index, one in enumerate((keys, values)):
            sums[inside, index] = cache_sums(one, slots[inside])
        step.found[step.layer] = sums

    def fail(self, what: str, error: Exception) -> None:
        """Something could not be recorded."""
        if self._step is not None:
            self._step.failures.setdefault(what, f"{type(error).__name__}: {error}")

    # --------------------------------------------------------------------------------------------------- record

    def _record(self, step: _Step) -> IndexRecord:
        layers = range(self._layers)
        lacking = [layer for layer in layers if layer not in step.handed]
        if lacking:
            step.failures.setdefault("attention", f"not seen in {len(lacking)} layers, the first is {lacking[0]}")
        self._pool = step.pool or self._pool
        spans = step.spans()
        base = step.indices(0, spans)
        other = {layer: step.indices(layer, spans) for layer in layers if not step.like_first(layer)}
        written = None
        if all(layer in step.written for layer in layers):
            rows = {one.shape[0] for one in step.written.values()}
            if len(rows) == 1:
                written = torch.stack([step.written[layer] for layer in layers])
        if written is not None and len(step.found) == self._layers and not step.dummy:
            self._remember(step, written)
        return IndexRecord(
            step=step.step, rank=self._rank, phase=step.phase, pool=self._pool, spans=spans, base=base,
            layers=self._layers, other={layer: one for layer, one in other.items() if not one.same(base)},
            key_rows=step.key_rows, dtypes=step.dtypes, written=written,
            found=self._memory.take(sum(span.count for span in spans)), paged=step.paged, lossy=step.lossy,
            dirty=step.dirty, calls={**self._made, **step.calls}, run=self._run, failures=step.failures,
            dp_rank=self._dp_rank, reader_block=step.reader_block,
        )  # fmt: skip

    def _remember(self, step: _Step, written: Tensor) -> None:
        """Compare what was found with what is remembered, request by request."""
        found = torch.stack([step.found[layer] for layer in range(self._layers)])
        row = start = 0
        for index, span in enumerate(step.rows):
            self._memory.wrote(span.request, span.start, written[:, row : row + span.count])
            row += span.count
            length = step.reading[index]
            self._memory.read(span.request, index, found[:, start : start + length])
            start += length


class _Step:
    """What is known of the running forward."""

    def __init__(
        self, step: int, phase: str, rows: tuple[RowSpan, ...], layers: int, dummy: bool = False, idle: bool = False
    ) -> None:
        self.step, self.phase, self.rows, self.layers, self.dummy = step, phase, rows, layers, dummy
        self.idle = idle
        self.layer = 0
        #: Of the layer's metadata.
        self.tables: Tensor | None = None
        self.pool: Pool | None = None
        #: Layer → what was seen of it.
        self.slots: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self.handed: dict[int, Handed] = {}
        self.found: dict[int, Tensor] = {}
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}
        self.key_rows: int | None = None
        self.dtypes: dict[str, str] = {}
        self.calls: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.paged, self.lossy = True, False
        self.dirty: int | None = None
        self.reader_block: int | None = None
        #: Rows that are read back of each span.
        self.reading: list[int] = []
        self._read: tuple[Handed, Tensor] | None = None

    def spans(self) -> tuple[Span, ...]:
        """Of the requests, and of the rows behind them."""
        slots, handed = self.slots.get(0), self.handed.get(0)
        count = 0 if slots is None else int(slots.shape[0])
        if self.dummy:
            return (Span("", 0, count, 0, "idle" if self.idle else "dummy"),)
        return spans_of(self.rows, count, 0 if handed is None else int(handed.q_lens.shape[0]))

    def indices(self, layer: int, spans: Sequence[Span]) -> Indices:
        """What a layer was handed; layer 0's if it was handed the same."""
        slots = self.slots.get(layer)
        if slots is None:  # attention ran, and nothing was written
            slots = torch.full((sum(span.count for span in spans),), -1, dtype=torch.int64)
        return indices_of(slots, self.handed.get(layer), spans)

    def like_first(self, layer: int) -> bool:
        """Whether a layer was handed what layer 0 was."""
        mine, first = self.slots.get(layer), self.slots.get(0)
        if (mine is None) != (first is None):
            return False
        if mine is not None and first is not None and not torch.equal(mine, first):
            return False
        handed, base = self.handed.get(layer), self.handed.get(0)
        return handed is base or (handed is not None and base is not None and handed.same(base))

    def slots_to_read(self, handed: Handed) -> Tensor:
        """The slots of each request's positions so far, by this table, one request after the other; −1 for none."""
        if self._read is not None and self._read[0].same(handed):
            return self._read[1]
        assert self.pool is not None
        tables = indices_of(None, handed, spans_of(self.rows, 0, 0)).tables
        size, found, reading = self.pool.block_size, [], []
        for row, span in enumerate(self.rows):
            length = span.start + span.count if row < tables.shape[0] else 0
            positions = torch.arange(length)
            column = positions // size
            line = tables[row] if row < tables.shape[0] else tables.new_zeros(1)
            block = torch.where(column < line.shape[0], line[column.clamp(max=line.shape[0] - 1)], -1)
            inside = (block >= 0) & (block < self.pool.blocks)
            found.append(torch.where(inside, block * size + positions % size, -1))
            reading.append(length)
        self.reading = reading
        self._read = handed, torch.cat(found)
        return self._read[1]


class AttentionListener(Protocol):
    """What is told of the attention of each layer."""

    @property
    def active(self) -> bool: ...

    def attention(self, layer: int, metadata: Any) -> AbstractContextManager[None]: ...


def hang_up(recorder: AttentionListener, taps: Sequence[Tap], model: Any, layers: int, hung: Hung) -> dict[str, str]:
    """Tell the recorder of every attention of a model, at the site where the taps find its output.

    Args:
        hung: gets what takes it off again.

    Returns:
        Layer → why its attention was not found.
    """
    missing: dict[str, str] = {}
    tap = next(one for one in taps if one.checkpoint == "attn.out")
    for layer in range(layers):
        try:
            target = resolve(model, tap.site.replace("{i}", str(layer)))
            original = getattr(target, tap.attribute)
            place = parameters_of(original).index("attn_metadata")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            missing[f"layers.{layer}"] = f"{tap.site}: {error}"
            continue
        hung.put(target, tap.attribute, _audited(recorder, layer, original, place))
    return missing


def _audited(recorder: AttentionListener, layer: int, original: Any, place: int) -> Any:
    @functools.wraps(original)
    def audited(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return original(*args, **kwargs)
        metadata = kwargs.get("attn_metadata", args[place] if place < len(args) else None)
        with recorder.attention(layer, metadata):
            return original(*args, **kwargs)

    return audited


def _place() -> str:
    """``file:line`` of the engine's call that is running."""
    found = frames(_DEPTH)
    chosen = next((one for one in found if any(part in one.partition(":")[0] for part in _FILES)), None)
    return (chosen or (found[0] if found else "")).partition(" ")[0]


def _used_rows(cache: Tensor) -> int:
    """Rows of a cache ``[blocks, block_size, …]`` that are not zero; NaN counts."""
    used = 0
    for block in cache.split(64):
        used += int((block != 0).flatten(2).any(-1).sum())
    return used
