"""What a worker records of its cache's indices, on a model of two attentions that call the real operators' names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.base import RowSpan
from adapters.probe.hung import Hung
from adapters.probe.indices import IndexRecorder, hang_up
from adapters.probe.taps import Tap
from align.ledger.ledger import audit
from align.ledger.record.checksum import row_sums
from align.ledger.record.files import LedgerWriter, Records, read_records
from align.ledger.record.types import Span

LAYERS, SIZE, BLOCKS, HEADS, DIM = 2, 4, 6, 1, 8
TAPS = (Tap("attn.out", "layers.{i}", "forward", "*:forward", "out", "heads"),)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """A write that scatters, and an attention that does nothing, under the names of torch_npu's."""
    made = torch.library.Library("atb", "FRAGMENT")
    made.define("_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
                "Tensor slot_indices) -> ()")  # fmt: skip
    made.define("_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
                "int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out) "
                "-> ()")  # fmt: skip
    made.define("_npu_flash_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, "
                "float scale_value, int num_heads, int num_kv_heads, Tensor(a!) out) -> ()")  # fmt: skip

    def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any) -> None:
        kept = slot_indices >= 0
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_indices[kept].long()] = rows[kept].to(cache.dtype)

    made.impl("_npu_reshape_and_cache", write, "CPU")
    made.impl("_npu_paged_attention", lambda *args: None, "CPU")
    made.impl("_npu_flash_attention", lambda *args: None, "CPU")
    yield
    made._destroy()


