"""Routers that choose other experts on the two sides: near-ties are listed and what is behind them is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from align.compare.flips import with_flips
from align.compare.locate import locate
from align.compare.policy import TensorPolicy
from align.compare.rows import RowKey
from align.compare.tensors import TensorComparison, compare_traces
from align.findings import Finding
from align.sentences import text_of
from align.trace.format import USED
from tests.unit.align.compare import traces

Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    **traces.CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
POLICY = TensorPolicy.derived("bfloat16", layers=3)
#: Expert 1 is sure; 2 and 3 are as near as bfloat16 makes them at the row of the flip.
SURE, NEAR = [0.0, 4.0, 2.0, 1.0], [0.0, 4.0, 2.0, 2.0]
AT = ("layers.1.moe.router_logits", "layers.1.moe.topk_ids")
#: In the prefill the rows are r0 0 1 2, r1 0 1.
ROW = 1


def right(phase: str, step: int, tensors: Tensors) -> None:
    """Every router is sure of experts 1 and 2."""
    for name, tensor in tensors.items():
        if name.endswith("moe.router_logits"):
            tensor.copy_(torch.tensor(SURE).expand_as(tensor))
        if name.endswith("moe.topk_ids"):
            tensors[name] = torch.tensor([[1, 2]]).repeat(len(tensor), 1)


def spoiled(*names: str) -> Callable[[str, int, Tensors], None]:
    """The prefill's row of a near-tie goes to experts 1 and 3, and all names are far off where that reaches."""

    def edit(phase: str, step: int, tensors: Tensors) -> None:
        right(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[0]][ROW] = torch.tensor(NEAR)
            tensors[AT[1]][ROW] = torch.tensor([1, 3])
        for name in names:
            rows = [ROW] if name in BEFORE_ATTENTION else [ROW, ROW + 1]
            if phase == "prefill" and name != "logits":
                tensors[name][rows] *= -1
            if phase == "decode" and rows != [ROW]:
                tensors[name][-1] *= -1  # r0 position 3

    return edit


def near(phase: str, step: int, tensors: Tensors) -> None:
    right(phase, step, tensors)
    if phase == "prefill":
        tensors[AT[0]][ROW] = torch.tensor(NEAR)


#: Of these the flip reaches its own row alone.
BEFORE_ATTENTION = ("layers.1.moe.routed", "layers.2.block_in")


def compared(folder: Path, candidate: Any, reference: Any = near) -> TensorComparison:
    one = traces.write(folder / "candidate", edit=candidate, config=CONFIG)
    other = traces.write(folder / "reference", edit=reference, config=CONFIG)
    return compare_traces(one, other, POLICY)


def test_equal_choices_leave_nothing_out(tmp_path: Path) -> None:
    found = compared(tmp_path, near)
    assert {one.verdict for one in found.checkpoints} == {"equal"}
    assert found.flips == () and not found.notes


def test_a_near_tie_is_listed_and_hides_what_it_reaches(tmp_path: Path) -> None:
    found = compared(tmp_path, spoiled("layers.1.moe.routed", "layers.2.block_in", "layers.2.attn.out", "logits"))
    (flip,) = found.flips
    assert (flip.name, flip.row) == (AT[1], RowKey("r0", 1, 0))
    assert (flip.candidate, flip.reference) == ((3,), (2,))
    assert flip.gaps == {"candidate": 0.0, "reference": 0.0}
    assert locate(found, {}, tokens_differ=False) == []
    rows = {one.name: one.rows for one in found.checkpoints}
    # Seven rows: r0 has four, r1 three. The flipped one is left out at once, r0's later ones from attention on.
    assert (rows[AT[0]], rows[AT[1]], rows["layers.1.moe.topk_weights"]) == (7, 7, 6)
    assert (rows["layers.2.attn.q"], rows["layers.2.attn.out"], rows["layers.2.mid"]) == (6, 4, 4)
    assert rows["logits"] == 2, "both of r1"
    assert {one.verdict for one in found.checkpoints if one.name != AT[1]} == {"equal"}
    choice = found.get(AT[1])
    assert choice is not None and choice.verdict == "within"
    assert "r0 position 1 (step 0), layer 1: the candidate chose expert 3, the reference expert 2" in found.notes[0]
    assert "3 of 7 rows stand behind near-ties" in found.notes[1]
    rows_behind = {("r0", 1), ("r0", 2), ("r0", 3)}
    assert found.flipped == {"free": rows_behind, "replay": rows_behind}


