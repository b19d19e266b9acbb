"""Records: split, joined, bounded; the table of checks and what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from align.ledger.ledger import audit
from align.ledger.record.reads import ReadMemory
from align.ledger.record.types import Found, IndexRecord, Indices, Pool, Span
from align.ledger.static import flaws
from align.ledger.table import checks, left_out
from align.sentences import LANGUAGES, sentences
from tests.unit.align.ledger.broken import CASES, Case, asked, ran
from tests.unit.align.ledger.toy import Engine

#: Rows of seed 000 §3.2–3.4, §5.1, §5.4 and of seed 003's path A.
SEED_ROWS = [
    *(f"000-L3.2-{number}" for number in range(1, 6)),
    *(f"000-L3.3-{number}" for number in range(1, 9)),
    *(f"000-L3.4-{number}" for number in range(1, 4)),
    *(f"000-T5.1-{number}" for number in range(1, 6)),
    *(f"000-T5.4-{number}" for number in range(1, 5)),
    *(f"003-A-0{number}" for number in range(1, 8)),
    "003-A-P1",
]


def test_every_row_of_the_seeds_is_checked_or_left_out_with_a_reason() -> None:
    covered = {row for check in checks().values() for row in check.rows}
    assert set(SEED_ROWS) <= covered | left_out().keys()
    assert not covered & left_out().keys()
    assert all(left_out().values())


def test_every_kind_has_a_sentence_in_both_languages() -> None:
    for language in LANGUAGES:
        assert {f"ledger.{kind}" for kind in checks()} <= sentences(language).keyed.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_record_comes_back_from_json_and_tensors(case: Case) -> None:
    engine = ran(case)
    again = []
    for record in engine.records:
        plain, tensors = record.split()
        again.append(IndexRecord.join(json.loads(json.dumps(plain)), tensors))
    mine, theirs = audit(engine.records, engine.tokens), audit(again, engine.tokens)
    assert mine == theirs and mine.wrongs


def test_checksums_take_at_most_32_bytes_per_token_and_layer() -> None:
    for caching in (False, True):
        requests = asked(prefix=True)
        requests[2].arrives = 3
        engine = Engine(requests, caching=caching, layers=5).run()
        tokens = sum(len(request.tokens) - 1 for request in requests)
        assert sum(record.bytes for record in engine.records) <= 32 * tokens * 5
    for case in CASES:
        engine = ran(case)
        tokens = sum(record.rows for record in engine.records)
        assert sum(record.bytes for record in engine.records) <= 32 * tokens * 2, case.name


def test_what_was_found_is_recorded_once_and_cut_with_its_count() -> None:
    memory = ReadMemory(2)
    written = torch.arange(1, 17).view(2, 4, 2)
    memory.wrote("a", 0, written)
    memory.read("a", 0, written)
    assert memory.take(1).total == 0
    other = written.clone()
    other[1, 1:] += 100
    memory.read("a", 3, other)
    found = memory.take(1)
    assert found.total == 3 and found.where.tolist() == [[1, 3, 1]]
    assert found.sums.tolist() == other[1, 1:2].tolist()
    memory.read("a", 3, other)
    assert memory.take(1).total == 0
    memory.read("hit", 0, written)
    assert memory.take(1).total == 8 == len(memory_of(written))
    memory.forget("a")
    memory.read("a", 0, written)
    assert memory.take(0).total == 8


def memory_of(sums: torch.Tensor) -> list[list[int]]:
    return sums.reshape(-1, 2).tolist()


def record(**changes: object) -> IndexRecord:
    indices = Indices(
        torch.tensor([4, 5, 6, 8]), torch.tensor([[1, 0], [2, 0]]), torch.tensor([3, 1]), torch.tensor([3, 1]),
        torch.tensor([0, 3, 4]),
    )  # fmt: skip
    given: dict[str, object] = {
        "step": 0, "rank": 0, "phase": "prefill", "pool": Pool(4, 8, (0,)), "layers": 1, "base": indices,
        "spans": (Span("a", 0, 3), Span("b", 0, 1)),
    }  # fmt: skip
    return IndexRecord(**{**given, **changes})  # type: ignore[arg-type]


def kinds(one: IndexRecord) -> set[str]:
    return {wrong.kind for wrong in audit([one]).wrongs}


def test_static_checks_one_by_one() -> None:
    base = record().base
    tables, slots, lens = base.tables, base.slots, base.q_lens

    def with_(**changes: torch.Tensor | None) -> IndexRecord:
        parts = {name: getattr(base, name) for name in ("slots", "tables", "q_lens", "kv_lens", "q_starts")}
        return record(base=Indices(**{**parts, **changes}))

    assert kinds(record()) == set()
    assert kinds(with_(q_starts=None)) == set()
    assert kinds(record(key_rows=5)) == {"index_count"}
    assert kinds(record(dtypes={"slots": "int64", "tables": "int32"})) == {"index_dtype"}
    assert kinds(record(reader_block=2)) == {"reader_block_size"}
    assert kinds(record(reader_block=4)) == kinds(record(reader_block=None)) == set()
    assert kinds(record(dirty=3)) == {"dirty_cache"} and kinds(record(dirty=0)) == set()
    assert kinds(with_(tables=tables.reshape(-1))) == {"table_shape"}
    assert kinds(with_(tables=tables[:1])) == {"table_shape"}
    assert kinds(with_(tables=torch.tensor([[1, -1], [2, 99]]))) == set()  # behind what the lengths need
    assert kinds(with_(q_lens=torch.tensor([3, 2]))) == {"wrong_q_len"}
    assert kinds(with_(q_starts=lens)) == {"not_cumulative"}
    assert kinds(with_(q_starts=torch.tensor([0, 2, 4]))) == {"not_cumulative"}
    assert kinds(with_(slots=torch.tensor([4, 5, 6, 32]))) == {"outside_pool"}
    assert kinds(with_(slots=torch.tensor([4, 5, 6, -2]))) == {"outside_pool"}
    assert kinds(with_(slots=slots[:3])) == {"index_count"}
    assert [flaw.kind for flaw in flaws_of(with_(kv_lens=torch.tensor([4, 1])))] == ["wrong_length"]


def flaws_of(one: IndexRecord) -> list:  # type: ignore[type-arg]
    from align.ledger.hindsight import Hindsight

    return flaws(Hindsight([one], None), 0)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("length", [0, 2, 4, 30])
def test_after_a_prefill_the_length_is_that_of_the_prompt(length: int, paged: bool) -> None:
    """And where the prefill reads no cache, so that the length is that of its own keys, as many as its queries."""
    base = record().base
    wrong = replace(base, kv_lens=torch.tensor([length, 1]))
    found = flaws_of(record(base=wrong, paged=paged))
    (flaw,) = [one for one in found if one.kind.endswith("_length")]
    assert (flaw.row, flaw.layer, dict(flaw.detail)) == (0, 0, {"seen": length, "expected": 3})
    assert flaws_of(record(base=base, paged=paged)) == []


def test_a_length_counts_what_a_chunk_or_a_hit_has_before_it() -> None:
    """Neither the prompt's rest nor the whole prompt: what is there once this step has written."""
    span = (Span("a", 4, 3),)
    for length, expected in ((7, []), (3, ["wrong_length"]), (9, ["wrong_length"])):
        base = Indices(torch.tensor([8, 9, 10]), torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([length]))
        assert [one.kind for one in flaws_of(record(base=base, spans=span))] == expected


