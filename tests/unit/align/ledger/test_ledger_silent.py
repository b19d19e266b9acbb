"""A right engine is silent, whatever the schedule and the block size."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from align.ledger.ledger import audit
from tests.unit.align.ledger.broken import recompute
from tests.unit.align.ledger.toy import Batch, Engine, Request

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def requests(draw: Any) -> list[Request]:
    """Unequal lengths, late arrivals, early ends, some with the prefix of another."""
    found: list[Request] = []
    for number in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 60), min_size=1, max_size=17))
        if found and draw(st.booleans()):
            other = draw(st.sampled_from(found)).prompt
            prompt = other[: draw(st.integers(1, len(other)))] + draw(st.lists(st.integers(0, 60), max_size=4))
        found.append(Request(f"r{number}", prompt, draw(st.integers(1, 9)), draw(st.integers(0, 6))))
    return found


@settings(max_examples=40, deadline=None)
@given(
    requests(), SIZES, st.booleans(), st.booleans(), st.sampled_from([3, 7, 64]), st.sampled_from([1, 4]),
    st.booleans(), st.integers(0, 30), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_right_engine_is_silent(
    asked: list[Request], size: int, caching: bool, mixed: bool, budget: int, bucket: int, sums: bool, spare: int,
    int8: bool, latent: bool,
) -> None:  # fmt: skip
    need = max(-(-(len(one.prompt) + one.new) // size) for one in asked)
    engine = Engine(
        asked, block_size=size, blocks=need + 2 + spare, caching=caching, mixed=mixed, budget=budget, bucket=bucket,
        sums=sums, int8=int8, latent=latent,
    ).run()  # fmt: skip
    assert audit(engine.records, engine.tokens).wrongs == ()


#: What one wrong slot of a request can be called.
ONE_SLOT = {"wrong_slot", "not_written"}


@settings(max_examples=40, deadline=None)
@given(
    requests(), SIZES, st.booleans(), st.integers(0, 5), st.integers(0, 40), st.integers(0, 400), st.integers(0, 1),
    st.booleans(),
)  # fmt: skip
def test_one_wrong_slot_is_one_fault_in_its_place(
    asked: list[Request], size: int, caching: bool, step: int, token: int, slot: int, layer: int, sums: bool
) -> None:
    done: list[tuple[str, int, int]] = []

    def fault(engine: Engine, batch: Batch) -> None:
        if batch.step < step or done:
            return
        at = token % (len(batch.slots) - batch.padding)
        row = max(one for one in range(len(batch.rows)) if batch.first(one) <= at)
        wrong = slot % engine.pool.slots
        wrong = -1 if wrong == batch.slots[at] else wrong
        done.append((batch.rows[row].name, batch.starts[row] + at - batch.first(row), batch.step))
        slots = list(batch.slots)
        slots[at] = wrong
        if layer:
            batch.layer_slots[1] = slots
        else:
            batch.slots = slots

    need = sum(-(-(len(one.prompt) + one.new) // size) for one in asked)
    engine = Engine(asked, block_size=size, blocks=need + 2, caching=caching, fault=fault, sums=sums).run()
    wrongs = audit(engine.records, engine.tokens).wrongs
    if not done:
        assert not wrongs
        return
    assert len(wrongs) == 1 and wrongs[0].kind in ONE_SLOT
    request, position, at = done[0]
    assert (wrongs[0].step, wrongs[0].layer) == (at, layer)
    assert wrongs[0].writer is not None and wrongs[0].writer.request == request
    assert wrongs[0].writer.position == position


#: What a wrong entry of a block table can be called.
ONE_ENTRY = {
    "stale_table", "foreign_row", "unwritten_history", "double_owner", "table_repeats", "short_table", "prefix_missing",
    "prefix_foreign", "duplicate_slot",
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    requests(), SIZES, st.booleans(), st.integers(0, 5), st.integers(0, 40), st.integers(0, 400), st.booleans(),
)  # fmt: skip
def test_one_wrong_entry_of_a_table_is_one_fault(
    asked: list[Request], size: int, caching: bool, step: int, entry: int, block: int, sums: bool
) -> None:
    done: list[tuple[str, int]] = []

    def fault(engine: Engine, batch: Batch) -> None:
        if batch.step < step or done:
            return
        row = entry % len(batch.rows)
        table = batch.tables[row] = list(batch.tables[row])
        needed = -(-(batch.starts[row] + batch.counts[row]) // size)
        index = entry // len(batch.rows) % needed
        if table[index] != block % engine.pool.blocks:
            table[index] = block % engine.pool.blocks
            done.append((batch.rows[row].name, batch.step))
            recompute(engine, batch, row)

    need = sum(-(-(len(one.prompt) + one.new) // size) for one in asked)
    engine = Engine(asked, block_size=size, blocks=need + 2, caching=caching, fault=fault, sums=sums).run()
    wrongs = audit(engine.records, engine.tokens).wrongs
    assert len(wrongs) <= 1, [(one.kind, one.writer, one.victim) for one in wrongs]
    for wrong in wrongs:
        assert wrong.kind in ONE_ENTRY
        assert done and wrong.step >= done[0][1]
        named = {place.request for place in (wrong.writer, wrong.victim) if place is not None}
        # A prefix that went astray is seen by who comes upon it, if its own request has ended.
        assert done[0][0] in named or caching


@settings(max_examples=40, deadline=None)
@given(requests(), SIZES, SIZES, st.booleans())
def test_block_sizes_change_nothing_that_is_canonical(asked: list[Request], one: int, other: int, int8: bool) -> None:
    """The same schedule, two block sizes: the same rows are written with the same sums, and both are silent."""
    runs = []
    for size in (one, other):
        again = [Request(ask.name, ask.prompt, ask.new, ask.arrives) for ask in asked]
        runs.append(Engine(again, block_size=size, blocks=300, int8=int8).run())
    assert len(runs[0].records) == len(runs[1].records)
    for mine, theirs in zip(runs[0].records, runs[1].records, strict=True):
        assert mine.spans == theirs.spans
        assert mine.written is not None and theirs.written is not None and mine.written.equal(theirs.written)
    assert not any(audit(run.records, run.tokens).wrongs for run in runs)


@settings(max_examples=40, deadline=None)
@given(requests(), SIZES, st.booleans(), st.integers(0, 9), st.floats(0.5, 1.5))
def test_values_never_accuse_an_index(asked: list[Request], size: int, caching: bool, step: int, factor: float) -> None:
    engine = Engine(asked, block_size=size, blocks=200, caching=caching)
    engine.value_fault = lambda now, layer, rows: rows * factor if now >= step else rows
    assert not audit(engine.run().records, engine.tokens).wrongs
