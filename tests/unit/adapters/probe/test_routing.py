"""The other side's choice of experts in small routers: which weights they get, and what stays as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe import routing
from adapters.probe.routing import Call, Router, RoutingReplay, routers, weights_of
from adapters.probe.spec import TransplantSpec
from adapters.probe.taps import load_taps
from adapters.probe.transplant import RowName, write_tensors

NAME = "layers.1.moe.topk_ids"
#: Four tokens of three requests; of the last one the other side knows nothing.
SPANS = (RowSpan("a", 4, 2), RowSpan("b", 0, 1), RowSpan("c", 0, 1))
ALL: list[RowName] = [("a", 4, 0), ("a", 5, 0), ("b", 0, 0)]
LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.9], [5.0, -1.0, 4.0, 0.5], [1.0, 1.1, 1.2, 1.3], [0.0, 0.0, 0.0, 0.0]])
OWN = [[1, 2], [0, 2], [2, 3]]


class Chooser:
    """As lmdeploy's: the softmax over all experts, and how many are chosen is its own attribute."""

    def __init__(self, top_k: int = 2) -> None:
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = x.softmax(-1).topk(self.top_k, -1)
        return weights, ids.int()


def select(*, router_logits: Tensor, top_k: int, renormalize: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """As vllm's: arguments say everything."""
    weights, ids = router_logits.softmax(-1).topk(top_k, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * scale, ids.int()


FUNCTIONS = {
    one.where: one
    for one in (Router("own", "x", "self.top_k", "-"), Router("arguments", "router_logits", "top_k", "renormalize"))
}
PARAMETERS = {"own": ["x"], "arguments": ["router_logits", "top_k", "renormalize", "scale"]}


def called(where: str, renormalize: bool = False, scale: float = 1.0) -> Call:
    if where == "own":
        chooser = Chooser()
        return Call(chooser.forward, chooser, (LOGITS,), {}, chooser.forward(LOGITS))
    kwargs: dict[str, Any] = {"router_logits": LOGITS, "top_k": 2, "renormalize": renormalize, "scale": scale}
    return Call(select, None, (), kwargs, select(**kwargs))


def result(rows: int = 4, times: int = 1) -> Any:
    """A call of which nothing is known but its result."""
    found = (one[:rows].repeat(times, 1) for one in called("own").result)
    return SimpleNamespace(result=tuple(found), args=(), kwargs={})


def replay(folder: Path, ids: list[list[int]], rows: list[RowName] = ALL) -> RoutingReplay:
    write_tensors(folder, {NAME: torch.tensor(ids)}, {NAME: rows})
    made = RoutingReplay(TransplantSpec(str(folder), (NAME,)))
    made.begin(SPANS)
    return made


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "routers", lambda: FUNCTIONS)


@pytest.mark.parametrize(
    ("where", "renormalize", "scale"),
    [("own", False, 1.0), ("arguments", False, 2.5), ("arguments", True, 1.0), ("arguments", True, 2.5)],
)
def test_the_engines_own_rule_weighs_the_experts_that_are_given(
    where: str, renormalize: bool, scale: float, tmp_path: Path
) -> None:
    call = called(where, renormalize, scale)
    kept = [one.clone() for one in call.result]
    made = replay(tmp_path, [[1, 3], [0, 2], [0, 1]])
    made.at_choice(where, 1, call, PARAMETERS[where])
    assert made.failures == {}
    weights, ids = call.result
    assert ids.tolist() == [[1, 3], [0, 2], [1, 0], kept[1][3].tolist()], "the heavier one first, as a router does"
    assert ids.dtype == torch.int32
    scores = LOGITS.double().softmax(-1)
    for row, chosen in ((0, [1, 3]), (2, [1, 0])):
        exact = scores[row, chosen]
        exact = (exact / exact.sum() if renormalize else exact) * scale
        torch.testing.assert_close(weights[row].double(), exact, rtol=1e-6, atol=0)
    for row in (1, 3):
        assert torch.equal(weights[row], kept[0][row]), "what was chosen alike stays bit by bit"
    assert made.used[f"{NAME}#used"].tolist() == [[1, 3], [0, 2], [0, 1], sorted(kept[1][3].tolist())]
    if where == "own":
        assert call.owner.top_k == 2


def test_rows_that_the_other_side_does_not_have_keep_their_own_experts(tmp_path: Path) -> None:
    call = called("own")
    made = replay(tmp_path, [[0, 3], [0, 3]], [("a", 4, 1), ("b", 0, 0)])
    made.at_choice("own", 1, call, PARAMETERS["own"])
    assert made.used[f"{NAME}#used"].tolist()[:3] == [*OWN[:2], [0, 3]]
    assert [sorted(row) for row in call.result[1].tolist()[:3]] == [*OWN[:2], [0, 3]]


def test_another_layer_is_left_alone(tmp_path: Path) -> None:
    call = called("own")
    made = replay(tmp_path, [[0, 3]] * 3)
    made.at_choice("own", 0, call, PARAMETERS["own"])
    assert [sorted(row) for row in call.result[1].tolist()[:3]] == OWN and not made.used and not made.failures


def test_a_new_step_forgets_the_one_before(tmp_path: Path) -> None:
    made = replay(tmp_path, [[0, 3]] * 3)
    made.at_choice("own", 1, called("own"), PARAMETERS["own"])
    made.begin((RowSpan("b", 0, 1),))
    assert made.used == {}


@pytest.mark.parametrize(
    ("where", "ids", "call", "said"),
    [
        ("unknown", [[0, 3]] * 3, called("own"), "it is not known how unknown weighs"),
        ("own", [[0, 1, 3]] * 3, called("own"), "2 experts per token here, 3 on the other side"),
        ("own", [[0, 9]] * 3, called("own"), "index 9 is out of bounds"),
        ("own", [[0, 3]] * 3, result(rows=2), "2 rows were chosen"),
        ("own", [[0, 3]] * 3, result(times=2), "8 rows were chosen for, the step has 4"),
        ("arguments", [[0, 3]] * 3, result(), "without router_logits"),
    ],
)  # fmt: skip
def test_what_cannot_be_replaced_is_said_and_stays(
    where: str, ids: list[list[int]], call: Any, said: str, tmp_path: Path
) -> None:
    before = [one.clone() for one in call.result]
    made = replay(tmp_path, ids)
    made.at_choice(where, 1, call, PARAMETERS.get(where, []))
    assert said in made.failures[f"{NAME}#used"]
    assert made.used == {}
    assert all(torch.equal(one, other) for one, other in zip(before, call.result, strict=True))


def test_a_router_that_chooses_others_all_the_same_is_not_believed() -> None:
    def stubborn(router_logits: Tensor, top_k: int, renormalize: bool, scale: float = 1.0) -> Any:
        return torch.ones(4, 2), torch.tensor([[0, 1]] * 4)

    call = Call(stubborn, None, (LOGITS, 2, True), {}, stubborn(LOGITS, 2, True))
    with pytest.raises(ValueError, match="does not give these experts a weight"):
        weights_of(FUNCTIONS["arguments"], call, PARAMETERS["arguments"], torch.tensor([[2, 3]] * 4))


def test_of_many_experts_the_best_ones_are_asked_for() -> None:
    """The operator has a limit, and experts of a near-tie are near the top."""
    logits = torch.linspace(4, 0, 80)[None].repeat(2, 1)
    asked = []

    def limited(router_logits: Tensor, top_k: int, renormalize: bool, scale: float = 1.0) -> Any:
        asked.append(top_k)
        return select(router_logits=router_logits, top_k=top_k, renormalize=renormalize, scale=scale)

    call = Call(limited, None, (logits, 4, False), {}, limited(logits, 4, False))
    found = weights_of(FUNCTIONS["arguments"], call, PARAMETERS["arguments"], torch.tensor([[0, 1, 2, 30]] * 2))
    torch.testing.assert_close(found, logits.softmax(-1)[:, [0, 1, 2, 30]])
    assert asked == [4, 32]
    with pytest.raises(ValueError, match="does not give these experts a weight"):
        weights_of(FUNCTIONS["arguments"], call, PARAMETERS["arguments"], torch.tensor([[0, 1, 2, 33]] * 2))


def test_ids_that_are_not_there_are_said_with_every_step(tmp_path: Path) -> None:
    made = RoutingReplay(TransplantSpec(str(tmp_path), (NAME,)))
    made.begin(SPANS)
    assert "cannot be read" in made.failures[f"{NAME}#used"]


@pytest.mark.parametrize("engine", ["lmdeploy", "vllm"])
def test_every_function_that_chooses_is_in_the_table(engine: str) -> None:
    (where,) = {tap.where for tap in load_taps(engine) if tap.checkpoint == routing.CHOICE}
    assert where in routers()
