"""Faults of the catalogue, as changes of what a right engine hands over, and what must be said of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tests.unit.align.ledger.toy import Batch, Engine, Request


def asked(*, new: int = 8, prefix: bool = False) -> list[Request]:
    """13, 7 and 22 tokens; r2 begins like r0 if they share a prefix, and arrives later."""
    prompts = [[(7 * number + 3 * at) % 89 for at in range(length)] for number, length in ((1, 13), (2, 7), (3, 22))]
    if prefix:
        prompts[2] = prompts[0] + prompts[2][13:]
    return [Request(f"r{number}", prompt, new) for number, prompt in enumerate(prompts)]


def decode(batch: Batch) -> bool:
    return max(batch.counts) == 1


def recompute(engine: Engine, batch: Batch, row: int) -> None:
    """Slots of a row, from its table and length as they are handed over."""
    table, first = batch.tables[row], batch.first(row)
    by = batch.kv_lens[row] - batch.starts[row] - batch.counts[row]
    for at in range(batch.counts[row]):
        position = batch.starts[row] + at + by
        index = position // engine.size
        batch.slots[first + at] = (table[index] if index < len(table) else 0) * engine.size + position % engine.size


def shifted(engine: Engine, batch: Batch) -> None:
    """F01."""
    if decode(batch) and batch.row("r1") >= 0:
        batch.slots[batch.row("r1")] += 1


def padded(engine: Engine, batch: Batch) -> None:
    """F02: the padding row keeps what the row before it had in the last step."""
    if decode(batch) and batch.padding and batch.step > 1:
        row = batch.row("r2")
        if row >= 0:
            batch.slots[-1] = batch.slots[row] - 1


def idle(engine: Engine, batch: Batch) -> None:
    """F04, in a block that a request owns."""
    if batch.step == 2:
        engine.dummy([batch.rows[0].table[0] * engine.size])


def doubled_blocks(engine: Engine, batch: Batch) -> None:
    """F08."""
    size, at = 2 * engine.size, 0
    for table, start, count in zip(batch.tables, batch.starts, batch.counts, strict=False):
        for position in range(start, start + count):
            index = position // size
            batch.slots[at] = table[index] * size + position % size if index < len(table) else -1
            at += 1


def stale_row(engine: Engine, batch: Batch) -> None:
    """A-13: a request ended, the last row took its place, and its table stayed behind."""
    if batch.step == 4:
        last = engine.records[-1]
        batch.tables[0] = last.base.tables[0].tolist()
        recompute(engine, batch, 0)


def swapped(engine: Engine, batch: Batch) -> None:
    """A-17: a row of another request."""
    if batch.step == 3:
        row, other = batch.row("r1"), batch.row("r2")
        batch.tables[row] = list(batch.tables[other])


def mixed_shift(engine: Engine, batch: Batch) -> None:
    """A-22: slots of decode rows are those of the row before."""
    if batch.step == 3:
        batch.slots[1] = batch.slots[0]


def next_starts(engine: Engine, batch: Batch) -> None:
    """A-16."""
    if batch.step == 0:
        batch.q_starts = list(range(len(batch.counts) + 1))


def lengths(change: Callable[[Engine, Batch, int], int]) -> Callable[[Engine, Batch], None]:
    def fault(engine: Engine, batch: Batch) -> None:
        row = batch.row("r1")
        if row >= 0:
            batch.kv_lens[row] = change(engine, batch, row)
            if decode(batch):
                recompute(engine, batch, row)

    return fault


def frozen(engine: Engine, batch: Batch, row: int) -> int:
    """The length stays that of the prompt."""
    return min(batch.kv_lens[row], 7)


def twice(engine: Engine, batch: Batch, row: int) -> int:
    """A-24: each decode step counts twice."""
    return batch.kv_lens[row] + (batch.kv_lens[row] - 7)


def short(engine: Engine, batch: Batch, row: int) -> int:
    """A-23."""
    return batch.kv_lens[row] - 1 if decode(batch) else batch.kv_lens[row]


def whole_prompt(engine: Engine, batch: Batch) -> None:
    """A-30: the first chunk's length is that of the prompt."""
    row = batch.row("r2")
    if row >= 0 and batch.starts[row] + batch.counts[row] < 22:
        batch.kv_lens[row] = 22


