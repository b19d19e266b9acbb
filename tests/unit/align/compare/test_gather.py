"""Rows come out of steps, ranks and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.checkpoints.table import parse, structure_of
from align.compare.gather import gather, reconcile
from align.compare.rows import Place
from tests.unit.align.compare import traces


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rows_in_the_order_asked_for(tmp_path: Path, tp: int) -> None:
    trace = traces.write(tmp_path, tp=tp)
    places = [Place(1, 1, 1), Place(0, 4, 1), Place(0, 0, None)]
    for key in ("layers.1.attn.k", "layers.0.mlp.gate", "layers.0.attn.o"):
        found = gather(trace, key, places)
        assert found is not None and found.rows == (0, 1, 2)
        name = parse(key)
        shape = [structure_of(traces.CONFIG).size(axis) for axis in name.kind.axes[1:]]
        rows = [("r0", 3), ("r1", 1), ("r0", 0)]
        expected = torch.stack([traces.value(name, request, at, shape) for request, at in rows]).bfloat16()
        assert torch.equal(found.tensor, expected)


def test_logits_have_a_row_for_each_request(tmp_path: Path) -> None:
    places = [Place(0, 2, 0), Place(0, 4, 1), Place(1, 1, 1)]
    found = gather(traces.write(tmp_path), "logits", places)
    assert found is not None
    rows = [("r0", 2), ("r1", 1), ("r0", 3)]
    expected = torch.stack([traces.value(parse("logits"), request, at, [32]) for request, at in rows]).bfloat16()
    assert torch.equal(found.tensor, expected)


def test_rows_that_reach_the_head_alone(tmp_path: Path) -> None:
    def cut(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if phase == "prefill":
            tensors["final_norm"] = tensors["final_norm"][[2, 4]]

    places = [Place(0, 0, None), Place(0, 4, 1), Place(1, 0, 0)]
    found = gather(traces.write(tmp_path, edit=cut), "final_norm", places)
    assert found is not None and found.rows == (1, 2)
    assert torch.equal(found.tensor[0], traces.value(parse("final_norm"), "r1", 1, [16]).bfloat16())


def test_steps_without_the_checkpoint(tmp_path: Path) -> None:
    def drop(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if phase == "decode":
            del tensors["embed"]

    trace = traces.write(tmp_path, edit=drop)
    found = gather(trace, "embed", [Place(1, 0, 0), Place(0, 1, None)])
    assert found is not None and found.rows == (1,)
    assert gather(trace, "embed", [Place(1, 0, 0)]) is None


def test_an_unexpected_number_of_rows_is_named(tmp_path: Path) -> None:
    def cut(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed"] = tensors["embed"][:-1]

    with pytest.raises(ValueError, match="step 0: embed has 4 rows; the step has 5"):
        gather(traces.write(tmp_path, edit=cut), "embed", [Place(0, 0, None)])


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ((5, 8), (5, 8), (5, 8)),
        ((1, 5, 8), (5, 8), (5, 8)),
        ((5, 8), (1, 1, 5, 8), (5, 8)),
        ((5, 2, 4), (5, 8), (5, 2, 4)),
        ((1, 5, 8), (5, 2, 4), (5, 2, 4)),
        ((1, 2, 4), (1, 8), (1, 2, 4)),
    ],
)
def test_shapes_that_mean_the_same(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> None:
    numbers = torch.arange(40 if 5 in left else 8)
    a, b, note = reconcile(numbers.reshape(left), numbers.reshape(right))
    assert a.shape == b.shape == result and torch.equal(a, b)
    assert bool(note) == (left != right)


@pytest.mark.parametrize(
    ("left", "right"), [((5, 8), (8, 5)), ((5, 8), (4, 8)), ((5, 2, 4), (5, 4, 2)), ((8,), (2, 4))]
)
def test_shapes_that_do_not(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        reconcile(torch.ones(left), torch.ones(right))
