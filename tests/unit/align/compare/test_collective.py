"""The result of a reduce is the sum of what the ranks put in, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.checkpoints.shards import shards
from align.checkpoints.table import structure_of
from align.compare.added import Added, judge_added
from align.compare.checkpoint import CheckpointComparison
from align.compare.locate import locate
from align.compare.pairing import Pairing
from align.compare.policy import TensorPolicy
from align.compare.tensors import TensorComparison, compare_traces
from align.trace.format import MANIFEST, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter
from tests.unit.align.compare import traces

Tensor = torch.Tensor
NAME, SOURCE = "layers.1.attn.o", "layers.1.attn.o_partial"
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ROWS = (RowSpan("r0", 0, 5), RowSpan("r1", 0, 4))
HIDDEN = 16


def write(directory: Path, results: list[Tensor], parts: list[Tensor | None]) -> Trace:
    """One step of two ranks: ``attn.o`` of layer 1 ``[9, 16]`` and the summands of each rank."""
    dtype = str(results[0].dtype).removeprefix("torch.")
    for rank, result in enumerate(results):
        writer = TraceWriter(directory, rank, rank, 2, shards(structure_of(traces.CONFIG, 2), rank))
        part = parts[rank]
        values = {NAME: result, **({} if part is None else {SOURCE: part})}
        writer.write_step(StepEntry(0, "prefill", ROWS, logits_rows=(("r0", 4), ("r1", 3))), values)
        writer.close()
    content = traces.manifest(dtype=dtype, layout={"tp": 2, "dp": 1, "ep": 1})
    (directory / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    return Trace(directory)


def summands(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    parts = [(scale * torch.randn(9, HIDDEN, generator=generator)).to(dtype) for _ in range(2)]
    parts[1][4, 3] = -parts[0][4, 3] * (1 + torch.finfo(dtype).eps)  # a sum that cancels
    return parts


def judged(directory: Path, results: list[Tensor], parts: list[Tensor]) -> Added:
    return judge_added(write(directory, results, list(parts)))[NAME]


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_a_right_sum_is_silent(tmp_path: Path, dtype: torch.dtype, scale: float) -> None:
    parts = summands(dtype, scale)
    exact = (parts[0].double() + parts[1].double()).to(dtype)
    for index, result in enumerate((exact, parts[0] + parts[1])):
        found = judged(tmp_path / str(index), [result, result], parts)
        assert (found.verdict, found.why) == ("within", "")
        assert [(one.phase, one.rank, one.residual.rows) for one in found.parts] == [
            ("prefill", 0, 9),
            ("prefill", 1, 9),
        ]


@DTYPES
def test_a_sum_beyond_the_dtype_may_be_infinite(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = [torch.full((9, HIDDEN), torch.finfo(dtype).max * 0.75).to(dtype)] * 2
    result = parts[0] + parts[1]
    assert bool(result.isinf().all())
    assert judged(tmp_path, [result, result], parts).verdict == "within"


@DTYPES
def test_one_channel_times_1_05_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = summands(dtype)
    result = parts[0] + parts[1]
    result[:, 7] *= 1.05
    found = judged(tmp_path, [result, result], parts)
    assert found.verdict == "beyond" and found.worst is not None
    assert found.worst.residual.channel == 7 and found.worst.residual.operator == "all_reduce"


@DTYPES
def test_a_missing_reduce_is_found_on_every_rank(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = summands(dtype)
    found = judged(tmp_path, parts, parts)
    assert [part.residual.verdict for part in found.parts] == ["beyond", "beyond"]
    assert "ranks 0 and 1 hold different results" in found.parts[1].residual.why


@DTYPES
def test_a_doubled_reduce_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = summands(dtype)
    result = 2 * (parts[0] + parts[1])
    assert judged(tmp_path, [result, result], parts).verdict == "beyond"


def test_one_wrong_row_of_one_rank_is_named(tmp_path: Path) -> None:
    parts = summands(torch.bfloat16)
    result = parts[0] + parts[1]
    wrong = result.clone()
    wrong[6, 2] = torch.nan
    found = judged(tmp_path, [result, wrong], parts)
    (beyond,) = [part for part in found.parts if part.residual.verdict == "beyond"]
    assert (beyond.rank, beyond.residual.row_name, beyond.residual.channel) == (1, ("r1", 1), 2)
    assert beyond.residual.non_finite == 1 and "(r1 position 1, channel 2)" in found.why


def test_results_that_differ_by_one_rounding_are_named(tmp_path: Path) -> None:
    parts = summands(torch.bfloat16)
    result = parts[0] + parts[1]
    other = result.clone()
    other.view(torch.int16)[8, 0] ^= 1
    found = judged(tmp_path, [result, other], parts)
    assert found.why == "ranks 0 and 1 hold different results (r1 position 3)"


def test_summands_that_were_not_recorded_are_not_observable(tmp_path: Path) -> None:
    parts = summands(torch.bfloat16)
    result = parts[0] + parts[1]
    trace = write(tmp_path, [result, result], [parts[0], None])
    found = judge_added(trace)
    assert found[NAME].verdict == "not observable"
    assert found[NAME].why == f"the values of {SOURCE} were not recorded on rank 1"
    assert found["layers.0.mlp.down"].verdict == "not observable"
    notes = compare_traces(trace, trace, TensorPolicy.derived("bfloat16", 2)).notes
    assert any("the candidate's reduces are not observable at 4 checkpoints" in note for note in notes)


def test_without_tensor_parallelism_there_is_nothing_to_judge(tmp_path: Path) -> None:
    assert judge_added(traces.write(tmp_path)) == {}


def test_the_finding_is_path_c_and_names_side_and_place(tmp_path: Path) -> None:
    parts = summands(torch.float16)
    result = parts[0] + parts[1]
    result[2] *= 2
    added = judged(tmp_path, [result, result], parts)
    checkpoint = CheckpointComparison(NAME, "within", "", layer=1, kind="attn.o", added={"reference": added})
    compared = TensorComparison(TensorPolicy.derived("float16", 2), (checkpoint,), {}, Pairing())
    (finding,) = locate(compared, {}, tokens_differ=False)
    assert (finding.path, finding.kind, finding.side) == ("C", "collective", "reference")
    assert (finding.checkpoint, finding.phase, finding.ranks) == (NAME, "prefill", (0, 1))
    assert (finding.requests, finding.positions) == (("r0",), (2,))
