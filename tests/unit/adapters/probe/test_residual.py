"""The operator residual on a small engine: all is recomputed, right numerics are silent, faults are where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.base import RowSpan
from adapters.probe.residual import ResidualPass, StepResiduals, sample
from align.checkpoints import recompute
from align.checkpoints.bounds import bounds
from align.checkpoints.table import parse
from tests.unit.adapters.probe.dense_engine import CONFIG, GEMMA, DenseEngine, Recorded

Tensor = torch.Tensor
PREFILL = (RowSpan("a", 0, 9), RowSpan("b", 0, 1), RowSpan("c", 0, 5))


def passing(engine: DenseEngine, sample_rows: int = 64, cache_bytes: int = 1 << 30) -> ResidualPass:
    found = ResidualPass(engine.structure, engine.weights, engine.dtype, sample_rows, 0, cache_bytes)
    found.begin(0)
    return found


def run(
    residual: ResidualPass, step: Recorded, phase: str = "prefill", present: dict[str, set[int]] | None = None
) -> StepResiduals:
    return residual.step(
        step.rows, phase, step.positions, step.token_ids, step.values, step.logits_rows, present=present
    )


def names(engine: DenseEngine) -> set[str]:
    return {str(name) for name in engine.structure.names() if not name.kind.integer}


def ratios(result: StepResiduals) -> dict[str, float]:
    return {
        key.removesuffix("#res_max"): float(value[0])
        for key, value in result.tensors.items()
        if key.endswith("#res_max")
    }


def beyond(engine: DenseEngine, result: StepResiduals) -> set[str]:
    limits = bounds()
    return {
        name
        for name, ratio in ratios(result).items()
        if not ratio <= 1.02 * limits[engine.structure.operator(parse(name).kind)].max_roundings
    }


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 4])
def test_every_checkpoint_of_every_step_is_recomputed_and_right(
    window: int | None, dtype: torch.dtype, native: bool
) -> None:
    engine = DenseEngine(dtype, native, {**CONFIG, "sliding_window": window})
    residual = passing(engine)
    decode = (RowSpan("c", 5, 1), RowSpan("a", 9, 1), RowSpan("b", 1, 1))
    chunk = (RowSpan("a", 10, 1), RowSpan("d", 0, 6), RowSpan("b", 2, 3))
    for seed, (rows, phase) in enumerate(((PREFILL, "prefill"), (decode, "decode"), (chunk, "mixed"))):
        result = run(residual, engine.step(*rows, seed=seed), phase)
        assert result.skipped == {}
        assert set(ratios(result)) == names(engine)
        assert beyond(engine, result) == set()
        assert {f"{name}#res_ch" for name in names(engine)} == set(residual.accumulated(phase))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("layers", [3, 1])
def test_a_gemma_with_norms_behind_its_blocks(layers: int, native: bool) -> None:
    engine = DenseEngine(native=native, config={**GEMMA, "num_hidden_layers": layers})
    step = engine.step(*PREFILL)
    result = run(passing(engine), step)
    assert result.skipped == {} and {"layers.0.attn.post_norm", "layers.0.mlp.post_norm"} <= names(engine)
    assert set(ratios(result)) == names(engine)
    assert beyond(engine, result) == set()
    engine.structure = replace(engine.structure, scale=16**-0.5, norm_offset=0.0, embed_scale=1.0)
    engine.weights.norm_offset = 0.0
    wrong = {"layers.0.block_in", "final_norm"}
    for layer in range(layers):
        wrong |= {f"layers.{layer}.{one}" for one in ("attn.out", "attn_norm", "mlp_norm")}
        wrong |= {f"layers.{layer}.{one}.post_norm" for one in ("attn", "mlp")}
    assert beyond(engine, run(passing(engine), step)) == wrong


def test_models_without_head_norms_and_of_one_layer() -> None:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    engine = DenseEngine(config=config)
    result = run(passing(engine), engine.step(*PREFILL))
    assert result.skipped == {}
    assert set(ratios(result)) == names(engine)
    assert beyond(engine, result) == set()


def test_the_sums_by_brute_force() -> None:
    engine = DenseEngine()
    residual = passing(engine)
    steps = [engine.step(*PREFILL), engine.step(RowSpan("a", 9, 3), RowSpan("b", 1, 2), seed=1)]
    results = [run(residual, step) for step in steps]
    channels = torch.zeros(3, 4, 16, dtype=torch.float64)
    for step, result in zip(steps, results, strict=True):
        x = step.values["attn_norm"][1]
        exact = recompute.linear(
            x, engine.weights.of[("attn.q", 1)], engine.weights.biases[("attn.q", 1)], torch.float64
        )
        recorded = step.values["attn.q"][1].double()
        size = exact.magnitude.view(recorded.shape)
        error, value = (recorded - exact.value.view(recorded.shape)) / size, exact.value.view(recorded.shape) / size
        products = torch.stack((error * error, value * value, error * value))
        channels += products.sum(1)
        tokens = result.tensors["layers.1.attn.q#res_tok"]
        torch.testing.assert_close(tokens.double(), products.sum((2, 3)).T, rtol=1e-3, atol=1e-6)
        ratio, row, channel, count = result.tensors["layers.1.attn.q#res_max"].tolist()
        flat = error.abs().flatten(1)
        assert ratio == pytest.approx(float(flat.max()) * 256, rel=1e-3)
        assert float(flat[int(row), int(channel)]) == pytest.approx(float(flat.max()), rel=1e-3)
        assert count == 0
    found = residual.accumulated("prefill")["layers.1.attn.q#res_ch"]
    assert found.shape == (3, 4, 16)
    torch.testing.assert_close(found.double(), channels, rtol=1e-3, atol=1e-6)


def test_sampled_rows_are_those_of_the_whole_and_attention_knows_all_keys() -> None:
    engine = DenseEngine()
    whole, few = passing(engine), passing(engine, sample_rows=4)
    for step in (engine.step(*PREFILL), engine.step(RowSpan("a", 9, 8), seed=1)):
        all_rows, some = run(whole, step), run(few, step)
        assert len(some.sampled) == 4
        assert beyond(engine, some) == set()
        for key, tensor in some.tensors.items():
            if key.endswith("#res_tok") and not key.startswith("logits"):
                torch.testing.assert_close(tensor, all_rows.tensors[key][some.sampled], rtol=1e-3, atol=1e-9)
        worst = some.tensors["layers.0.mlp.down#res_max"]
        assert int(worst[1]) in some.sampled


def test_a_fault_is_where_it_is_and_nowhere_else() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    step.values["mlp.act"][1, 3, 17] *= 1.5
    step.values["attn.out"][2, 8, 1] = step.values["attn.out"][2, 7, 1]
    step.values["embed"][4, 0] += 1
    result = run(passing(engine), step)
    # What reads a wrong value is judged on the value that it read.
    readers = {"layers.1.mlp.down", "layers.2.attn.o", "layers.0.block_in"}
    assert beyond(engine, result) == {"layers.1.mlp.act", "layers.2.attn.out", "embed"} | readers
    assert result.tensors["layers.1.mlp.act#res_max"][1:3].tolist() == [3, 17]


def test_a_row_whose_keys_were_not_seen_is_not_judged() -> None:
    engine = DenseEngine()
    residual = passing(engine)
    engine.step(RowSpan("a", 0, 5))  # not shown to the residual, like a prefix from an earlier run
    result = run(residual, engine.step(RowSpan("a", 5, 2), RowSpan("b", 0, 3), seed=1))
    assert beyond(engine, result) == set()
    for layer in range(3):
        tokens = result.tensors[f"layers.{layer}.attn.out#res_tok"]
        assert tokens.isnan().all(1).tolist() == [True, True, False, False, False]
    alone = run(residual, engine.step(RowSpan("a", 7, 1), seed=2))
    assert alone.skipped == {f"layers.{layer}.attn.out": "no row could be recomputed" for layer in range(3)}


def test_a_new_run_forgets_the_old() -> None:
    engine = DenseEngine()
    residual = passing(engine)
    run(residual, engine.step(*PREFILL))
    residual.begin(1)
    assert residual.accumulated("prefill") == {}
    result = run(residual, engine.step(RowSpan("a", 9, 1), seed=1), "decode")
    assert "layers.0.attn.out" in result.skipped
    assert "layers.0.attn.o" in ratios(result)


def test_what_was_not_recorded_is_skipped_with_a_reason() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    del step.values["mlp.gate"]
    step.values["attn_norm"][1] = torch.nan
    result = run(passing(engine), step, present={"attn_norm": {0, 2}})
    lost = {"layers.1.attn_norm", "layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v"}
    assert set(result.skipped) == lost | {"mlp.act"}
    assert "mlp.gate was not recorded" in result.skipped["mlp.act"]
    without = {f"layers.{layer}.mlp.{kind}" for layer in range(3) for kind in ("gate", "act")}
    assert set(ratios(result)) == names(engine) - lost - without
    assert beyond(engine, result) == set()


def test_keys_of_a_layer_that_were_not_recorded_are_not_taken_for_known() -> None:
    engine = DenseEngine()
    residual = passing(engine)
    step = engine.step(*PREFILL)
    step.values["attn.key_states"][1] = 0
    run(residual, step, present={"attn.key_states": {0, 2}})
    result = run(residual, engine.step(RowSpan("a", 9, 1), seed=1), "decode")
    assert set(result.skipped) == {"layers.1.attn.out"}
    assert beyond(engine, result) == set()


def test_a_bad_record_costs_its_own_operators_alone() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    step.values["mlp.up"] = step.values["mlp.up"][:, :-1]
    result = run(passing(engine), step)
    assert set(result.skipped) == {"mlp.gate", "mlp.up", "mlp.act"}
    assert "14 rows" in result.skipped["mlp.act"]
    assert "layers.2.mlp.down" in ratios(result)


def test_rows_that_reach_the_head_may_be_all_that_the_last_norm_saw() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    for kind in ("final_in", "final_norm"):
        step.values[kind] = step.values[kind][step.logits_rows]
    result = run(passing(engine), step)
    assert result.skipped == {}
    assert beyond(engine, result) == set()
    assert result.tensors["final_in#res_tok"].shape == (3, 3)


@pytest.mark.parametrize("cache_bytes", [1 << 30, 0])
def test_changed_weights_are_seen(cache_bytes: int) -> None:
    engine = DenseEngine()
    residual = passing(engine, cache_bytes=cache_bytes)
    step = engine.step(*PREFILL)
    assert beyond(engine, run(residual, step)) == set()
    engine.weights.of[("attn.k", 1)][5] *= 3  # in place
    engine.weights.of[("mlp_norm", 2)] = engine.weights.of[("mlp_norm", 2)] * 2  # another parameter
    assert beyond(engine, run(residual, step)) == {"layers.1.attn.k", "layers.2.mlp_norm"}


def test_weights_of_inference_mode_are_read_again_in_every_run() -> None:
    with torch.inference_mode():
        engine = DenseEngine()
        step = engine.step(*PREFILL)
        residual = passing(engine)
        assert beyond(engine, run(residual, step)) == set()
        engine.weights.of[("mlp.down", 0)].mul_(2)
        residual.begin(1)
        assert beyond(engine, run(residual, step)) == {"layers.0.mlp.down"}


def test_the_padding_of_a_vocabulary_is_left_out() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    for kind in ("logits", "embed"):
        weight = engine.weights.of[(kind, None)]
        engine.weights.of[(kind, None)] = torch.cat((weight, torch.ones(16, weight.shape[1], dtype=weight.dtype)))
    result = run(passing(engine), step)
    assert result.skipped == {}
    assert beyond(engine, result) == set()


def test_shards_are_recomputed_from_local_inputs_and_weights() -> None:
    engine = DenseEngine()
    step = engine.step(*PREFILL)
    structure = replace(engine.structure, tp=2)
    halves = {"attn.q": 0, "attn.k": 0, "attn.v": 0, "mlp.gate": 0, "mlp.up": 0, "attn.o": 1, "mlp.down": 1}
    local = DenseEngine()
    for (kind, layer), weight in list(local.weights.of.items()):
        if kind in halves:
            local.weights.of[(kind, layer)] = weight.chunk(2, halves[kind])[1]
    for (kind, layer), bias in list(local.weights.biases.items()):
        local.weights.biases[(kind, layer)] = bias.chunk(2)[1]
    local.weights.of[("embed", None)] = local.weights.of[("embed", None)].chunk(2)[1]
    values = dict(step.values)
    for kind, tensor in step.values.items():
        if (kind.startswith("attn.") and kind != "attn.o") or kind in ("mlp.gate", "mlp.up", "mlp.act"):
            values[kind] = tensor.chunk(2, 2)[1]
    for partial, (source, weight_kind) in {
        "attn.o_partial": ("attn.out", "attn.o"),
        "mlp.down_partial": ("mlp.act", "mlp.down"),
    }.items():
        values[partial] = torch.stack(
            [
                (
                    values[source][layer].flatten(1).double() @ local.weights.of[(weight_kind, layer)].double().T
                ).bfloat16()
                for layer in range(3)
            ]
        )
    step.values = values
    residual = ResidualPass(structure, local.weights, torch.bfloat16)
    residual.begin(0)
    result = run(residual, step)
    assert set(result.skipped) == {"embed"}
    assert beyond(local, StepResiduals([], {k: v for k, v in result.tensors.items() if "partial" not in k})) == set()
    of_partials = [ratio for name, ratio in ratios(result).items() if name.endswith("_partial")]
    assert len(of_partials) == 6
    assert max(of_partials) <= 2
    reduced = {f"layers.{layer}.{kind}" for layer in range(3) for kind in ("attn.o", "mlp.down")}
    assert not reduced & set(ratios(result))


@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=12), limit=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_samples_are_spread_over_the_requests(counts: list[int], limit: int, seed: int) -> None:
    rows = [RowSpan(f"r{index}", 0, count) for index, count in enumerate(counts)]
    chosen = sample(rows, limit, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(limit, sum(counts))
    assert sample(rows, limit, seed) == chosen
    ends = torch.tensor(counts).cumsum(0).tolist()
    shares = []
    for count, end in zip(counts, ends, strict=True):
        mine = [row for row in chosen if end - count <= row < end]
        shares.append((len(mine), count))
        if mine:
            assert end - 1 in mine
        if len(mine) > 1:
            assert end - count in mine
    # No request has two rows more than another that has rows left.
    for have, _ in shares:
        assert all(have - other <= 1 or other == count for other, count in shares)


def test_other_seeds_sample_other_rows() -> None:
    rows = [RowSpan("a", 0, 200)]
    assert len({tuple(sample(rows, 10, seed)) for seed in range(20)}) > 15
