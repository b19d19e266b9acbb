"""Native shapes: fused as the engine has them, and taken apart again as the index says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.probe.taps import ENGINES, PSEUDO, load_taps
from adapters.probe.transforms import TRANSFORMS, Dims
from align.checkpoints.shards import shards
from align.checkpoints.table import kinds
from align.compare.policy import TensorPolicy
from align.compare.tensors import compare_traces
from align.trace.native import NativeForms, dims_from, dims_of, dims_to
from align.trace.pt import INDEX, IndexedFiles, import_pt
from align.trace.pt_export import export_pt
from align.trace.reader import Trace
from tests.unit.align.compare import traces

POLICY = TensorPolicy.derived("bfloat16", layers=2)
Tensors = dict[str, torch.Tensor]
ABOUT = {"engine": "lmdeploy"}


def load(directory: Path, stem: str, rank: int = 0, step: int = 0) -> torch.Tensor:
    found: torch.Tensor = torch.load(directory / f"step{step:05d}" / f"{stem}_rank{rank}.pt", weights_only=True)
    return found


def recorded(trace: Trace, name: str, rank: int = 0, step: int = 0) -> torch.Tensor:
    found = trace.tensor(rank, step, name)
    assert found is not None, name
    return found


def assert_same(exported: Path, trace: Trace) -> None:
    """Every value of every step and rank comes back bit by bit."""
    found = import_pt(exported)
    assert isinstance(found, IndexedFiles)
    for rank in trace.ranks:
        for entry in trace.steps(rank):
            assert found.keys(rank, entry.step) == trace.keys(rank, entry.step)
            for key in trace.keys(rank, entry.step):
                back = found.tensor(rank, entry.step, key)
                assert back is not None and torch.equal(back, recorded(trace, key, rank, entry.step)), key


@pytest.mark.parametrize("engine", ENGINES)
def test_both_engines_fuse_their_projections(engine: str) -> None:
    forms = NativeForms.of(engine)
    assert forms.fusions == {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")}
    taps = {tap.checkpoint for tap in load_taps(engine)}
    assert forms.transforms.keys() | forms.canonical.keys() == taps, "each has a form or a reason"
    # Indices that both allocate for themselves, and what is keyed by expert and sorted.
    assert set(forms.canonical) == {"attn.kv_start_indices", "block_tables", "moe.topk_ids", "moe.topk_weights"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_native_tensors_are_what_the_taps_took(tmp_path: Path, engine: str, tp: int) -> None:
    """The taps' own forward transforms, on what was written, give what they had recorded."""
    trace = traces.write(tmp_path / "trace", tp=tp, about={"engine": engine})
    done = export_pt(trace, tmp_path / "pt", NativeForms.of(engine))
    assert not done.skipped and list(done.canonical) == ["attn.kv_start_indices"]
    stems = {"attn.q": "attn_qkv", "attn.k": "attn_qkv", "attn.v": "attn_qkv"}
    stems |= {"mlp.gate": "mlp_gate_up", "mlp.up": "mlp_gate_up"}
    inputs = ("block_in", "final_in", "attn.key_states", "attn.value_states")
    seen = set()
    for rank in trace.ranks:
        dims = Dims.of(trace.structure, rank)
        assert dims_of(trace, rank) == dims == dims_from(json.loads(json.dumps(dims_to(dims))))
        for tap in load_taps(engine):
            if tap.checkpoint in (*PSEUDO, "attn.kv_start_indices") or not trace.structure.has(kinds()[tap.checkpoint]):
                continue
            layered = kinds()[tap.checkpoint].per_layer
            stem = stems.get(tap.checkpoint, tap.checkpoint.replace(".", "_"))
            stem = f"{'layer1_' if layered else ''}{stem}_{'input' if tap.checkpoint in inputs else 'output'}"
            name = kinds()[tap.checkpoint].at(1 if layered else None)
            taken = TRANSFORMS[tap.transform].forward(load(tmp_path / "pt", stem, rank), dims)
            assert torch.equal(taken, recorded(trace, name, rank)), name
            seen.add(tap.checkpoint)
    assert {"attn.v", "mlp.up", "logits", "attn.q_rope"} <= seen
    assert_same(tmp_path / "pt", trace)