def test_another_request_is_still_compared(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        spoiled()(phase, step, tensors)
        if phase == "prefill":
            tensors["layers.2.attn.out"][3] *= -1

    found = compared(tmp_path, edit)
    out = found.get("layers.2.attn.out")
    assert len(found.flips) == 1
    assert out is not None and out.verdict == "beyond"
    (finding,) = locate(found, {}, tokens_differ=False)
    assert (finding.checkpoint, finding.requests) == ("layers.2.attn.out", ("r1",))


def test_a_wrong_choice_is_no_near_tie(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        right(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[1]][ROW] = torch.tensor([1, 3])  # by logits that are far apart

    found = compared(tmp_path, edit, right)
    assert found.flips == ()
    (finding,) = locate(found, {}, tokens_differ=False)
    assert (finding.checkpoint, finding.positions, finding.side) == (AT[1], (1,), "candidate")
    assert "by the candidate's own logits other experts are the best" in finding.summary


def test_a_wrong_choice_beside_a_near_tie_is_still_found(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        spoiled()(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[1]][3] = torch.tensor([0, 1])

    found = compared(tmp_path, edit)
    assert [flip.row for flip in found.flips] == [RowKey("r0", 1, 0)]
    (finding,) = locate(found, {}, tokens_differ=False)
    assert finding.checkpoint == AT[1]


@pytest.mark.parametrize("factor", [-1.0, 3.0])
def test_wrong_logits_are_found_before_the_choice(tmp_path: Path, factor: float) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        right(phase, step, tensors)
        tensors[AT[0]] *= factor
        tensors[AT[1]] = tensors[AT[0]].float().topk(2).indices.sort().values

    found = compared(tmp_path, edit)
    assert found.flips == ()
    first, *_ = locate(found, {}, tokens_differ=False)
    assert first.checkpoint == AT[0]


# ------------------------------------------------------------------------------------------------- routing replayed


def replayed(*names: str) -> Callable[[str, int, Tensors], None]:
    """As :func:`spoiled`, but the experts that were used are the other side's."""
    edit = spoiled(*names)

    def used(phase: str, step: int, tensors: Tensors) -> None:
        edit(phase, step, tensors)
        for layer in range(3):
            name = f"layers.{layer}.moe.topk_ids"
            tensors[name + USED] = torch.tensor([[1, 2]]).repeat(len(tensors[name]), 1)

    return used


def test_a_replayed_choice_hides_nothing(tmp_path: Path) -> None:
    found = compared(tmp_path, replayed())
    (flip,) = found.flips
    assert (flip.replayed, flip.behind, flip.layer) == (True, 3, 1)
    assert {one.rows for one in found.checkpoints if one.name != "logits"} == {7}
    choice = found.get(AT[1])
    assert choice is not None and choice.verdict == "within"
    assert found.routing is not None
    assert (found.routing.replayed, found.routing.reached, found.routing.behind) == ("candidate", 3, 0)
    assert found.flipped == {"free": {("r0", 1), ("r0", 2), ("r0", 3)}, "replay": frozenset()}
    assert "all of them are compared, because the candidate used the other side's experts" in found.notes[1]
    assert locate(found, {}, tokens_differ=False) == []


def test_a_fault_behind_a_replayed_choice_is_found(tmp_path: Path) -> None:
    hidden = compared(tmp_path / "hidden", spoiled("layers.2.moe.routed"))
    assert locate(hidden, {}, tokens_differ=False) == []
    found = compared(tmp_path / "found", replayed("layers.2.moe.routed"))
    first, *_ = locate(found, {}, tokens_differ=False)
    assert (first.checkpoint, first.requests) == ("layers.2.moe.routed", ("r0",))


def test_the_reference_may_be_the_side_that_replays(tmp_path: Path) -> None:
    """As when recordings are compared the other way round."""

    def other(phase: str, step: int, tensors: Tensors) -> None:
        near(phase, step, tensors)
        for name in [name for name in tensors if name.endswith("moe.topk_ids")]:
            used = tensors[name].clone()
            if name == AT[1] and phase == "prefill":
                used[ROW] = torch.tensor([1, 3])
            tensors[name + USED] = used

    found = compared(tmp_path, spoiled(), other)
    assert [one.replayed for one in found.flips] == [True]
    assert found.routing is not None and (found.routing.replayed, found.routing.behind) == ("reference", 0)


def test_a_router_that_chooses_wrongly_is_found_although_its_choice_is_replayed(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        replayed()(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[1]][3] = torch.tensor([0, 1])

    found = compared(tmp_path, edit)
    assert [(flip.row, flip.replayed) for flip in found.flips] == [(RowKey("r0", 1, 0), True)]
    (finding,) = locate(found, {}, tokens_differ=False)
    assert (finding.checkpoint, finding.requests) == (AT[1], ("r1",))


def test_a_row_that_was_not_replayed_is_left_out(tmp_path: Path) -> None:
    """As a row that one side computed twice."""

    def edit(phase: str, step: int, tensors: Tensors) -> None:
        replayed("layers.1.moe.routed")(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[1] + USED][ROW] = torch.tensor([1, 3])

    found = compared(tmp_path, edit)
    assert [flip.replayed for flip in found.flips] == [False]
    assert found.routing is not None and (found.routing.reached, found.routing.behind) == (3, 3)
    assert "but not everywhere: 3 rows are not compared" in found.notes[1]
    assert locate(found, {}, tokens_differ=False) == []


def test_rows_that_were_fed_other_experts_are_left_out(tmp_path: Path) -> None:
    """Both routers chose alike, and one was given something else."""

    def edit(phase: str, step: int, tensors: Tensors) -> None:
        right(phase, step, tensors)
        for name in [name for name in tensors if name.endswith("moe.topk_ids")]:
            tensors[name + USED] = tensors[name].clone()
        if phase == "prefill":
            tensors[AT[1] + USED][ROW] = torch.tensor([1, 3])
            tensors["layers.1.moe.routed"][ROW] *= -1

    found = compared(tmp_path, edit, right)
    routed = found.get("layers.1.moe.routed")
    assert found.flips == () and routed is not None and (routed.rows, routed.verdict) == (6, "equal")


def test_a_swing_is_told_beside_the_noise(tmp_path: Path) -> None:
    """Logits of two experts of four change places; those of the others differ by a little."""

    def moved(phase: str, step: int, tensors: Tensors) -> None:
        spoiled()(phase, step, tensors)
        if phase == "prefill":
            tensors[AT[0]][ROW] = torch.tensor([0.0078125, 4.0, 1.9921875, 2.0])

    found = compared(tmp_path, moved)
    (flip,) = found.flips
    assert flip.swing == pytest.approx(0.0078125)  # expert 2 has lost against 3
    # Of experts 0 and 1 one has moved by 1/128: a deviation of half of it; in a difference of two its square is twice.
    assert flip.noise == pytest.approx(2**0.5 * 0.0078125 / 2)
    assert (flip.step, flip.phase) == (0, "prefill")


def test_a_finding_at_a_router_counts_what_flips_behind_it(tmp_path: Path) -> None:
    sides = compared(tmp_path, spoiled())
    at = [Finding("B", "operator", "candidate", f"layers.{layer}.{kind}", layer) for layer, kind in (
        (0, "moe.router_logits"), (1, "moe.router_logits"), (2, "moe.router_logits"), (1, "moe.routed"))]  # fmt: skip
    found = list(with_flips([*at, Finding("UNLOCATED", "tokens")], sides))
    assert [one.evidence.get("flips", {}).get("count") for one in found] == [1, 1, 0, None, None]
    told = found[0].evidence["flips"]["told"]
    assert text_of(told).startswith("1 choice of experts flip by near-ties")
    assert "3 of 7 rows" in text_of(told) and "3 行（共 7 行）" in text_of(told, "zh")