class Attention:
    """One layer: writes, then attends, with what it is handed."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache
        #: Faults.
        self.writes, self.raises = True, False
        self.moved: dict[int, int] = {}
        #: What is added to the lengths, in place, once this layer has attended.
        self.lengthens = 0
        #: Whether attention takes the cache for one of blocks half as long.
        self.halves = False

    def forward(self, rows: torch.Tensor, attn_metadata: Any) -> torch.Tensor:
        meta = attn_metadata
        slots = torch.tensor([self.moved.get(slot, slot) for slot in meta.slots], dtype=torch.int32)
        if self.writes:
            torch.ops.atb._npu_reshape_and_cache(rows, rows + 1, *self.cache, slots)
        out = torch.empty_like(rows)
        if meta.paged:
            size = SIZE // 2 if self.halves else SIZE
            taken = [one.view(-1, size, HEADS, DIM) for one in self.cache]
            torch.ops.atb._npu_paged_attention(rows, *taken, 1, 1, 1.0, meta.block_tables, meta.kv, out)
        else:
            torch.ops.atb._npu_flash_attention(rows, rows, rows, rows, meta.kv, 1.0, 1, 1, out)
        meta.kv += self.lengthens
        return out


@dataclass
class Engine:
    """Drives the two layers; tables are fixed: request a has blocks 1 and 2, b has 3."""

    recorder: IndexRecorder
    layers: list[Attention]
    writer: LedgerWriter
    directory: Path

    def step(self, number: int, phase: str, *rows: tuple[str, int, int], padding: int = 0, run: int = 1) -> None:
        tables = {"a": [1, 2], "b": [3, 0]}
        slots = [
            tables[name][position // SIZE] * SIZE + position % SIZE
            for name, start, count in rows
            for position in range(start, start + count)
        ]
        self.recorder.begin(run, number, phase, [RowSpan(*row) for row in rows])
        self.forward(
            slots + [-1] * padding,
            [tables[name] for name, _, _ in rows] + [[0, 0]] * padding,
            [start + count for _, start, count in rows] + [0] * padding,
            phase == "decode",
            number,
        )
        self.recorder.end()

    def forward(self, slots: list[int], tables: list[list[int]], kv: list[int], paged: bool, seed: int) -> None:
        meta = SimpleNamespace(
            slots=slots, block_tables=torch.tensor(tables, dtype=torch.int32), kv=torch.tensor(kv), paged=paged
        )
        for index, layer in enumerate(self.layers):
            rows = torch.randn((len(slots), HEADS, DIM), generator=torch.Generator().manual_seed(10 * seed + index))
            layer.forward(rows, attn_metadata=meta)

    def records(self) -> Records:
        found = read_records(self.directory)
        assert found is not None
        return found


def made(directory: Path, dtype: torch.dtype = torch.float32, known: bool = True) -> Engine:
    caches = [torch.zeros((2, BLOCKS, SIZE, HEADS, DIM), dtype=dtype) for _ in range(LAYERS)]
    layers = [Attention(cache) for cache in caches]
    writer = LedgerWriter(directory, 0)
    pairs = [(cache[0], cache[1]) for cache in caches] if known else []
    recorder = IndexRecorder(writer, 0, LAYERS, (0,), pairs)
    assert hang_up(recorder, TAPS, SimpleNamespace(layers=layers), LAYERS, Hung()) == {}
    return Engine(recorder, layers, writer, directory)


def usual(engine: Engine, run: int = 1) -> None:
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2), run=run)
    engine.step(1, "decode", ("a", 3, 1), ("b", 2, 1), run=run)
    engine.step(2, "decode", ("a", 4, 1), ("b", 3, 1), run=run)


def kinds(engine: Engine) -> list[str]:
    return [one.kind for one in audit(engine.records().records).wrongs]


def test_a_right_engine_is_recorded_and_found_right(tmp_path: Path) -> None:
    engine = made(tmp_path)
    usual(engine)
    first, second, third = engine.records().records
    assert (first.step, first.phase, first.run, first.layers, first.paged, first.dirty) == (
        0,
        "prefill",
        1,
        2,
        False,
        0,
    )
    assert first.spans == (Span("a", 0, 3), Span("b", 0, 2)) and first.key_rows == 5 and first.other == {}
    assert first.base.slots.tolist() == [4, 5, 6, 12, 13] and first.base.tables.tolist() == [[1, 2], [3, 0]]
    assert (first.base.q_lens.tolist(), first.base.kv_lens.tolist()) == ([3, 2], [3, 2])
    assert first.dtypes == {"slots": "int32", "tables": "int32"} and first.failures == {}
    assert first.written is not None and first.written.shape == (2, 5, 2)
    rows = torch.randn((5, HEADS, DIM), generator=torch.Generator().manual_seed(1))
    assert first.written[1, :, 0].tolist() == row_sums(rows).tolist()
    assert first.written[1, :, 1].tolist() == row_sums(rows + 1).tolist()
    assert second.paged and second.base.kv_lens.tolist() == [4, 3] and second.dirty is None
    assert third.base.slots.tolist() == [8, 15] and [one.found.total for one in (first, second, third)] == [0, 0, 0]
    assert all(one.calls["write"].startswith("tests") or ":" in one.calls["write"] for one in (first, second))
    assert kinds(engine) == []


def test_the_engine_computes_the_same_with_and_without(tmp_path: Path) -> None:
    engine = made(tmp_path)
    usual(engine)
    engine.forward([4], [[1, 2]], [1], True, 9)  # outside of any step
    assert len(engine.records().records) == 3
    assert float(engine.layers[0].cache[0].view(-1, DIM)[12].sum()) != 0.0


def test_a_row_that_nothing_accounts_for_shows(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2))
    engine.layers[1].cache[0].view(-1, DIM)[5] = 7.0
    engine.step(1, "decode", ("a", 3, 1), ("b", 2, 1))
    last = engine.records().records[-1]
    assert last.found.where.tolist() == [[1, 0, 1]] and last.found.total == 1
    (wrong,) = audit(engine.records().records).wrongs
    assert (wrong.kind, wrong.layer, wrong.slot, wrong.writer) == ("stomped", 1, 5, None)
    assert wrong.victim is not None and (wrong.victim.request, wrong.victim.position) == ("a", 1)


def test_the_slot_that_the_operator_gets_counts(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.layers[0].moved = engine.layers[1].moved = {13: 5}
    usual(engine)
    (wrong,) = audit(engine.records().records).wrongs
    assert (wrong.kind, wrong.slot, wrong.expected, wrong.step) == ("wrong_slot", 5, 13, 0)
    assert wrong.writer is not None and (wrong.writer.request, wrong.writer.position) == ("b", 1)


def test_a_layer_of_its_own_is_kept_apart(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.layers[1].moved = {13: 14}
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2))
    (first,) = engine.records().records
    assert sorted(first.other) == [1] and first.other[1].slots.tolist() == [4, 5, 6, 12, 14]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_takes_blocks_of_another_length_is_found(tmp_path: Path, layer: int) -> None:
    engine = made(tmp_path)
    usual(engine)
    assert [one.reader_block for one in engine.records().records] == [None, SIZE, SIZE] and kinds(engine) == []
    engine = made(tmp_path / "broken")
    engine.layers[layer].halves = True
    usual(engine)
    assert [one.reader_block for one in engine.records().records] == [None, SIZE // 2, SIZE // 2]
    (wrong,) = audit(engine.records().records).wrongs
    assert (wrong.kind, wrong.step) == ("reader_block_size", 1)
    assert dict(wrong.detail) == {"used": SIZE // 2, "block_size": SIZE}
    assert wrong.reach == {"a": (0, 3), "b": (0, 2)}  # from its first decode on, which reads the cache


def test_lengths_that_a_layer_changes_for_the_next_ones_are_found(tmp_path: Path) -> None:
    """In place, so that what was handed to layer 0 must be kept as it was."""
    engine = made(tmp_path)
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2))
    engine.layers[0].lengthens = 1
    engine.step(1, "decode", ("a", 3, 1), ("b", 2, 1))
    last = engine.records().records[-1]
    assert last.base.kv_lens.tolist() == [4, 3] and last.other[1].kv_lens.tolist() == [5, 4]
    (wrong, *others) = audit(engine.records().records).wrongs
    assert {wrong.kind, *(one.kind for one in others)} == {"layer_length"}
    assert (wrong.step, wrong.layer) == (1, 1)
    assert wrong.writer is not None and wrong.writer.request == "a"


def test_a_layer_that_does_not_write_is_found(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.layers[0].writes = engine.layers[1].writes = False
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2))
    engine.layers[0].writes = engine.layers[1].writes = True
    engine.step(1, "decode", ("a", 3, 1), ("b", 2, 1))
    first = engine.records().records[0]
    assert first.base.slots.tolist() == [-1] * 5 and first.written is None and first.failures == {}


def test_padding_rows_are_told_from_requests(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.step(0, "prefill", ("a", 0, 3), ("b", 0, 2))
    engine.step(1, "decode", ("a", 3, 1), ("b", 2, 1), padding=2)
    last = engine.records().records[-1]
    assert [one.kind for one in last.spans] == ["real", "real", "padding", "padding"]
    assert last.base.slots.tolist() == [7, 14, -1, -1] and last.base.tables.shape == (4, 2)
    assert kinds(engine) == []


def test_dummies_are_recorded_if_they_write(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.recorder.dummy()
    engine.forward([0, 1], [[0, 0]], [1, 1], True, 5)
    engine.recorder.dummy()  # nothing comes of this one
    usual(engine)
    first, *others = engine.records().records
    assert (first.phase, first.run, first.spans) == ("dummy", 0, (Span("", 0, 2, 0, "dummy"),))
    assert len(others) == 3 and others[0].dirty is None, "after a dummy, what is not zero says nothing"
    assert kinds(engine) == []


def test_a_cache_that_is_not_empty_is_counted(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.layers[0].cache[1, 5, 3] = 1.0
    usual(engine)
    assert [one.dirty for one in engine.records().records] == [1, None, None]
    assert kinds(engine) == ["dirty_cache"]


@pytest.mark.parametrize("used", [False, True])
def test_a_pool_that_was_never_zero_says_nothing(tmp_path: Path, used: bool) -> None:
    cache = torch.full((2, BLOCKS, SIZE, HEADS, DIM), float(used))
    recorder = IndexRecorder(LedgerWriter(tmp_path, 0), 0, 1, (0,), [(cache[0], cache[1])] if used else [])
    layer = Attention(cache)
    hang_up(recorder, TAPS, SimpleNamespace(layers=[layer]), 1, Hung())
    Engine(recorder, [layer], LedgerWriter(tmp_path / "other", 0), tmp_path).step(0, "prefill", ("a", 0, 1))
    found = read_records(tmp_path)
    assert found is not None and found.records[0].dirty is None


def test_int8_rows_are_summed_as_the_cache_holds_them(tmp_path: Path) -> None:
    engine = made(tmp_path, torch.int8)
    usual(engine)
    first = engine.records().records[0]
    assert first.lossy and first.written is not None
    held = engine.layers[0].cache[0].view(-1, DIM)[4:7]
    assert first.written[0, :3, 0].tolist() == row_sums(held).tolist()
    assert kinds(engine) == []


def test_another_run_begins_anew(tmp_path: Path) -> None:
    engine = made(tmp_path)
    usual(engine)
    usual(engine, run=2)
    found = engine.records().records
    assert [one.run for one in found] == [1, 1, 1, 2, 2, 2] and sum(one.found.total for one in found) == 0


def test_the_batchs_own_order_counts(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.recorder.begin(1, 0, "prefill", [RowSpan("a", 0, 2), RowSpan("b", 0, 1)])
    engine.recorder.reorder(["b", "a"])
    engine.forward([12, 4, 5], [[3, 0], [1, 2]], [1, 2], False, 0)
    engine.recorder.end()
    assert [one.request for one in engine.records().records[0].spans] == ["b", "a"]
    assert kinds(engine) == []


def test_what_could_not_be_seen_is_said(tmp_path: Path) -> None:
    engine = made(tmp_path)
    engine.recorder.begin(1, 0, "prefill", [RowSpan("a", 0, 1)])
    engine.recorder.end()
    assert engine.records().records[0].failures == {"attention": "not seen in 2 layers, the first is 0"}


def test_an_attention_that_is_not_there_is_named(tmp_path: Path) -> None:
    recorder = IndexRecorder(LedgerWriter(tmp_path, 0), 0, 2)
    layers: Sequence[Any] = [SimpleNamespace(forward=lambda hidden: hidden)]
    found = hang_up(recorder, TAPS, SimpleNamespace(layers=layers), 2, Hung())
    assert sorted(found) == ["layers.0", "layers.1"] and "attn_metadata" in found["layers.0"]