def test_identical_prompts_in_one_block_are_written_twice() -> None:
    indices = Indices(
        torch.tensor([4, 5, 4, 5]), torch.tensor([[1], [1]]), torch.tensor([2, 2]), torch.tensor([2, 2])
    )  # fmt: skip
    one = record(base=indices, spans=(Span("a", 0, 2), Span("b", 0, 2)))
    assert [wrong.kind for wrong in audit([one], {"a": [1, 2], "b": [1, 2]}).wrongs] == ["duplicate_slot"]
    assert [wrong.kind for wrong in audit([one], {"a": [1, 2], "b": [3, 4]}).wrongs] == ["double_owner"]


def test_hits_of_what_was_written_before_the_recording_are_not_judged() -> None:
    indices = Indices(torch.tensor([8]), torch.tensor([[1, 2]]), torch.tensor([1]), torch.tensor([5]))
    one = record(base=indices, spans=(Span("a", 4, 1),))
    assert [wrong.kind for wrong in audit([one]).wrongs] == ["prefix_missing"]
    late = audit([one], complete=False)
    assert not late.wrongs and any("before the recording" in one for one in late.unseen)


def test_what_could_not_be_judged_is_said() -> None:
    whole = record(written=torch.ones((1, 4, 2), dtype=torch.int64))
    assert audit([whole], {}).unseen == ()
    assert len(audit([record()]).unseen) == 2
    assert any("dtype" in one for one in audit([record(lossy=True)], {}).unseen)
    assert audit([]).wrongs == () and Found().total == 0


def test_ranks_have_caches_of_their_own() -> None:
    other = record(rank=1, base=Indices(
        torch.tensor([4, 5, 6, 9]), torch.tensor([[1, 0], [2, 0]]), torch.tensor([3, 1]), torch.tensor([3, 1])
    ))  # fmt: skip
    wrongs = audit([record(), other]).wrongs
    assert [(wrong.kind, wrong.rank) for wrong in wrongs] == [("wrong_slot", 1)]
