"""A trace of ranks that divide the rows of a step among themselves before the experts, and hold sums behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from adapters.probe.dispatch import MC2, Dispatch, divided
from align.collectives.replicas import judge_replicas
from align.compare.expert_sum import judge_expert_sums
from align.compare.residual import ResidualPolicy
from align.compare.sent import methods, sent_notes
from align.models import qwen_moe
from align.trace.format import POSITIONS, TOKEN_IDS, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter

ROWS, HIDDEN = 5, 16
IDS, OUT, ROUTED, SHARED, GATE = (
    f"layers.0.moe.{one}" for one in ("topk_ids", "out", "routed", "shared", "shared_gate")
)


def value(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


CHOSEN = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(at))[:2] for at in range(ROWS)])
WHOLE, PARTS, SHARES, LOGIT = (
    value(1, HIDDEN),
    [value(2, HIDDEN), value(3, HIDDEN)],
    [value(4, HIDDEN), value(5, HIDDEN)],
    value(6, 1),
)


def expected(routed: torch.Tensor) -> torch.Tensor:
    return routed.float() + LOGIT.float().sigmoid() * (SHARES[0].float() + SHARES[1].float())


def recorded(directory: Path, whole: bool, out: torch.Tensor, gap: bool = False) -> Trace:
    """Two ranks of a tensor-parallel group; ``whole``: behind an exchange, each holds the routed sum."""
    directory.mkdir()
    layout = {"tp": 2, "dp": 1, "ep": 2 if whole else 1}
    about = {"schema": 2, "dtype": "bfloat16", "model": qwen_moe.QWEN2_MOE_CONFIG, "layout": layout}
    (directory / "trace.json").write_text(json.dumps({**about, "requests": []}))
    for rank in (0, 1):
        writer = TraceWriter(directory, rank, rank, 2, {}, 0)
        sent = divided(MC2, ROWS, 6, 2, rank) if whole else Dispatch("all_gather", ROWS, ROWS)
        part = sent.parts.get("moe.topk_ids")
        first, rows = (0, ROWS) if part is None else (part.first, part.rows - gap * rank)
        about_step = sent.to_dict()
        if gap:
            about_step["parts"]["moe.topk_ids"] = [first, rows]
        tensors = {
            TOKEN_IDS: torch.arange(ROWS), POSITIONS: torch.arange(ROWS), IDS: CHOSEN[first:][:rows].contiguous(),
            ROUTED: WHOLE if whole else PARTS[rank], SHARED: SHARES[rank], GATE: LOGIT, OUT: out.bfloat16(),
        }  # fmt: skip
        spans = (RowSpan("a", 0, ROWS),)
        writer.write_step(StepEntry(0, "prefill", spans, logits_rows=(("a", 4),), experts=about_step), tensors)
        writer.close()
    return Trace(directory)


def test_divided_rows_are_put_together_and_sums_are_copies(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", True, expected(WHOLE))
    joined = trace.joined(0, IDS)
    assert joined is not None and torch.equal(joined, CHOSEN)
    assert [len(one) for rank in (0, 1) if (one := trace.tensor(rank, 0, IDS)) is not None] == [3, 2]
    routed = trace.joined(0, ROUTED)
    assert routed is not None and torch.equal(routed, WHOLE)
    assert not judge_replicas(trace).unequal, "ranks hold different rows of the ids, and no copies"


def test_rows_that_nobody_holds_are_named(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", True, expected(WHOLE), gap=True)
    with pytest.raises(ValueError, match=r"rows of layers\.0\.moe\.topk_ids are 4 of 5"):
        trace.joined(0, IDS)


def test_summands_are_added_up(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", False, expected(PARTS[0].float() + PARTS[1].float()))
    joined = trace.joined(0, ROUTED)
    assert joined is not None and torch.equal(joined, PARTS[0].float() + PARTS[1].float())


@pytest.mark.parametrize("whole", [True, False])
def test_the_layers_result_is_judged_as_the_sum_of_all_ranks(tmp_path: Path, whole: bool) -> None:
    right = expected(WHOLE if whole else PARTS[0].float() + PARTS[1].float())
    policy = ResidualPolicy.for_dtype("bfloat16")
    for number, (out, verdict) in enumerate([(right, "within"), (right * 1.05, "beyond"), (right + WHOLE, "beyond")]):
        trace = recorded(tmp_path / str(number), whole, out)
        judged = judge_expert_sums(trace, trace.structure, policy)[OUT]
        assert [(phase, rank, one.verdict) for phase, rank, one in judged] == [
            ("prefill", 0, verdict), ("prefill", 1, verdict),
        ]  # fmt: skip
        others = [
            one
            for name, found in judge_expert_sums(trace, trace.structure, policy).items()
            for _, _, one in found
            if name != OUT
        ]
        assert {one.verdict for one in others} == {"not observable"}


def test_the_method_of_each_side_is_said(tmp_path: Path) -> None:
    traces = {"candidate": recorded(tmp_path / "a", True, WHOLE), "reference": recorded(tmp_path / "b", False, WHOLE)}
    assert methods(traces["candidate"]) == {"prefill": {"mc2": 1}}
    first, second = sent_notes(traces)
    assert "the candidate brings tokens to the experts by dispatch and combine (MC2) in 1 prefill step" in first
    assert "all-gather" in second
