"""Faults of the catalogue, injected into a right engine: one kind each, with writer, victim, step and layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from align.ledger.ledger import audit
from align.ledger.table import checks
from align.ledger.wrong import Wrong
from tests.unit.align.ledger.broken import CASES, Case, asked, decode, doubled_blocks, idle, ran, recompute, shifted
from tests.unit.align.ledger.toy import Batch, Engine, Request


def only(engine: Engine) -> Wrong:
    wrongs = audit(engine.records, engine.tokens).wrongs
    assert len({wrong.kind for wrong in wrongs}) == 1, [(one.kind, one.writer, one.victim, one.step) for one in wrongs]
    return wrongs[0]


#: No index shows what a kernel does with −1: that one needs checksums.
BOTH = [(case, sums) for case in CASES for sums in (True, False) if sums or case.name != "A-9"]


@pytest.mark.parametrize(("case", "sums"), BOTH, ids=lambda one: getattr(one, "name", "sums" if one else "indices"))
def test_a_fault_is_one_kind_in_its_place(case: Case, sums: bool) -> None:
    wrong = only(ran(case, sums))
    assert wrong.kind == case.kind and case.kind in checks()
    assert (wrong.step, wrong.layer) == (case.step, case.layer)
    if case.writer is not None:
        assert wrong.writer is not None and wrong.writer.request == case.writer
    if case.victim is not None:
        assert wrong.victim is not None and wrong.victim.request == case.victim
    if case.position is not None:
        assert wrong.victim is not None and wrong.victim.position == case.position


def tight() -> list[Request]:
    """More requests than memory."""
    return [Request(f"r{number}", [number * 11 + at for at in range(9)], 12) for number in range(3)]


@pytest.mark.parametrize("sums", [True, False])
def test_history_kept_over_preemption_is_named(sums: bool) -> None:
    """F06."""
    clean = Engine(tight(), blocks=13, sums=sums).run()
    assert clean.preemptions and not audit(clean.records, clean.tokens).wrongs
    engine = Engine(tight(), blocks=13, sums=sums, keep_history="r2").run()
    wrong = only(engine)
    steps = [one.step for one in engine.records if any(span.request == "r2" for span in one.spans)]
    again = next(step for before, step in pairwise(steps) if step > before + 1)
    assert (wrong.kind, wrong.step, wrong.layer) == ("unwritten_history", again, 0)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r2", 0)
    assert wrong.first_read is not None and wrong.first_read.request == "r2"


def test_history_kept_is_one_fault_although_its_old_block_was_handed_out_meanwhile() -> None:
    """r1 is evicted, r0 gets its first block, ends, and r1 is given that again beside another one: r0 is innocent."""
    requests = [Request("r0", list(range(5)), 12), Request("r1", [11 + at for at in range(7)], 13, arrives=3)]
    engine = Engine(requests, blocks=6, keep_history="r1").run()
    tables = [
        (record.step, record.base.tables[row].tolist()[: -(-span.end // 4)])
        for record in engine.records
        for row, span in enumerate(record.spans)
        if span.request == "r1"
    ]
    (last, before), (again, after) = next((one, other) for one, other in pairwise(tables) if other[0] > one[0] + 1)
    (block,) = set(before) & set(after)
    assert before.index(block) == after.index(block) == 0 and before[1] != after[1]
    assert any(last < record.step < again and (record.base.slots // 4 == block).any() for record in engine.records), (
        "somebody wrote there meanwhile"
    )
    wrong = only(engine)
    assert (wrong.kind, wrong.step) == ("unwritten_history", again)
    assert wrong.victim is not None and wrong.victim.request == "r1"


def test_a_request_that_comes_back_after_preemption_has_no_stale_row() -> None:
    """The free list hands out what somebody had in the same row of the batch, in this run or in an earlier one."""

    def prompt(number: int) -> list[int]:
        return [number * 11 + at for at in range(12)]

    requests = [
        Request(f"r{run}_{number}", prompt(number + 3 * run), 14, arrives=60 * run)
        for run in range(2)
        for number in range(3)
    ]
    engine = Engine(requests, blocks=14, keep_history="r1_2").run()
    records = [replace(record, run=1 + record.step // 60) for record in engine.records]
    for given in (engine.records, records):
        assert {wrong.kind for wrong in audit(given, engine.tokens).wrongs} == {"unwritten_history"}


@pytest.mark.parametrize("sums", [True, False])
def test_a_missing_prefix_is_named(sums: bool) -> None:
    """F07."""
    requests = asked(prefix=True)
    requests[2].arrives = 2
    clean = Engine(requests, caching=True, sums=sums).run()
    assert any(span.start == 12 and span.count > 1 for one in clean.records for span in one.spans)
    assert not audit(clean.records, clean.tokens).wrongs

    def drop(engine: Engine, batch: Batch) -> None:
        row = batch.row("r2")
        if row >= 0:
            batch.tables[row] = [*batch.tables[row][3:], 0, 0, 0]
            recompute(engine, batch, row)

    requests = asked(prefix=True)
    requests[2].arrives = 2
    wrong = only(Engine(requests, caching=True, sums=sums, fault=drop).run())
    assert (wrong.kind, wrong.step, wrong.layer) == ("prefix_missing", 2, 0)
    assert wrong.writer is not None and wrong.writer.request == "r2"
    assert wrong.victim is not None and wrong.victim.request == "r2" and wrong.victim.position == 0


@pytest.mark.parametrize("sums", [True, False])
def test_the_prefix_of_another_is_named(sums: bool) -> None:
    requests = asked()
    requests[2].arrives = 2
    engine = Engine(requests, caching=True, sums=sums, wrong_hit=("r2", requests[0].prompt[:4])).run()
    wrong = only(engine)
    assert (wrong.kind, wrong.step, wrong.layer) == ("prefix_foreign", 2, 0)
    assert wrong.writer is not None and (wrong.writer.request, wrong.writer.position, wrong.writer.step) == ("r0", 0, 0)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r2", 0)


def test_the_wrong_prefix_of_a_later_run_is_a_fault_of_its_own() -> None:
    requests = [*asked(), Request("r3", asked()[2].prompt, 8, arrives=40)]
    requests[2].arrives = 2
    engine = Engine(requests, caching=True, wrong_hit=("r2", requests[0].prompt[:4]))
    hit = engine.hit

    def again(request: Request) -> list[int]:
        return [engine.known[tuple(requests[0].prompt[:4])]] if request.name == "r3" else hit(request)

    engine.hit = again  # type: ignore[method-assign]
    engine.run()
    records = [replace(record, run=1 + record.step // 40) for record in engine.records]
    wrongs = [one for one in audit(records, engine.tokens).wrongs if one.run == 2]
    assert [one.kind for one in wrongs] == ["prefix_foreign"]
    victim, writer = wrongs[0].victim, wrongs[0].writer
    assert victim is not None and (victim.request, victim.position) == ("r3", 0)
    assert writer is not None and (writer.request, writer.position) == ("r0", 0)


def test_lengths_of_queries_in_another_order_are_no_lengths_of_keys() -> None:
    def swap(engine: Engine, batch: Batch) -> None:
        if batch.step == 0:
            batch.q_lens = [batch.counts[1], batch.counts[0], *batch.counts[2:]]
            batch.kv_lens = list(batch.q_lens)

    engine = Engine(asked(), fault=swap).run()
    records = [replace(record, paged=bool(record.step)) for record in engine.records]
    assert {wrong.kind for wrong in audit(records, engine.tokens).wrongs} == {"wrong_q_len"}


def test_a_length_that_is_short_leaves_out_its_last_key() -> None:
    """Slots need not follow the length, and then nothing is written elsewhere."""

    def short(engine: Engine, batch: Batch) -> None:
        row = batch.row("r1")
        if row >= 0 and max(batch.counts) == 1:
            batch.kv_lens[row] -= 1

    wrong = only(Engine(asked(), fault=short).run())
    assert (wrong.kind, wrong.step) == ("wrong_length", 1)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r1", 7)
    assert wrong.first_read is not None and wrong.first_read.step == 1


def test_data_that_is_not_what_was_handed_over_is_named() -> None:
    def blur(engine: Engine, batch: Batch) -> None:
        if batch.step == 1:
            slot = batch.slots[batch.row("r1")]
            engine.cache[1, 0, slot] *= 1.01

    engine = Engine(asked())
    engine.after_write = blur
    wrong = only(engine.run())
    assert (wrong.kind, wrong.step, wrong.layer) == ("content", 1, 1)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r1", 7)


def test_a_write_that_no_tap_saw_is_named_with_its_writer_if_its_data_is_known() -> None:
    def stomp(engine: Engine, batch: Batch) -> None:
        if batch.step == 2:
            target = batch.rows[batch.row("r1")].table[0] * engine.size + 1
            engine.cache[:, :, target] = engine.cache[:, :, batch.slots[batch.row("r0")]]

    engine = Engine(asked())
    engine.after_write = stomp
    wrong = only(engine.run())
    assert (wrong.kind, wrong.step, wrong.layer) == ("stomped", 2, 0)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r1", 1)
    assert wrong.writer is not None and (wrong.writer.request, wrong.writer.position) == ("r0", 14)
    assert wrong.page is not None and wrong.page.before[1] == ("r1", 1) and wrong.page.after[1] == ("r0", 14)


def test_a_zeroed_row_has_no_writer() -> None:
    def zero(engine: Engine, batch: Batch) -> None:
        if batch.step == 3:
            engine.cache[0, :, batch.rows[batch.row("r2")].table[1] * engine.size] = 0

    engine = Engine(asked())
    engine.after_write = zero
    wrong = only(engine.run())
    assert (wrong.kind, wrong.step, wrong.layer, wrong.writer) == ("stomped", 3, 0, None)
    assert wrong.detail["zero"] and wrong.victim is not None and wrong.victim.position == 4


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_in_the_written_part_is_named_and_in_the_unwritten_one_is_not(number: float) -> None:
    def pour(written: bool) -> Engine:
        """Position 1 of r1; or position 11, which is not computed yet, in its last block, and a block of nobody."""
        engine = Engine(asked())

        def after(engine: Engine, batch: Batch) -> None:
            if batch.step == 2:
                table = batch.rows[batch.row("r1")].table
                places = [(table[0], 1)] if written else [(table[2], 3), (engine.free[0], 1)]
                for block, offset in places:
                    engine.cache[0, 0, block * engine.size + offset] = number

        engine.after_write = after
        return engine.run()

    wrong = only(pour(True))
    assert (wrong.kind, wrong.step, wrong.layer) == ("stomped", 2, 0)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("r1", 1)
    right = pour(False)
    assert not right.cache.isfinite().all() and not audit(right.records, right.tokens).wrongs


@pytest.mark.parametrize("growing", [False, True])
def test_a_value_fault_is_no_fault_of_indices(growing: bool) -> None:
    """Path B, also where it grows with length."""

    def wrong_values(step: int, layer: int, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + 0.02 * (step if growing else 1)) if layer else rows

    engine = Engine(asked(prefix=True), caching=True, bucket=4)
    engine.value_fault = wrong_values
    assert not audit(engine.run().records, engine.tokens).wrongs


def test_padding_that_writes_where_nobody_reads_is_silent() -> None:
    def garbage(engine: Engine, batch: Batch) -> None:
        if batch.padding:
            batch.slots[-1] = engine.pool.slots - 1

    engine = Engine(asked(), bucket=4, fault=garbage).run()
    assert any((one.base.slots == engine.pool.slots - 1).any() for one in engine.records)
    assert not audit(engine.records, engine.tokens).wrongs


def test_dummies_in_reserved_blocks_are_silent_and_outside_they_are_not() -> None:
    def warm(slot: int) -> Callable[[Engine, Batch], None]:
        return lambda engine, batch: engine.dummy([slot]) if batch.step == 2 else None

    assert not audit(Engine(asked(), fault=warm(1)).run().records).wrongs
    wrong = only(Engine(asked(), fault=warm(4 * 39)).run())
    assert (wrong.kind, wrong.victim) == ("dummy_write", None)
    assert not audit(Engine(asked(), fault=warm(4 * 39), reserved=()).run().records).wrongs


@pytest.mark.parametrize("sums", [True, False])
def test_a_stale_tail_is_named_when_the_batch_has_shrunk(sums: bool) -> None:
    """The row moved to the place of one that ended, and grows into the tail that was left there: a block of r3 now."""

    def tail(engine: Engine, batch: Batch) -> None:
        row = batch.row("r1")
        if row == 0 and len(batch.tables[0]) > 3:
            batch.tables[0][3] = int(engine.records[3].base.tables[0, 3])
            recompute(engine, batch, 0)

    requests = [*asked(), Request("r3", list(range(60, 80)), 6, arrives=5)]
    requests[0].new = 4
    engine = Engine(requests, fault=tail, sums=sums).run()
    wrong = only(engine)
    grown = next(one.step for one in engine.records if any(s.request == "r1" and s.end == 13 for s in one.spans))
    assert (wrong.kind, wrong.step, wrong.layer) == ("stale_table", grown, 0)
    assert wrong.writer is not None and (wrong.writer.request, wrong.writer.position) == ("r1", 12)
    assert wrong.victim is not None and wrong.victim.request == "r3"
    assert (wrong.detail["of"], wrong.detail["index"]) == ("r0", 3)


@pytest.mark.parametrize("options", [{"int8": True}, {"latent": True}], ids=str)
def test_faults_are_found_in_other_caches(options: dict[str, bool]) -> None:
    """int8 keys and values; one latent cache as MLA has it."""
    for fault, kind in ((shifted, "wrong_slot"), (idle, "dummy_write"), (doubled_blocks, "wrong_block_size")):
        engine = Engine(asked(), fault=fault, **options).run()  # type: ignore[arg-type]
        assert only(engine).kind == kind
    engine = Engine(tight(), blocks=13, keep_history="r2", **options).run()  # type: ignore[arg-type]
    assert only(engine).kind == "unwritten_history"


def test_rejected_drafts_are_written_again_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculative decoding: three positions are computed, one is kept."""
    request = Request("r0", list(range(5)), 12)
    engine = Engine([request])

    def draft(engine: Engine, batch: Batch) -> None:
        if decode(batch):
            request.tokens += [1, 2]
            engine.grow(request, len(request.tokens))
            table = batch.tables[0] = list(request.table)
            batch.counts[0] = batch.q_lens[0] = 3
            batch.kv_lens[0] += 2
            batch.q_starts = [0, 3]
            batch.slots = [table[at // 4] * 4 + at % 4 for at in range(batch.starts[0], batch.starts[0] + 3)]

    advance = engine.advance

    def reject(batch: Batch) -> None:
        if batch.counts[0] == 3:
            del request.tokens[-2:]
            batch.counts[0] = 1
        advance(batch)

    engine.fault = draft
    monkeypatch.setattr(engine, "advance", reject)
    engine.run()
    assert any(span.count == 3 and span.start == 6 for one in engine.records for span in one.spans)
    assert not audit(engine.records, engine.tokens).wrongs
