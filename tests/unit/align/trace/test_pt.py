"""`.pt` directories: what is exported comes back, and what somebody wrote by hand is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from align.checkpoints.table import structure_of
from align.compare.policy import TensorPolicy
from align.compare.tensors import TensorComparison, compare_traces
from align.trace.format import POSITIONS, TOKEN_IDS
from align.trace.pt import INDEX, IndexedFiles, LooseFiles, import_pt
from align.trace.pt_export import export_pt
from align.trace.pt_names import file_name, read_file_name
from tests.unit.align.compare import traces

POLICY = TensorPolicy.derived("bfloat16", layers=2)
Tensors = dict[str, torch.Tensor]


def verdicts(comparison: TensorComparison) -> dict[str, str]:
    return {one.name: one.verdict for one in comparison.checkpoints}


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "rank", "file"),
    [
        ("layers.0.attn.out", 0, "layer0_attn_out_output_rank0.pt"),
        ("layers.12.block_in", 3, "layer12_block_in_input_rank3.pt"),
        ("layers.1.attn.kv_start_indices", 0, "layer1_attn_kv_start_indices_input_rank0.pt"),
        ("final_norm", 0, "final_norm_output_rank0.pt"),
        (TOKEN_IDS, 1, "token_ids_input_rank1.pt"),
    ],
)
def test_file_names(name: str, rank: int, file: str) -> None:
    assert file_name(name, rank) == file


def test_every_checkpoint_has_a_file_name_of_its_own() -> None:
    names = [str(name) for name in structure_of(traces.CONFIG, tp=2).names()] + [TOKEN_IDS, POSITIONS]
    files = {file_name(name, 5) for name in names}
    assert len(files) == len(names)
    assert [read_file_name(file_name(name, 5).removesuffix(".pt")) for name in names] == [(name, 5) for name in names]


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        ("layer0_attn_out_rank0", ("layers.0.attn.out", 0)),  # the seed's own example
        ("layer0_attn_out_output_rank2", ("layers.0.attn.out", 2)),
        ("layer0_attn_out_input_rank0", ("layer0_attn_out_input", 0)),
        ("layer07_rmsnorm_rank1", ("layer7_rmsnorm_output", 1)),
        ("3_attn_q", ("layers.3.attn.q", 0)),
        ("layers.4.attn_q_norm", ("layers.4.attn.q_norm", 0)),
        ("key_states_rank0", ("key_states_output", 0)),
        ("embed_rank0", ("embed", 0)),
        ("layer3_embed_rank0", ("layer3_embed_output", 0)),
        ("anything", ("anything_output", 0)),
    ],
)
def test_names_of_files(stem: str, expected: tuple[str, int]) -> None:
    assert read_file_name(stem) == expected


# ----------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("tp", [1, 2])
def test_export_and_import_compare_as_the_trace_does(tmp_path: Path, tp: int) -> None:
    trace = traces.write(tmp_path / "trace", tp=tp, noise=0.003)
    other = traces.write(tmp_path / "other", tp=tp)
    done = export_pt(trace, tmp_path / "pt")
    paths = list((tmp_path / "pt").glob("step*/*.pt"))
    assert done.files == len(paths) == 2 * tp * (len(list(trace.structure.names())) + 2) and not done.skipped
    assert done.bytes == sum(path.stat().st_size for path in paths)
    found = import_pt(tmp_path / "pt")
    assert isinstance(found, IndexedFiles)
    direct, through = compare_traces(trace, other, POLICY), compare_traces(found, other, POLICY)
    assert direct.to_dict() == through.to_dict()
    assert compare_traces(found, trace, POLICY).coverage["paired"].percent == 100.0
    assert set(verdicts(compare_traces(found, trace, POLICY)).values()) == {"equal"}


def test_files_are_plain_tensors(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace")
    export_pt(trace, tmp_path / "pt")
    path = tmp_path / "pt" / "step00001" / "layer1_attn_q_output_rank0.pt"
    loaded, expected = torch.load(path, weights_only=True), trace.tensor(0, 1, "layers.1.attn.q")
    assert expected is not None and torch.equal(loaded, expected)


def test_digests_are_not_exported_and_said(tmp_path: Path) -> None:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        tensors["embed#tok"] = tensors.pop("embed")[:, :8].float().contiguous()
        tensors["final_norm#tok"] = tensors["embed#tok"].clone()

    done = export_pt(traces.write(tmp_path / "trace", edit=edit), tmp_path / "pt")
    assert done.skipped == {"embed": "only a digest was recorded"}
    found = compare_traces(import_pt(tmp_path / "pt"), traces.write(tmp_path / "other"), POLICY)
    assert found.coverage["candidate"].missing == ("embed",)
    assert found.coverage["candidate"].why == (("embed", "only a digest was recorded"),)


def test_a_directory_that_is_not_empty_is_kept(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace")
    with pytest.raises(ValueError, match="not empty"):
        export_pt(trace, tmp_path / "trace")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json cannot be read"):
        import_pt(tmp_path)


# -------------------------------------------------------------------------------------------------------- by hand


def save(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for stem, tensor in tensors.items():
        torch.save(tensor, directory / f"{stem}.pt")
    return directory


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_seeds_own_example(tmp_path: Path) -> None:
    clean = {
        "layer0_attn_out_rank0": some((5, 8)),
        "layer10_rmsnorm_rank0": some((5, 8), 1),
        "layer2_moe_rank0": some((5, 8), 2),
    }
    wrong = {**clean, "layer2_moe_rank0": -some((5, 8), 2)}
    mine, theirs = save(tmp_path / "dlinfer", wrong), save(tmp_path / "vllm", clean)
    candidate, reference = import_pt(mine), import_pt(theirs)
    assert isinstance(candidate, LooseFiles) and candidate.dtype == "bfloat16"
    found = compare_traces(candidate, reference, POLICY)
    assert verdicts(found) == {
        "layers.0.attn.out": "equal",
        "layer2_moe_output": "beyond",
        "layer10_rmsnorm_output": "equal",  # layers in numeric order
    }
    assert list(verdicts(found)) == ["layers.0.attn.out", "layer2_moe_output", "layer10_rmsnorm_output"]
    assert found.coverage["paired"].percent == 100.0 and found.pairing.notes
    json.dumps(found.to_dict(), allow_nan=False)


def test_names_with_and_without_output_are_one(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"layer0_attn_out_rank0": some((5, 8))})
    b = save(tmp_path / "b", {"layer0_attn_out_output_rank0": some((1, 5, 2, 4)).reshape(1, 5, 8)})
    found = compare_traces(import_pt(a), import_pt(b), POLICY).get("layers.0.attn.out")
    assert found is not None and "length 1 in front" in found.note


def test_step_directories_in_numeric_order(tmp_path: Path) -> None:
    for side in "ab":
        for step in (2, 10):
            save(tmp_path / side / f"step{step}", {"layer0_x_output_rank0": some((step, 4), step)})
    save(tmp_path / "a" / "step11", {"layer0_x_output_rank0": some((3, 4))})
    found = compare_traces(import_pt(tmp_path / "a"), import_pt(tmp_path / "b"), POLICY)
    assert verdicts(found) == {"layer0_x_output": "equal"}
    assert found.checkpoints[0].rows == 12 and found.pairing.unpaired == {"steps only on the candidate": 1}


def test_ranks_are_compared_one_by_one(tmp_path: Path) -> None:
    right = {f"layer0_attn_out_rank{rank}": some((5, 4), rank) for rank in range(2)}
    wrong = {**right, "layer0_attn_out_rank1": some((5, 4), 7)}
    found = compare_traces(import_pt(save(tmp_path / "a", wrong)), import_pt(save(tmp_path / "b", right)), POLICY)
    assert verdicts(found) == {"layers.0.attn.out": "equal", "layers.0.attn.out rank1": "beyond"}


def test_a_trace_against_files_without_an_index(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "trace")
    export_pt(trace, tmp_path / "pt")
    os.remove(tmp_path / "pt" / INDEX)
    found = compare_traces(import_pt(tmp_path / "pt"), trace, POLICY)
    assert set(verdicts(found).values()) == {"equal"} and found.pairing.by_order


class Planted:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (self.marker,)


def test_bad_files_stop_nothing_and_run_nothing(tmp_path: Path) -> None:
    good = {"layer0_a_rank0": some((5, 4)), "layer1_b_rank0": some((5, 4)), "layer2_c_rank0": some((5, 4))}
    a, b = save(tmp_path / "a", good), save(tmp_path / "b", good)
    torch.save(Planted(tmp_path / "planted"), a / "layer0_a_rank0.pt")
    (a / "layer1_b_rank0.pt").write_bytes(b"nonsense")
    torch.save({"not": "a tensor"}, a / "layer3_d_rank0.pt")
    save(b, {"layer3_d_rank0": some((5, 4)), "layer4_e_rank0": some((5, 4))})
    found = compare_traces(import_pt(a), import_pt(b), POLICY)
    assert list(verdicts(found).values()) == [
        "not comparable", "not comparable", "equal", "not comparable", "not observable"
    ]  # fmt: skip
    assert not (tmp_path / "planted").exists()
    assert "holds a dict" in found.checkpoints[3].why and "layer1_b_rank0.pt" in found.checkpoints[1].why


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.pt file"):
        import_pt(tmp_path)