def chunk_restarts(engine: Engine, batch: Batch) -> None:
    """A-31: slots of the second chunk begin at 0."""
    row = batch.row("r2")
    if row >= 0 and batch.starts[row] and not decode(batch):
        table, first = batch.tables[row], batch.first(row)
        for at in range(batch.counts[row]):
            batch.slots[first + at] = table[at // engine.size] * engine.size + at % engine.size


def dropped_block(engine: Engine, batch: Batch) -> None:
    """A-33: one block is missing in front."""
    row = batch.row("r2")
    if row >= 0 and decode(batch):
        batch.tables[row] = [*batch.tables[row][1:], 0]
        recompute(engine, batch, row)


def wide(engine: Engine, batch: Batch) -> None:
    """A-37."""
    batch.dtypes = {"slots": "int32", "tables": "torch.int64"}


def freed_early(engine: Engine, batch: Batch) -> None:
    """A-38: a block is freed that its request still reads."""
    if batch.step == 1:
        engine.free.append(batch.rows[batch.row("r2")].table[0])


def minus_one(engine: Engine, batch: Batch) -> None:
    """A-9: the kernel takes −1 of a padding row for an index; the last slot belongs to r1."""
    if decode(batch) and batch.padding:
        batch.kernel_slots = list(batch.slots)


def no_slots(engine: Engine, batch: Batch) -> None:
    """000-T5.4-1: prefill does not write."""
    row = batch.row("r1")
    if batch.step == 0:
        first = batch.first(row)
        batch.slots[first : first + 7] = [-1] * 7


def one_layer(engine: Engine, batch: Batch) -> None:
    if batch.step == 2:
        slots = list(batch.slots)
        slots[batch.row("r1")] += 2
        batch.layer_slots[1] = slots


def layer_length(engine: Engine, batch: Batch) -> None:
    if batch.step >= 2 and batch.row("r1") >= 0:
        lengths = list(batch.kv_lens)
        lengths[batch.row("r1")] += 1
        batch.layer_kv[1] = lengths


def outside(engine: Engine, batch: Batch) -> None:
    if batch.step == 2:
        batch.slots[batch.row("r1")] = engine.pool.slots + 3
        batch.kernel_slots = [slot if slot < engine.pool.slots else 0 for slot in batch.slots]


def no_entry(engine: Engine, batch: Batch) -> None:
    if batch.step == 2:
        batch.tables[batch.row("r1")][0] = -1


def beyond(engine: Engine, batch: Batch) -> None:
    if batch.step == 2:
        batch.tables[batch.row("r1")][0] = 400


def repeated(engine: Engine, batch: Batch) -> None:
    if batch.step == 2:
        table = batch.tables[batch.row("r2")]
        table[1] = table[0]


@dataclass(frozen=True)
class Case:
    """What is broken, and what must be said: kind, writer, victim, victim's position, step, layer."""

    name: str
    fault: Callable[[Engine, Batch], None] | None
    kind: str
    writer: str | None
    victim: str | None
    position: int | None
    step: int
    layer: int = 0
    options: tuple[tuple[str, object], ...] = ()


CASES = [
    Case("F01", shifted, "wrong_slot", "r1", "r2", 0, 1),
    Case("F02", padded, "padding_write", "", "r2", 22, 2, options=(("bucket", 4),)),
    Case("F04", idle, "dummy_write", "", "r0", 0, 2),
    Case("F08", doubled_blocks, "wrong_block_size", "r0", "r0", 0, 0),
    Case("A-13", stale_row, "stale_table", "r1", "r1", 0, 4, options=(("first_ends", True),)),
    Case("A-17", swapped, "foreign_row", "r1", "r1", 0, 3),
    Case("A-22", mixed_shift, "wrong_slot", "r1", "r0", 15, 3),
    Case("A-16", next_starts, "not_cumulative", "r0", None, None, 0),
    Case("frozen", lengths(frozen), "frozen_length", "r1", "r1", 6, 1),
    Case("A-24", lengths(twice), "doubled_length", "r1", "r1", 7, 1),
    Case("A-23", lengths(short), "wrong_length", "r1", "r1", 6, 1),
    Case("A-30", whole_prompt, "wrong_length", "r2", "r2", None, 0, options=(("budget", 30),)),
    Case("A-31", chunk_restarts, "wrong_slot", "r2", "r2", 0, 1, options=(("budget", 30),)),
    Case("A-33", dropped_block, "short_table", "r2", "r2", 0, 1),
    Case("A-37", wide, "index_dtype", None, None, None, 0),
    Case("A-38", freed_early, "double_owner", "r1", "r2", 0, 2),
    Case("A-9", minus_one, "minus_one", "", None, None, 1, options=(("bucket", 4), ("last", True))),
    Case("prefill", no_slots, "not_written", "r1", "r1", 0, 0),
    Case("layer", one_layer, "wrong_slot", "r1", "r1", 8, 2, 1),
    Case("in a layer", layer_length, "layer_length", "r1", "r1", None, 2, 1),
    Case("outside", outside, "outside_pool", "r1", "r1", 8, 2),
    Case("-1", no_entry, "minus_one", "r1", "r1", 0, 2),
    Case("beyond", beyond, "table_range", "r1", "r1", 0, 2),
    Case("repeated", repeated, "table_repeats", "r2", "r2", 4, 2),
]


def build(case: Case, sums: bool = True) -> Engine:
    options = dict(case.options)
    requests = asked()
    if options.pop("first_ends", False):
        requests[0].new = 4
    last = options.pop("last", False)
    engine = Engine(requests, fault=case.fault, sums=sums, **options)  # type: ignore[arg-type]
    if last:
        engine.free.remove(engine.pool.blocks - 1)
        engine.free.append(engine.pool.blocks - 1)
        engine.free.reverse()
        engine.free.sort()
    return engine


@cache
def ran(case: Case, sums: bool = True) -> Engine:
    """An engine with this fault, after its run."""
    return build(case, sums).run()
