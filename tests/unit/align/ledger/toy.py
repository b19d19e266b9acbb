"""A right engine with a paged cache, small enough to be believed, that records what it hands over.

Keys and values are a function of the tokens up to a position, so equal prefixes have equal rows, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from align.ledger.record.checksum import row_sums
from align.ledger.record.reads import ReadMemory
from align.ledger.record.types import IndexRecord, Indices, Pool, Span

HEADS, DIM = 2, 4


@dataclass
class Request:
    """What is asked: ``arrives`` at this step, and wants ``new`` tokens."""

    name: str
    prompt: list[int]
    new: int
    arrives: int = 0
    #: State.
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    done: int = 0
    furthest: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= len(self.prompt) + self.new


@dataclass
class Batch:
    """What is about to be handed over; faults change it. ``slots`` per layer; padding rows stand behind."""

    step: int
    rows: list[Request]
    starts: list[int]
    counts: list[int]
    occurrences: list[int]
    tables: list[list[int]]
    kv_lens: list[int]
    slots: list[int]
    padding: int = 0
    q_lens: list[int] = field(default_factory=list)
    q_starts: list[int] | None = None
    #: Layer → its own slots, tables or lengths.
    layer_slots: dict[int, list[int]] = field(default_factory=dict)
    layer_kv: dict[int, list[int]] = field(default_factory=dict)
    #: Slots that the kernel uses although they were not handed over.
    kernel_slots: list[int] | None = None
    dtypes: dict[str, str] = field(default_factory=lambda: {"slots": "int32", "tables": "int32"})

    def row(self, name: str) -> int:
        return next((at for at, one in enumerate(self.rows) if one.name == name), -1)

    def first(self, row: int) -> int:
        """The place of a row's first token."""
        return sum(self.counts[:row])


Fault = Callable[["Engine", Batch], None]