def test_the_shapes_of_lmdeploy(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace", about=ABOUT)
    export_pt(trace, tmp_path / "pt", NativeForms.of("lmdeploy"))
    parts = [recorded(trace, f"layers.0.attn.{part}").reshape(5, -1) for part in "qkv"]
    assert torch.equal(load(tmp_path / "pt", "layer0_attn_qkv_output"), torch.cat(parts, 1)[None])
    halves = [recorded(trace, f"layers.1.mlp.{part}") for part in ("gate", "up")]
    assert torch.equal(load(tmp_path / "pt", "layer1_mlp_gate_up_output"), torch.cat(halves, 1)[None])
    assert load(tmp_path / "pt", "token_ids_input").shape == (1, 5)
    assert load(tmp_path / "pt", "logits_output").shape == (1, 2, 32)
    written = {path.name for path in (tmp_path / "pt").glob("step*/*.pt")}
    assert not {name for name in written if "attn_q_output" in name or "mlp_up_" in name}, "q is in qkv"
    index = json.loads((tmp_path / "pt" / INDEX).read_text())
    assert index["native"]["engine"] == "lmdeploy"
    assert index["native"]["dims"] == {
        "0": {"heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 24, "experts": 0, "topk": 0}
    }
    assert list(index["native"]["canonical"]) == ["attn.kv_start_indices"]


@pytest.mark.parametrize("tp", [1, 2])
def test_native_directories_of_two_engines_compare_as_the_canonical_ones(tmp_path: Path, tp: int) -> None:
    def double(phase: str, step: int, tensors: Tensors) -> None:
        tensors["layers.1.attn.k"] = tensors["layers.1.attn.k"] * 2

    sides = {
        "lmdeploy": traces.write(tmp_path / "a", tp=tp, edit=double, about=ABOUT),
        "vllm": traces.write(tmp_path / "b", about={"engine": "vllm"}),
    }
    found = []
    for form in ("canonical", "native"):
        for engine, trace in sides.items():
            export_pt(trace, tmp_path / form / engine, NativeForms.of(engine) if form == "native" else None)
        pair = [import_pt(tmp_path / form / engine) for engine in sides]
        found.append(compare_traces(pair[0], pair[1], POLICY))
    assert found[0].to_dict() == found[1].to_dict()
    first = found[1].first_divergence
    assert first is not None and first.name == "layers.1.attn.k"
    assert found[1].coverage["paired"].percent == 100.0


def test_a_part_that_is_missing_leaves_the_others_canonical(tmp_path: Path) -> None:
    def drop(phase: str, step: int, tensors: Tensors) -> None:
        if step == 1:
            del tensors["layers.0.attn.k"]

    trace = traces.write(tmp_path / "trace", edit=drop, about=ABOUT)
    done = export_pt(trace, tmp_path / "pt", NativeForms.of("lmdeploy"))
    assert done.canonical["attn.q"] == done.canonical["attn.v"] == "some steps lack values of a part of attn.qkv"
    assert load(tmp_path / "pt", "layer0_attn_q_output", step=1).shape == (2, 4, 4)
    assert load(tmp_path / "pt", "layer0_attn_qkv_output", step=0).shape == (1, 5, 32)
    assert load(tmp_path / "pt", "layer1_attn_qkv_output", step=1).shape == (1, 2, 32)
    assert_same(tmp_path / "pt", trace)


def test_a_table_that_taps_one_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taps = [tap for tap in load_taps("vllm") if tap.checkpoint not in ("attn.v", "mlp.down")]
    monkeypatch.setattr("align.trace.native.load_taps", lambda engine: taps)
    forms = NativeForms.of("vllm")
    assert list(forms.fusions) == ["mlp.gate_up"]
    assert forms.canonical["attn.q"] == "the other parts of its fused tensor are not tapped"
    planned, why = forms.plan(["layers.0.attn.q", "layers.0.mlp.down"])
    assert [(one.names, one.transform) for one in planned] == [
        (("layers.0.attn.q",), None),
        (("layers.0.mlp.down",), None),
    ]
    assert why["mlp.down"] == "vllm has no tap for it"


def test_a_fused_file_of_another_shape_stops_nothing(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace", about=ABOUT)
    export_pt(trace, tmp_path / "pt", NativeForms.of("lmdeploy"))
    file = tmp_path / "pt" / "step00000" / "layer0_attn_qkv_output_rank0.pt"
    torch.save(torch.ones(1, 5, 31), file)
    torch.save(torch.ones(5), tmp_path / "pt" / "step00000" / "attn_qkv_output_rank0.pt")  # of no layer
    found = compare_traces(import_pt(tmp_path / "pt"), trace, POLICY)
    bad = {one.name: one for one in found.checkpoints if one.verdict != "equal"}
    assert set(bad) == {"layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v", "attn_qkv_output"}
    assert bad["layers.0.attn.k"].verdict == "not comparable"
    assert f"{file} holds [1, 5, 31]" in bad["layers.0.attn.k"].why


def edited(**changes: Any) -> Any:
    return lambda native: native.update(changes)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edited(transforms={"attn.q": "eval"}), "transform eval is not known"),
        (edited(transforms={"nothing": "rows"}, fusions={}), "not in the table"),
        (edited(fusions={"attn.qkv": ["attn.q", "nothing"]}), "not in the table"),
        (edited(dims={"0": {"heads": 4}}), "TypeError"),
        (edited(transforms=None), "cannot be read"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, edit: Any, words: str) -> None:
    export_pt(traces.write(tmp_path / "trace", about=ABOUT), tmp_path / "pt", NativeForms.of("lmdeploy"))
    file = tmp_path / "pt" / INDEX
    index = json.loads(file.read_text())
    edit(index["native"])
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=words) as caught:
        import_pt(tmp_path / "pt")
    assert INDEX in str(caught.value)


def test_without_its_index_it_is_a_directory_of_files(tmp_path: Path) -> None:
    for engine in ENGINES:
        export_pt(traces.write(tmp_path / f"of_{engine}"), tmp_path / engine, NativeForms.of(engine))
        os.remove(tmp_path / engine / INDEX)
    found = compare_traces(import_pt(tmp_path / "lmdeploy"), import_pt(tmp_path / "vllm"), POLICY)
    fused = found.get("layer0_attn_qkv_output")
    assert fused is not None and fused.verdict == "equal"


def test_shards_of_uneven_replicas(tmp_path: Path) -> None:
    """Four ranks share two key heads: a rank's fused tensor holds a copy of one of them."""
    trace = traces.write(tmp_path / "trace", tp=4, about=ABOUT)
    assert shards(trace.structure, 3)["attn.k"].count == 1
    assert dims_of(trace, 3) == Dims(heads=1, kv_heads=1, head_dim=4, intermediate=6)
