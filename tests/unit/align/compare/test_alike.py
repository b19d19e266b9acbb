"""Rows with equal inputs are judged by the operator's roundings, and everybody else's rows are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from align.checkpoints.table import structure_of
from align.compare.alike import Alike, row_limit
from align.compare.locate import locate
from align.compare.policy import TensorPolicy
from align.compare.rows import PairedRow, Place, RowKey
from align.compare.tensors import compare_traces
from align.trace.reader import Trace
from tests.unit.align.checkpoints import eager
from tests.unit.align.compare import traces

Tensors = dict[str, torch.Tensor]
POLICY = TensorPolicy.derived("bfloat16", layers=2)
ROWS = [PairedRow(RowKey("r0", at, 0), "prefill", Place(0, at, None), Place(0, at, None)) for at in range(200)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return traces.write(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("name", ["layers.0.attn.o", "layers.1.mlp_norm", "layers.1.mlp.act", "layers.1.mid", "logits"])
def test_a_row_times_1_15_is_an_origin_although_the_carried_bounds_allow_it(
    tmp_path: Path, reference: Trace, name: str
) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "prefill":
            row = 1  # r0 position 1; of the logits r1 position 1
            tensors[name][row] = (tensors[name][row].float() * 1.1).bfloat16()

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY)
    checkpoint = found.get(name)
    request = "r1" if name == "logits" else "r0"
    assert checkpoint is not None and checkpoint.verdict == "beyond"
    assert checkpoint.alike_row == RowKey(request, 1, 0) and f"{request} position 1 has equal inputs" in checkpoint.why
    assert checkpoint.metrics is not None and checkpoint.metrics.rel_l2 is not None
    assert checkpoint.metrics.rel_l2 < POLICY.allowance(name).whole
    (finding,) = locate(found, {}, tokens_differ=False)
    assert (finding.kind, finding.checkpoint) == ("unexplained", name)
    assert (finding.requests, finding.positions) == ((request,), (1,)) and "its inputs are equal" in finding.summary


def test_a_row_whose_inputs_differ_is_not_judged_by_it(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "prefill":
            tensors["layers.0.attn.out"][1, 0, 0] *= 1.0078125  # attention is left out: its history counts
            tensors["layers.0.attn.o"][1] = (tensors["layers.0.attn.o"][1].float() * 1.1).bfloat16()

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY)
    assert all(one.alike_row is None for one in found.checkpoints if one.name != "layers.0.mid")


def test_an_embedding_is_a_copy(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        tensors["embed"].view(torch.int16)[0, 3] ^= 1

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY).get("embed")
    assert found is not None and found.verdict == "beyond" and found.alike_row is not None


@pytest.mark.parametrize("dtype", eager.DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_kernels_that_round_differently_are_silent(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    structure = structure_of({**traces.CONFIG, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4})
    alike = Alike(structure, str(dtype).removeprefix("torch."), len(ROWS))
    x = normal(len(ROWS), 512)
    x[:, 5] *= 300
    x[:20] *= 0.001
    gamma = normal(512).abs()
    gate, up = normal(len(ROWS), 512), normal(len(ROWS), 512)
    everywhere = range(len(ROWS))
    alike.note("layers.0.mid", everywhere, x, x)
    alike.note("layers.0.mlp.gate", everywhere, gate, gate)
    alike.note("layers.0.mlp.up", everywhere, up, up)
    pairs = {
        "layers.0.mlp_norm": (eager.norm_native(x, gamma, 1e-6), eager.norm_internal(x, gamma, 1e-6)),
        "layers.0.mlp.act": (eager.silu_native(gate, up), eager.silu_internal(gate, up)),
    }
    for name, (a, b) in pairs.items():
        assert not torch.equal(a, b)
        assert alike.judge(name, everywhere, ROWS, a, b) is None
        wrong = a.clone()
        wrong[77] = (wrong[77].float() * 1.06).to(dtype)
        found = alike.judge(name, everywhere, ROWS, wrong, b)
        assert found is not None and (found.index, found.rows_total, found.rows_alike) == (77, 1, len(ROWS))


def test_products_with_a_bias_and_other_layouts_are_left_out(tmp_path: Path, reference: Trace) -> None:
    values = torch.ones(len(ROWS), 16, dtype=torch.bfloat16)
    qwen2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
    changed: list[tuple[dict[str, Any], bool]] = [({}, True), (qwen2, False), ({"attention_bias": True}, False)]
    for changes, judged in changed:
        config = {**traces.CONFIG, **changes}
        alike = Alike(structure_of(config), "bfloat16", len(ROWS), config)
        alike.note("layers.0.attn_norm", range(len(ROWS)), values, values)
        result = torch.ones(len(ROWS), 4, 4, dtype=torch.bfloat16)
        assert (alike.judge("layers.0.attn.q", range(len(ROWS)), ROWS, result * 2, result) is not None) == judged
    assert Alike.of(traces.write(tmp_path, tp=2), reference, 7).structure is None


def test_the_limits_follow_the_operators() -> None:
    assert row_limit("identity", "float16") == row_limit("embedding", "float16") == 0.0
    assert row_limit("add", "bfloat16") == pytest.approx(2 * 2**-8, rel=0.03)
    assert row_limit("rms_norm", "bfloat16") == pytest.approx(8 * 2**-8, rel=0.03)
    assert row_limit("linear", "bfloat16", 256) == pytest.approx(8 * 2**-8, rel=0.03)
    assert row_limit("rope", "float16", position=8192) > 1.5 * row_limit("rope", "float16")
