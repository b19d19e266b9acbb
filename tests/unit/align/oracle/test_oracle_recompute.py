"""One operator's float64 result, with recorded or other inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.oracle import NotObservableError, Oracle
from align.trace.format import TOKEN_IDS
from tests.unit.adapters.probe.dense_engine import DenseEngine
from tests.unit.align.checkpoints import eager
from tests.unit.align.oracle.recorded_side import SummingEngine, record, save_checkpoint

Tensor = torch.Tensor


@pytest.fixture
def engine() -> DenseEngine:
    return DenseEngine()


@pytest.fixture
def oracle(tmp_path: Path, engine: DenseEngine) -> Oracle:
    return Oracle(record(tmp_path / "trace", engine), save_checkpoint(tmp_path / "model", engine))


def test_products_have_their_canonical_axes(oracle: Oracle, engine: DenseEngine) -> None:
    x = oracle._trace.joined(0, "layers.1.attn_norm")
    assert x is not None
    weight, bias = engine.weights.of[("attn.q", 1)], engine.weights.biases[("attn.q", 1)]
    found = oracle.recompute("layers.1.attn.q", 0)
    wanted = (x.double() @ weight.double().T + bias.double()).view(14, 4, 16)
    torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-12)
    assert found.magnitude.shape == wanted.shape


def test_another_input_takes_the_place_of_the_recorded_one(oracle: Oracle, engine: DenseEngine) -> None:
    other = torch.randn(14, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = oracle.recompute("layers.1.mlp.up", 0, {"layers.1.mlp_norm": other})
    wanted = other.double() @ engine.weights.of[("mlp.up", 1)].double().T
    torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-12)
    ids = torch.arange(14)
    found = oracle.recompute("embed", 0, {TOKEN_IDS: ids})
    assert torch.equal(found.value, engine.weights.of[("embed", None)][ids].double())


def test_another_query_and_other_keys(oracle: Oracle, engine: DenseEngine) -> None:
    query = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    keys = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = oracle.recompute("layers.0.attn.out", 1, {"layers.0.attn.q_rope": query, "layers.0.attn.key_states": keys})
    past = {name: oracle._trace.joined(0, f"layers.0.attn.{name}") for name in ("key_states", "value_states")}
    here = oracle._trace.joined(1, "layers.0.attn.value_states")
    assert past["key_states"] is not None and past["value_states"] is not None and here is not None
    # Step 1 is ("b" at 5, "a" at 9); step 0 was 9 rows of "a" and 5 of "b".
    for row, rows in ((0, slice(9, 14)), (1, slice(0, 9))):
        k = torch.cat((past["key_states"][rows], keys[row : row + 1])).double()
        v = torch.cat((past["value_states"][rows], here[row : row + 1])).double()
        at = torch.tensor([len(k) - 1])
        wanted = eager.attention_native(query[row : row + 1].double(), at, k, v, engine.structure.scale)
        torch.testing.assert_close(found.value[row : row + 1], wanted, rtol=1e-6, atol=1e-7)  # its softmax is float32


def test_unknown_rows_are_marked_and_missing_inputs_raise(tmp_path: Path, engine: DenseEngine) -> None:
    def drop(step: int, tensors: dict[str, Tensor]) -> None:
        if step == 0:
            del tensors["layers.0.attn.value_states"]
        tensors.pop("layers.1.mid", None)

    trace = record(tmp_path / "trace", engine, edit=drop)
    oracle = Oracle(trace, save_checkpoint(tmp_path / "model", engine))
    assert bool(oracle.recompute("layers.0.attn.out", 1).magnitude.isinf().all())
    with pytest.raises(NotObservableError, match=r"values of layers.1.mid were not recorded"):
        oracle.recompute("layers.1.mlp_norm", 0)
    with pytest.raises(NotObservableError, match="step 7 was not recorded"):
        oracle.recompute("layers.1.mlp.act", 7)
    assert oracle.recompute("layers.1.mid", 0).value.shape == (14, 48)  # its own output is not needed


def test_summands_of_ranks_are_added(tmp_path: Path) -> None:
    engine = SummingEngine()
    trace = record(tmp_path / "trace", engine, tp=2)
    oracle = Oracle(trace, save_checkpoint(tmp_path / "model", engine))
    out = trace.joined(0, "layers.0.attn.out")
    assert out is not None
    wanted = out.flatten(1).double() @ engine.weights.of[("attn.o", 0)].double().T
    for inputs in (None, {"layers.0.attn.out": out}):
        found = oracle.recompute("layers.0.attn.o_partial", 0, inputs)
        torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-12)
    summed = oracle.recompute("layers.0.attn.o", 0, {"layers.0.attn.o_partial": wanted})
    assert torch.equal(summed.value, wanted)