class Engine:
    """Continuous batching with blocks, prefix cache, chunks, preemption by recomputation, and padded decode batches."""

    def __init__(
        self, requests: Sequence[Request], *, block_size: int = 4, blocks: int = 40, layers: int = 2,
        caching: bool = False, budget: int = 64, most: int = 8, mixed: bool = True, bucket: int = 1,
        fault: Fault | None = None, sums: bool = True, keep_history: str = "",
        wrong_hit: tuple[str, list[int]] | None = None, int8: bool = False, latent: bool = False,
        reserved: tuple[int, ...] = (0,),
    ) -> None:  # fmt: skip
        self.size, self.layers, self.caching, self.budget, self.most = block_size, layers, caching, budget, most
        self.mixed, self.bucket, self.fault, self.sums, self.int8 = mixed, bucket, fault, sums, int8
        self.latent = latent
        self.keep_history, self.wrong_hit = keep_history, wrong_hit
        self.pool = Pool(block_size, blocks, reserved)
        self.free = [block for block in range(blocks - 1, -1, -1) if block not in reserved]
        self.uses = [0] * blocks
        self.known: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.waiting = list(requests)
        self.requests = list(requests)
        self.running: list[Request] = []
        self.cache = torch.zeros(
            (layers, 2, blocks * block_size, HEADS, DIM), dtype=torch.int8 if int8 else torch.bfloat16
        )
        self.memory = ReadMemory(layers)
        self.records: list[IndexRecord] = []
        self.step = 0
        self.value_fault: Callable[[int, int, Tensor], Tensor] | None = None
        self.after_write: Callable[[Engine, Batch], None] | None = None
        self.preemptions = 0

    # --------------------------------------------------------------------------------------------------- blocks

    def take(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop()
        self.known.pop(self.prefix_of.pop(block, ()), None)
        self.uses[block] = 1
        return block

    def give(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.uses[block] -= 1
            if self.uses[block] == 0:
                self.free.append(block)

    def hit(self, request: Request) -> list[int]:
        found: list[int] = []
        if not self.caching:
            return found
        for end in range(self.size, len(request.tokens), self.size):
            block = self.known.get(tuple(request.tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def grow(self, request: Request, end: int) -> bool:
        while len(request.table) * self.size < end:
            block = self.take()
            if block is None:
                return False
            request.table.append(block)
        return True

    # ------------------------------------------------------------------------------------------------ scheduling

    def run(self) -> Engine:
        for _ in range(400):
            if all(request.finished for request in self.requests):
                return self
            batch = self.schedule()
            if batch is not None:
                self.execute(batch)
            self.step += 1
        raise AssertionError("the schedule does not end")

    def schedule(self) -> Batch | None:
        """Decodes and prefills in one step, or prefills alone as long as there are any."""
        plan: list[tuple[Request, int]] = []
        if self.mixed:
            self.decodes(plan)
        self.prefills(plan)
        if not plan:
            self.decodes(plan)
        if not plan and self.running:
            self.preempt(self.running[-1], plan)
        return self.batch(plan) if plan else None

    def decodes(self, plan: list[tuple[Request, int]]) -> None:
        for request in list(self.running):
            if request not in self.running or request.done < len(request.tokens) - 1 or len(plan) >= self.budget:
                continue
            while not self.grow(request, len(request.tokens)):
                self.preempt(self.running[-1], plan)
                if request not in self.running:
                    break
            else:
                plan.append((request, 1))

    def prefills(self, plan: list[tuple[Request, int]]) -> None:
        left = self.budget - len(plan)
        for request in [one for one in self.running if one.done < len(one.tokens) - 1]:
            count = min(left, len(request.tokens) - request.done)
            if count and self.grow(request, request.done + count):
                plan.append((request, count))
                left -= count
        for request in [one for one in self.waiting if one.arrives <= self.step]:
            if len(self.running) >= self.most or not left:
                break
            self.admit(request)
            count = min(left, len(request.tokens) - request.done)
            if not self.grow(request, request.done + count):
                self.give(request.table)
                request.table, request.done = [], 0
                break
            self.waiting.remove(request)
            self.running.append(request)
            plan.append((request, count))
            left -= count

    def admit(self, request: Request) -> None:
        if request.name == self.keep_history and request.furthest:
            self.grow(request, request.furthest)
            request.done = request.furthest
            return
        found = self.hit(request)
        if self.wrong_hit is not None and request.name == self.wrong_hit[0]:
            found = [self.known[tuple(self.wrong_hit[1])]] if tuple(self.wrong_hit[1]) in self.known else found
        for block in found:
            self.uses[block] += 1
            if block in self.free:
                self.free.remove(block)
        request.table, request.done = list(found), len(found) * self.size

    def preempt(self, request: Request, plan: list[tuple[Request, int]]) -> None:
        self.preemptions += 1
        self.running.remove(request)
        plan[:] = [one for one in plan if one[0] is not request]
        self.give(request.table)
        request.table, request.done = [], 0
        self.waiting.insert(0, request)

    def batch(self, plan: list[tuple[Request, int]]) -> Batch:
        rows, counts = [one for one, _ in plan], [count for _, count in plan]
        tables = [list(one.table) for one in rows]
        starts = [one.done for one in rows]
        ends = [one.done + count for one, count in plan]
        for table, end in zip(tables, ends, strict=True):
            table += [0] * (-(-end // self.size) - len(table))
        slots = [
            table[position // self.size] * self.size + position % self.size
            for table, start, end in zip(tables, starts, ends, strict=True)
            for position in range(start, end)
        ]
        occurrences = [int(one.done < one.furthest) for one in rows]
        decode = all(count == 1 for count in counts)
        padding = -len(rows) % self.bucket if decode else 0
        starts_q = [0]
        for count in [*counts, *[1] * padding]:
            starts_q.append(starts_q[-1] + count)
        return Batch(
            self.step, rows, starts, counts, occurrences, [*tables, *[[0]] * padding], [*ends, *[1] * padding],
            [*slots, *[-1] * padding], padding, [*counts, *[1] * padding], starts_q,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- execution

    def rows_of(self, layer: int, tokens: Sequence[int], start: int, end: int) -> Tensor:
        """Key and value rows of positions, ``[end - start, 2, HEADS, DIM]``."""
        state, states = 17 + layer, []
        for token in tokens[:end]:
            state = (state * 1000003 + token * 7919 + 12289) % 2147483647
            states.append(state)
        spread = np.sin(np.array(states[start:end])[:, None] * np.arange(1, 2 * HEADS * DIM + 1))
        rows = torch.from_numpy(spread).reshape(-1, 2, HEADS, DIM)
        if self.latent:  # one cache; what attention takes as value is a part of it
            rows[:, 1] = 0
        return (rows * 100).to(self.cache.dtype) if self.int8 else rows.to(torch.bfloat16)

    def execute(self, batch: Batch, kind: str = "real") -> None:
        if self.fault is not None and kind == "real":
            self.fault(self, batch)
        spans = [
            Span(one.name, start, count, occurrence)
            for one, start, count, occurrence in zip(
                batch.rows, batch.starts, batch.counts, batch.occurrences, strict=True
            )
        ]
        spans += [Span("", 0, 1, kind="padding" if kind == "real" else kind) for _ in range(batch.padding)]
        width = max(map(len, batch.tables), default=1)
        tables = torch.tensor([table + [0] * (width - len(table)) for table in batch.tables]).reshape(-1, width)

        def indices(slots: list[int], kv: list[int]) -> Indices:
            starts = None if batch.q_starts is None else torch.tensor(batch.q_starts)
            return Indices(torch.tensor(slots), tables, torch.tensor(batch.q_lens), torch.tensor(kv), starts)

        own = sorted({*batch.layer_slots, *batch.layer_kv})
        other = {
            one: indices(batch.layer_slots.get(one, batch.slots), batch.layer_kv.get(one, batch.kv_lens)) for one in own
        }
        written = torch.zeros((self.layers, len(batch.slots), 2), dtype=torch.int64)
        for layer in range(self.layers):
            parts = [
                self.rows_of(layer, one.tokens, start, start + count)
                for one, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True)
            ]
            parts += [self.rows_of(layer, [991 + number, self.step], 1, 2) for number in range(batch.padding)]
            rows = torch.cat(parts)
            if self.value_fault is not None:
                rows = self.value_fault(self.step, layer, rows)
            for side in range(2):
                written[layer, :, side] = row_sums(rows[:, side])
            used = batch.kernel_slots or batch.layer_slots.get(layer, batch.slots)
            for token, slot in enumerate(used):
                if slot >= 0 or batch.kernel_slots:
                    self.cache[layer, :, slot] = rows[token]
        if self.after_write is not None:
            self.after_write(self, batch)
        for row, span in enumerate(spans):
            first = sum(one.count for one in spans[:row])
            if span.real and self.sums:
                self.memory.wrote(span.request, span.start, written[:, first : first + span.count])
                self.memory.read(span.request, row, self.look(tables[row], batch, row))
        phase = "dummy" if kind != "real" else "decode" if max(batch.counts) == 1 else "prefill"
        self.records.append(
            IndexRecord(
                self.step, 0, phase, self.pool,
                tuple(spans), indices(batch.slots, batch.kv_lens), self.layers, other, len(written[0]), batch.dtypes,
                written if self.sums else None, self.memory.take(len(batch.slots)), lossy=self.int8,
            )
        )  # fmt: skip
        if kind == "real":
            self.advance(batch)

    def look(self, table: Tensor, batch: Batch, row: int) -> Tensor:
        """Sums of what attention finds, ``[layers, kv_len, 2]``."""
        lengths = [batch.layer_kv.get(layer, batch.kv_lens)[row] for layer in range(self.layers)]
        length = min(max(lengths), len(table) * self.size)
        positions = torch.arange(length)
        slots = table[positions // self.size] * self.size + positions % self.size
        found = self.cache[:, :, slots % self.pool.slots]
        return torch.stack([torch.stack([row_sums(side) for side in layer], -1) for layer in found])

    def advance(self, batch: Batch) -> None:
        for request, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            request.done = start + count
            request.furthest = max(request.furthest, request.done)
            if self.caching:
                for index in range(start // self.size, request.done // self.size):
                    key, block = tuple(request.tokens[: (index + 1) * self.size]), request.table[index]
                    if key not in self.known and block not in self.prefix_of:
                        self.known[key], self.prefix_of[block] = block, key
            if request.done == len(request.tokens) and not request.finished:
                request.tokens.append((request.tokens[-1] * 31 + len(request.tokens) * 7 + 3) % 97)
            if request.finished and request in self.running:
                self.running.remove(request)
                self.give(request.table)

    def dummy(self, slots: list[int], kind: str = "idle") -> None:
        """A forward without requests that writes to these slots."""
        count = len(slots)
        self.execute(Batch(self.step, [], [], [], [], [[0]] * count, [1] * count, slots, count, [1] * count), kind)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {one.name: one.tokens for one in self.requests}
