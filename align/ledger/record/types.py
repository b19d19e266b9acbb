"""What a worker records of the cache's indices in one step, in a form that does not depend on the engine.

Raw block ids and slots are kept: they mean something within one engine run, and the audit never compares them across
engines. Rows stand in batch order; padding rows follow with spans of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

#: A slot, a block or an owner that is none.
NONE = -1
#: What a span is: ``real`` computes positions of a request; ``padding`` fills a batch up to the size of a graph;
#: ``dummy`` is warm-up and profiling; ``idle`` keeps a data-parallel rank without requests in lockstep.
SPAN_KINDS = ("real", "padding", "dummy", "idle")
_TENSORS = ("slots", "tables", "q_lens", "kv_lens", "q_starts")


@dataclass(frozen=True)
class Pool:
    """The paged cache of one rank.

    Attributes:
        block_size: tokens in one block of the cache tensor itself; the unit of slots.
        blocks: blocks of the cache tensor.
        reserved: blocks that no request may own: where dummies write, and what pads tables.
    """

    block_size: int
    blocks: int
    reserved: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        return self.block_size * self.blocks

    def place(self, slot: int) -> tuple[int, int]:
        """``(block, offset)`` of a slot."""
        return slot // self.block_size, slot % self.block_size


@dataclass(frozen=True)
class Span:
    """Rows of one request in a step: positions ``start … start + count - 1``; see :class:`adapters.base.RowSpan`.

    ``request`` is empty and ``start`` 0 unless ``kind`` is ``real``.
    """

    request: str
    start: int
    count: int
    occurrence: int = 0
    kind: str = "real"

    @property
    def real(self) -> bool:
        return self.kind == "real"

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, eq=False)
class Indices:
    """What one layer was handed. int64 on the CPU, whatever it was.

    Attributes:
        slots: flat slot that each row of the keys is written to ``[N]``; −1 for none.
        tables: block ids in order ``[spans, W]``, one row per span; behind a request's blocks is padding.
        q_lens: rows of each span ``[spans]``.
        kv_lens: keys that attention reads for each span ``[spans]``.
        q_starts: cumulative offsets ``[spans + 1]`` from 0 where the operator takes cumulative ones, else ``None``.
    """

    slots: Tensor
    tables: Tensor
    q_lens: Tensor
    kv_lens: Tensor
    q_starts: Tensor | None = None

    def same(self, other: Indices) -> bool:
        """Whether two layers were handed the same."""
        for name in _TENSORS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
                return False
        return True


@dataclass(frozen=True, eq=False)
class Found:
    """Checksums of cache rows that were not what this request had there when it was last looked at.

    A worker remembers for each (layer, request, position) the sum of what it wrote or last found; only what differs
    from that is recorded (:class:`align.ledger.record.reads.ReadMemory`). A right engine yields each position of a
    prefix hit once and nothing else.

    Attributes:
        where: int32 ``[F, 3]``: layer, span, position.
        sums: int64 ``[F, 2]``: key and value.
        total: how many differed; more than F if the record was cut.
    """

    where: Tensor = field(default_factory=lambda: torch.zeros((0, 3), dtype=torch.int32))
    sums: Tensor = field(default_factory=lambda: torch.zeros((0, 2), dtype=torch.int64))
    total: int = 0


@dataclass(frozen=True, eq=False)
class IndexRecord:
    """One forward of one rank.

    Attributes:
        step: number of the step; dummies carry that of the last real step before them.
        rank: whose cache it is.
        phase: ``prefill``, ``decode``, ``mixed`` or ``dummy``.
        pool: of this rank.
        spans: in batch order; their counts make N.
        base: what layer 0 was handed.
        layers: number of layers.
        other: layer → what it was handed, of those that differ from layer 0.
        key_rows: rows of the keys that were handed to the write along with the slots.
        dtypes: ``slots``, ``tables`` → dtype as handed to the operators, ``int32``.
        written: sums of the key and value rows just before the write, int64 ``[layers, N, 2]``; ``None``: not taken.
        found: what attention would find, taken after the write and before attention.
        paged: whether attention reads the cache in this step (a prefill without history need not).
        lossy: the cache holds another dtype than the keys (int8): ``written`` was taken from the cache, just after.
        dirty: rows of the cache that were not zero before the first write of the run; ``None`` where that says nothing
            (warm-up ran, or the pool was not zeroed).
        calls: ``write``, ``read`` → ``file:line`` of the engine's call; ``slots``, ``tables`` → ``file:line function``
            of what makes them, one after the other.
        run: number of the run within the launch, from 1; 0 before the first.
        dp_rank: data-parallel group of the rank.
        failures: what could not be recorded → why.
        reader_block: tokens in one block as attention takes the cache; ``None`` where it reads none, or is not known.
    """

    step: int
    rank: int
    phase: str
    pool: Pool
    spans: tuple[Span, ...]
    base: Indices
    layers: int
    other: Mapping[int, Indices] = field(default_factory=dict)
    key_rows: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    written: Tensor | None = None
    found: Found = field(default_factory=Found)
    paged: bool = True
    lossy: bool = False
    dirty: int | None = None
    calls: Mapping[str, str] = field(default_factory=dict)
    run: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)
    dp_rank: int = 0
    reader_block: int | None = None

    @property
    def rows(self) -> int:
        """N, padding included."""
        return sum(span.count for span in self.spans)

    def at(self, layer: int) -> Indices:
        """What a layer was handed."""
        return self.other.get(layer, self.base)

    @property
    def bytes(self) -> int:
        """Of the checksums."""
        parts = [self.found.where, self.found.sums, *([] if self.written is None else [self.written])]
        return sum(part.numel() * part.element_size() for part in parts)

    def split(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able part and tensors; the inverse of :meth:`join`."""
        tensors: dict[str, Tensor] = {}
        if self.found.where.shape[0]:
            tensors |= {"found.where": self.found.where, "found.sums": self.found.sums}
        if self.written is not None:
            tensors["written"] = self.written
        for layer, indices in ((0, self.base), *self.other.items()):
            for name in _TENSORS:
                value = getattr(indices, name)
                if value is not None:
                    tensors[f"{layer}.{name}"] = _narrow(value)
        plain = {
            "step": self.step, "rank": self.rank, "phase": self.phase, "pool": asdict(self.pool),
            "spans": [[one.request, one.start, one.count, one.occurrence, one.kind] for one in self.spans],
            "layers": self.layers, "other": sorted(self.other), "key_rows": self.key_rows, "dtypes": dict(self.dtypes),
            "found_total": self.found.total, "paged": self.paged, "lossy": self.lossy, "dirty": self.dirty,
            "calls": dict(self.calls), "run": self.run, "failures": dict(self.failures),
            "dp_rank": self.dp_rank,
            "reader_block": self.reader_block,
        }  # fmt: skip
        return plain, tensors

    @classmethod
    def join(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> IndexRecord:
        """The record that was split.

        Raises:
            KeyError: a part is missing.
        """
        pool = {**plain["pool"], "reserved": tuple(plain["pool"]["reserved"])}
        names = ("step", "rank", "phase", "layers", "key_rows", "paged", "lossy", "dirty", "run", "failures")
        one = {key: plain[key] for key in names}
        return cls(
            **one,
            pool=Pool(**pool),
            spans=tuple(Span(*span) for span in plain["spans"]),
            base=_indices(tensors, 0),
            other={layer: _indices(tensors, layer) for layer in plain["other"]},
            dtypes=plain["dtypes"],
            written=tensors.get("written"),
            found=Found(
                tensors.get("found.where", Found().where), tensors.get("found.sums", Found().sums), plain["found_total"]
            ),
            calls=plain["calls"],
            dp_rank=plain.get("dp_rank", 0),
            reader_block=plain.get("reader_block"),
        )


def _narrow(value: Tensor) -> Tensor:
    """int32 where that holds it: half of the bytes of most records of one token per request."""
    narrow = value.int()
    return narrow if torch.equal(narrow.long(), value.long()) else value


def _indices(tensors: Mapping[str, Tensor], layer: int) -> Indices:
    slots, tables, q_lens, kv_lens = (tensors[f"{layer}.{name}"].long() for name in _TENSORS[:-1])
    starts = tensors.get(f"{layer}.{_TENSORS[-1]}")
    return Indices(slots, tables, q_lens, kv_lens, None if starts is None else starts.long())
