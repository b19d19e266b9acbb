"""The oracle on a small engine's records: silent on right kernels, precise on faults, honest about gaps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from align.errors import UserError
from align.oracle import Oracle, OracleResult
from align.oracle import attention as attention_module
from align.oracle import operators as operators_module
from align.oracle import weights as weights_module
from align.trace.format import MANIFEST, POSITIONS, TOKEN_IDS
from align.trace.reader import Trace
from tests.unit.adapters.probe.dense_engine import CONFIG, GEMMA, DenseEngine
from tests.unit.align.checkpoints import eager
from tests.unit.align.oracle.recorded_side import STEPS, Edit, SummingEngine, record, save_checkpoint, verdicts

Tensor = torch.Tensor
SLOTS = {f"layers.{layer}.attn.kv_start_indices" for layer in range(3)}


def side(folder: Path, engine: DenseEngine, **more: Any) -> tuple[Trace, Path]:
    model = save_checkpoint(folder / "model", engine)
    return record(folder / "trace", engine, **more), model


def judged(folder: Path, engine: DenseEngine, names: list[str] | None = None, **more: Any) -> dict[str, OracleResult]:
    trace, model = side(folder, engine, **more)
    with Oracle(trace, model) as oracle:
        return {result.name: result for result in oracle.judge(names)}


def beyond(results: dict[str, OracleResult]) -> set[str]:
    return {name for name, result in results.items() if result.verdict == "beyond"}


@pytest.mark.parametrize("dtype", eager.DTYPES, ids=str)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=["qwen3", "gemma2"])
def test_right_kernels_are_within_everywhere(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, native: bool
) -> None:
    results = judged(tmp_path, DenseEngine(dtype, native, config))
    assert {name for name, result in results.items() if result.verdict != "within"} == SLOTS
    assert all(results[name].why.startswith("cache slots are indices") for name in SLOTS)
    for name, result in results.items():
        if name in SLOTS:
            continue
        assert result.complete, name
        assert result.rows == (6 if name == "logits" else 18)
        assert result.ratio <= 1
        assert result.tokens is not None and result.channels is not None
        assert len(result.tokens) == len(result.places) == result.rows
        assert float(result.tokens.ratio.max()) == float(result.channels.ratio.max()) == result.ratio
        if result.operator in ("identity", "embedding", "add"):
            assert result.bit_equal and result.equal == 1
        if not native:  # float64 inside, rounded: all but what torch rounded twice
            assert result.equal > 0.99 or result.operator == "rope"
    assert results["layers.1.attn.out"].heads is not None and len(results["layers.1.attn.out"].heads) == 4
    assert results["layers.1.mlp.act"].heads is None


def test_results_are_plain_data(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), ["layers.0.attn.q", "layers.0.attn.kv_start_indices"])
    short = json.loads(json.dumps(results["layers.0.attn.q"].to_dict(), allow_nan=False))
    assert len(short["tokens"]["members"]) == 8 and short["tokens"]["count"] == 18
    assert short["tokens"]["members"][0]["place"]["request"] in "ab"
    assert short["worst"]["row"]["step"] in (0, 1, 2)
    long = json.loads(json.dumps(results["layers.0.attn.q"].to_dict(arrays=True), allow_nan=False))
    assert [member["index"] for member in long["channels"]["members"]] == list(range(64))
    assert json.loads(json.dumps(results["layers.0.attn.kv_start_indices"].to_dict()))["verdict"] == "not observable"


def faulty(kind: str, layer: int, change: Any) -> DenseEngine:
    """An engine whose checkpoint is right and whose live weights are not."""
    engine = DenseEngine()
    engine.weights.of[(kind, layer)] = change(engine.weights.of[(kind, layer)].clone())
    return engine


def row_times(row: int, factor: float) -> Any:
    def change(weight: Tensor) -> Tensor:
        weight[row] = (weight[row].float() * factor).to(weight.dtype)
        return weight

    return change


@pytest.mark.parametrize("factor", [1.05, 1.02])
def test_one_row_of_a_weight_is_named_with_its_channel(tmp_path: Path, factor: float) -> None:
    model = save_checkpoint(tmp_path / "model", DenseEngine())
    trace = record(tmp_path / "trace", faulty("mlp.down", 1, row_times(7, factor)), LONG)
    results = {result.name: result for result in Oracle(trace, model).judge()}
    assert beyond(results) == {"layers.1.mlp.down"}
    found = results["layers.1.mlp.down"]
    assert found.channels is not None and found.residual is not None and found.residual.gain_channel is not None
    assert found.residual.gain_channel.index == 7
    assert int(found.channels.ratio.argmax()) == 7
    assert float(found.channels.gain[7]) == pytest.approx(factor - 1, abs=2e-3)
    assert float(found.channels.gain[8]) == pytest.approx(0, abs=2e-3)


LONG = tuple(tuple(replace(span, count=40) if span.start == 0 else span for span in step) for step in STEPS[:1])


def test_swapped_gate_and_up_accuse_both_and_nothing_else(tmp_path: Path) -> None:
    engine = DenseEngine()
    model = save_checkpoint(tmp_path / "model", engine)
    of = engine.weights.of
    of[("mlp.gate", 1)], of[("mlp.up", 1)] = of[("mlp.up", 1)], of[("mlp.gate", 1)]
    results = {result.name: result for result in Oracle(record(tmp_path / "trace", engine), model).judge()}
    assert beyond(results) == {"layers.1.mlp.gate", "layers.1.mlp.up"}


def test_a_wrong_epsilon_and_swapped_head_norms(tmp_path: Path) -> None:
    engine = DenseEngine()
    engine.weights.of[("embed", None)] *= 0.002
    model = save_checkpoint(tmp_path / "model", engine)
    engine.structure = replace(engine.structure, eps=1e-4)
    of = engine.weights.of
    of[("attn.q_norm", 2)], of[("attn.k_norm", 2)] = of[("attn.k_norm", 2)], of[("attn.q_norm", 2)]
    results = {result.name: result for result in Oracle(record(tmp_path / "trace", engine), model).judge()}
    assert {"layers.0.attn_norm", "layers.2.attn.q_norm", "layers.2.attn.k_norm"} <= beyond(results)
    assert all(results[name].operator == "rms_norm" for name in beyond(results))
    gain = results["layers.0.attn_norm"].tokens
    assert gain is not None and bool((gain.gain < -0.01).all())


def test_rope_angles_in_bfloat16_are_beyond_from_some_position_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
        angles = positions.bfloat16()[:, None] * inverse.bfloat16()[None]
        wide = torch.cat((angles, angles), dim=-1)[:, None].float()
        return x * wide.cos().to(x.dtype) + eager.halves_turned(x) * wide.sin().to(x.dtype)

    monkeypatch.setattr(eager, "rope_native", coarse)
    results = judged(tmp_path, DenseEngine(), steps=LONG)
    assert beyond(results) == {f"layers.{layer}.attn.{one}_rope" for layer in range(3) for one in "qk"}
    tokens = results["layers.0.attn.q_rope"].tokens
    assert tokens is not None
    assert float(tokens.ratio[1]) < 1 < float(tokens.ratio[36:40].max())


def test_an_element_that_is_not_finite_is_beyond_and_its_consequences_are_not(tmp_path: Path) -> None:
    def spoil(step: int, tensors: dict[str, Tensor]) -> None:
        if step == 0:
            tensors["layers.0.mlp_norm"][3, 5] = torch.nan
            tensors["layers.0.mlp.gate"][3] = torch.nan

    results = judged(tmp_path, DenseEngine(), edit=spoil)
    assert beyond(results) == {"layers.0.mlp_norm"}
    found = results["layers.0.mlp_norm"]
    assert found.residual is not None and found.residual.row_name == ("a", 3)
    assert "not finite although the exact result is" in found.why
    assert found.worst is not None and found.worst.row[:3] == ("a", 3, 0) and found.worst.channel == 5
    gate = results["layers.0.mlp.gate"]
    assert (gate.verdict, gate.excused, gate.rows, gate.bit_equal) == ("within", 64, 17, False)
    assert json.dumps(found.to_dict(), allow_nan=False)


def without(*names: str, step: int | None = None) -> Edit:
    def drop(number: int, tensors: dict[str, Tensor]) -> None:
        for name in names:
            if step is None or number == step:
                tensors.pop(name, None)

    return drop


def test_what_was_not_recorded_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), edit=without("layers.1.mlp_norm", "layers.0.attn.q", TOKEN_IDS))
    lost = {name for name, result in results.items() if result.verdict == "not observable"} - SLOTS
    assert lost == {
        "embed",
        "layers.1.mlp_norm",
        "layers.1.mlp.gate",
        "layers.1.mlp.up",
        "layers.0.attn.q",
        "layers.0.attn.q_norm",
    }
    assert results["layers.1.mlp.gate"].why == "the values of layers.1.mlp_norm were not recorded"
    assert results["embed"].why == "the token ids were not recorded"


def test_a_step_that_is_missing_is_skipped_by_name(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), ["layers.0.mlp.up"], edit=without("layers.0.mlp.up", step=1))
    found = results["layers.0.mlp.up"]
    assert (found.verdict, found.rows, found.complete) == ("within", 16, False)
    assert [(one.step, one.rows) for one in found.skipped] == [(1, 2)]


def test_attention_to_keys_that_nobody_recorded_is_not_judged(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), edit=without("layers.0.attn.key_states", step=1))
    found = results["layers.0.attn.out"]
    assert found.verdict == "within"
    assert found.rows == 14  # both steps of decoding need what step 1 wrote
    assert {one.step for one in found.skipped} == {1, 2}
    assert "layers.0.attn.key_states" in found.skipped[0].why
    assert results["layers.1.attn.out"].rows == 18


def test_a_window_needs_only_the_keys_inside_it(tmp_path: Path) -> None:
    config = {**CONFIG, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    results = judged(tmp_path, DenseEngine(config=config), ["layers.0.attn.out"])
    assert results["layers.0.attn.out"].verdict == "within" and results["layers.0.attn.out"].complete
    late = {**config, "max_window_layers": 2}  # the engine still slides in all layers
    results = judged(tmp_path / "late", DenseEngine(config=late), ["layers.0.attn.out", "layers.2.attn.out"])
    assert results["layers.0.attn.out"].verdict == "beyond"
    assert results["layers.2.attn.out"].verdict == "within"
    tokens = results["layers.0.attn.out"].tokens
    assert tokens is not None and float(tokens.ratio[3]) < 1 < float(tokens.ratio[5])  # starting at the window


def test_a_window_that_may_or_may_not_apply_judges_the_rows_before_it(tmp_path: Path) -> None:
    trace, model = side(tmp_path, DenseEngine())
    manifest = json.loads((trace.directory / MANIFEST).read_text())
    manifest["model"] |= {"architectures": ["Phi3ForCausalLM"], "sliding_window": 6}
    (trace.directory / MANIFEST).write_text(json.dumps(manifest))
    oracle = Oracle(Trace(trace.directory), model, structure=DenseEngine().structure)
    (found,) = oracle.judge(["layers.0.attn.out"])
    assert found.verdict == "within"
    assert found.rows == 6 + 5 + 1  # positions below 6
    assert all("does not say for which layers" in one.why for one in found.skipped)
    assert sum(one.rows for one in found.skipped) == 6


def test_absent_weights_are_said_and_the_others_judged(tmp_path: Path) -> None:
    engine = DenseEngine()
    trace = record(tmp_path / "trace", engine, model_dir=tmp_path / "nowhere")
    results = {result.name: result for result in Oracle(trace).judge()}
    assert results["layers.0.mlp.act"].verdict == results["layers.0.attn.out"].verdict == "within"
    assert results["layers.0.mlp.up"].why == f"the checkpoint's files are not at {tmp_path / 'nowhere'}"
    model = save_checkpoint(tmp_path / "model", engine, without=["model.layers.0.mlp.up_proj.weight"])
    results = {result.name: result for result in Oracle(trace, model).judge()}
    assert {name for name, result in results.items() if result.verdict == "not observable"} - SLOTS == {
        "layers.0.mlp.up"
    }
    assert results["layers.0.mlp.up"].why == "the checkpoint's files have no weight for layers.0.mlp.up"


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    trace, model = side(tmp_path, DenseEngine())
    manifest = json.loads((trace.directory / MANIFEST).read_text())
    manifest["model_info"] = {"path": str(model), "fingerprint": "0" * 16}
    (trace.directory / MANIFEST).write_text(json.dumps(manifest))
    (model / "config.json").write_text(
        json.dumps({**CONFIG, "max_position_embeddings": 64, "vocab_size": 80}), encoding="utf-8"
    )
    with pytest.raises(UserError, match="is not the checkpoint that was recorded"):
        Oracle(Trace(trace.directory), model)


def test_a_damaged_file_costs_its_own_step(tmp_path: Path) -> None:
    trace, model = side(tmp_path, DenseEngine())
    (trace.directory / "rank0" / "step00001.safetensors").write_bytes(b"nonsense")
    with Oracle(Trace(trace.directory), model) as oracle:
        results = {result.name: result for result in oracle.judge(["layers.0.mlp.up", "layers.0.attn.out"])}
    assert verdicts(list(results.values())) == dict.fromkeys(results, "within")
    assert results["layers.0.mlp.up"].rows == 16
    assert "cannot be read" in results["layers.0.mlp.up"].skipped[0].why
    assert results["layers.0.attn.out"].rows == 14


def test_positions_of_the_schedule_are_taken_with_a_note(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), ["layers.0.attn.q_rope"], edit=without(POSITIONS))
    found = results["layers.0.attn.q_rope"]
    assert found.verdict == "within"
    assert found.notes == ("positions were not recorded: those of the schedule were taken",)


def test_rows_that_reach_the_head_alone(tmp_path: Path) -> None:
    results = judged(tmp_path, DenseEngine(), ["final_norm", "logits"], cut_final=True)
    assert verdicts(list(results.values())) == {"final_norm": "within", "logits": "within"}
    assert results["final_norm"].rows == 6
    assert [place[:2] for place in results["final_norm"].places[:2]] == [("a", 8), ("b", 4)]


def test_two_ranks_are_judged_summand_by_summand(tmp_path: Path) -> None:
    def spoil(step: int, tensors: dict[str, Tensor]) -> None:
        if step == 0:
            tensors["layers.2.attn.o"][4] *= 2  # a reduce that was done twice, on both ranks

    results = judged(tmp_path, SummingEngine(), tp=2, edit=spoil)
    assert beyond(results) == {"layers.2.attn.o", "layers.2.mid"}
    assert results["layers.2.attn.o"].operator == "all_reduce"
    part = results["layers.1.mlp.down_partial"]
    assert (part.verdict, part.rows) == ("within", 36)
    assert {place.rank for place in part.places} == {0, 1}
    assert results["layers.0.attn.out"].rows == 18


def test_a_fault_of_one_rank_is_named_with_it(tmp_path: Path) -> None:
    engine = SummingEngine()
    model = save_checkpoint(tmp_path / "model", engine)
    weight = engine.weights.of[("mlp.down", 1)]
    weight[:, 32:] = (weight[:, 32:].float() * 1.1).to(weight.dtype)
    results = {r.name: r for r in Oracle(record(tmp_path / "trace", engine, tp=2), model).judge()}
    assert beyond(results) == {"layers.1.mlp.down_partial"}
    worst = results["layers.1.mlp.down_partial"].worst
    assert worst is not None and worst.row.rank == 1


def test_chunks_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, model = side(tmp_path, DenseEngine())
    with Oracle(trace, model) as oracle:
        whole = oracle.judge()
    monkeypatch.setattr(operators_module, "CHUNK", 100)
    monkeypatch.setattr(operators_module, "MIN_ROWS", 3)
    monkeypatch.setattr(weights_module, "PIECE", 200)
    monkeypatch.setattr(attention_module, "SCORES", 50)
    with Oracle(trace, model) as oracle:
        for one, other in zip(whole, oracle.judge(), strict=True):
            assert (one.name, one.verdict, one.rows, one.equal) == (other.name, other.verdict, other.rows, other.equal)
            if one.operator != "attention":  # the magnitude knows the mean size of the keys up to the chunk's last row
                assert other.ratio == pytest.approx(one.ratio, rel=1e-9)


def test_steps_can_be_chosen_and_names_are_checked(tmp_path: Path) -> None:
    trace, model = side(tmp_path, DenseEngine())
    with Oracle(trace, model) as oracle:
        (found,) = oracle.judge(["layers.0.attn.out"], steps=[2, 9])
        assert (found.rows, {place.step for place in found.places}) == (2, {2})
        assert [(one.step, one.why) for one in found.skipped] == [(9, "step 9 was not recorded")]
        order = [one.name for one in oracle.judge(["logits", "layers.1.mid", "embed"])]
        assert order == ["embed", "layers.1.mid", "logits"]
        for name in ("layers.9.mid", "nonsense", "layers.0.moe.out"):
            with pytest.raises(ValueError, match=name):
                oracle.judge([name])
