"""A trace of several data-parallel groups: rows of a request live on the ranks of its group alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.checkpoints.shards import Shard
from align.compare.collective import judge_reduces
from align.compare.coverage import cover
from align.compare.estimate import joined_digest
from align.compare.gather import gather
from align.compare.residual import ResidualPolicy
from align.compare.rows import RowKey, leaders, ranks_of, read_rows, real_steps
from align.trace.format import POSITIONS, TOKEN_DIGEST, TOKEN_IDS, TOKEN_SQUARES, StepEntry
from align.trace.pt import IndexedFiles
from align.trace.pt_export import export_pt
from align.trace.reader import Trace
from align.trace.writer import TraceWriter
from tests.unit.align.trace.test_trace import MODEL

Q, PARTIAL, OUT = "layers.0.attn.q", "layers.0.attn.o_partial", "layers.0.attn.o"
#: Steps of both groups: (step of the group, request, first position, rows).
STEPS = {0: [(0, "a", 0, 3), (1, "a", 3, 1), (2, "a", 4, 1)], 1: [(0, "b", 0, 2), (1, "b", 2, 1)]}


def value(request: str, position: int, heads: int = 4) -> torch.Tensor:
    """A whole row of q, ``[heads, 2]``: every request and position has its own."""
    base = 100.0 * "ab".index(request) + position + 1
    return (base + torch.arange(2.0 * heads) / 64).reshape(heads, 2)


def recorded(directory: Path, tp: int, dp: int, steps: dict[int, list[tuple[int, str, int, int]]]) -> Trace:
    """A trace in which group g made the given steps, and its ranks hold their heads of q and summands of o."""
    directory.mkdir()
    requests = [{"name": name, "prompt_len": 2, "dp_rank": min(dp - 1, "ab".index(name))} for name in "ab"]
    about = {"schema": 2, "dtype": "float32", "model": MODEL, "layout": {"tp": tp, "dp": dp, "ep": 1}}
    (directory / "trace.json").write_text(json.dumps({**about, "requests": requests}))
    for group, made in steps.items():
        for tp_rank in range(tp):
            shard = Shard(4 // tp * tp_rank, 4 // tp, 4)
            shards = {} if tp == 1 else {"attn.q": shard}
            writer = TraceWriter(directory, group * tp + tp_rank, tp_rank, tp, shards, group)
            for step, request, start, count in made:
                whole = torch.stack([value(request, position) for position in range(start, start + count)])
                flat = whole.flatten(1)
                tensors = {
                    TOKEN_IDS: torch.arange(count) + 10 * start,
                    POSITIONS: torch.arange(start, start + count),
                    Q: whole[:, shard.start : shard.start + shard.count].contiguous(),
                    OUT: flat,
                }
                if tp > 1:
                    tensors[PARTIAL] = flat * (0.25 if tp_rank else 0.75)
                phase, heads = "prefill" if step == 0 else "decode", ((request, start + count - 1),)
                entry = StepEntry(step, phase, (RowSpan(request, start, count),), logits_rows=heads)
                writer.write_step(entry, tensors)
            writer.close()
    return Trace(directory)


def test_steps_of_groups_have_numbers_of_their_own(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", 2, 2, STEPS)
    assert (trace.ranks, leaders(trace), trace.groups) == ((0, 1, 2, 3), (0, 2), 2)
    assert [(entry.step, entry.rows[0].request) for entry in real_steps(trace)] == [
        (0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "a"),
    ]  # fmt: skip
    assert [trace.ranks_of(step) for step in range(4)] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [ranks_of(trace, 1), trace.group_of(3)] == [(2, 3), 1]
    assert trace.tensor(0, 1, Q) is None, "step 1 is of the other group"


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (2, 1)])
def test_rows_are_gathered_from_the_ranks_of_their_group(tmp_path: Path, tp: int, dp: int) -> None:
    """The same rows come out of every layout, so that layouts can be compared with each other."""
    together = {0: [(2 * step + group, *rest) for group, made in STEPS.items() for step, *rest in made]}
    steps = STEPS if dp == 2 else {0: sorted(together[0])}
    trace = recorded(tmp_path / "t", tp, dp, steps)  # type: ignore[arg-type]
    rows = read_rows(trace)
    wanted = [RowKey("a", position, 0) for position in range(5)] + [RowKey("b", position, 0) for position in range(3)]
    assert set(rows.places) == set(wanted) and not rows.unrecorded
    found = gather(trace, Q, [rows.places[key] for key in wanted])
    assert found is not None and found.rows == tuple(range(8))
    assert torch.equal(found.tensor, torch.stack([value(key.request, key.position) for key in wanted]))
    assert rows.fed[POSITIONS] == {key: key.position for key in wanted}


def test_what_a_group_adds_up_is_the_sum_of_its_own_ranks(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", 2, 2, STEPS)
    judged = judge_reduces(trace, trace.structure, ResidualPolicy.for_dtype("float32"))[OUT]
    assert {(phase, rank): one.verdict for phase, rank, one in judged} == {
        (phase, rank): "within" for phase in ("prefill", "decode") for rank in range(4)
    }
    assert {(phase, rank): one.rows for phase, rank, one in judged}["prefill", 3] == 2, "rows of its own group alone"


def test_coverage_counts_a_checkpoint_once(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", 1, 2, STEPS)
    found = cover(trace, (Q, OUT, "layers.1.attn.q"))
    assert (found.expected, found.observed, found.missing, found.partial) == (3, 2, ("layers.1.attn.q",), ())


def test_digests_of_a_step_are_those_of_its_group(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", 1, 2, {0: STEPS[0]})
    writer = TraceWriter(tmp_path / "t", 1, 0, 1, {}, 1)
    tensors = {Q + TOKEN_DIGEST: torch.full((2, 8), 3.0), Q + TOKEN_SQUARES: torch.full((2,), 9.0)}
    writer.write_step(StepEntry(0, "prefill", (RowSpan("b", 0, 2),)), tensors)
    writer.close()
    trace = Trace(tmp_path / "t")
    digest = joined_digest(trace, 1, Q)
    assert digest is not None and digest.tolist() == [[3.0] * 8 + [9.0]] * 2


def test_an_exported_trace_keeps_its_groups(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", 1, 2, STEPS)
    export_pt(trace, tmp_path / "pt")
    files = IndexedFiles(tmp_path / "pt")
    assert [(entry.step, files.ranks_of(entry.step)) for entry in real_steps(files)] == [
        (entry.step, trace.ranks_of(entry.step)) for entry in real_steps(trace)
    ]
    for step in (0, 1, 3):
        left, right = files.joined(step, Q), trace.joined(step, Q)
        assert left is not None and right is not None and torch.equal(left, right)
