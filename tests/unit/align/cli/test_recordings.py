"""``align compare``, ``export`` and ``taps`` without engines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from adapters.base import SIDES
from tests.unit.align.cli.recorded_runs import Align, make_run
from tests.unit.align.run import recordings

# -------------------------------------------------------------------------------------------------------- compare


def test_compare_says_what_the_run_said(align: Align, clean: Path, faulty: Path) -> None:
    code, text, err = align("compare", str(clean / "candidate"), str(clean / "reference"))
    assert (code, err) == (0, "")
    assert (
        "aligned: lmdeploy and vllm generate the same 4 greedy tokens for 2 requests, and every tensor is equal" in text
    )
    code, text, _ = align("compare", str(faulty / "candidate"), str(faulty / "reference"))
    assert code == 1
    assert "diverged: Path B" in text
    assert "layers.1.mlp.up" in text


def test_compare_writes_what_it_found(align: Align, faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "found.json"
    sides = [str(faulty / role) for role in SIDES]
    code, text, _ = align("compare", *sides, "--out", str(file), "--quiet")
    assert code == 1
    assert len(text.splitlines()) == 1
    found = json.loads(file.read_text())
    assert found["findings"][0]["checkpoint"] == "layers.1.mlp.up"
    assert found["environment"]["traces"] == dict(zip(SIDES, sides, strict=True))
    assert found["details"]["tensors"]["first_divergence"]["name"] == "layers.1.mlp.up"


def test_swapped_sides_are_a_warning_before_the_verdict(align: Align, clean: Path) -> None:
    given = ("compare", str(clean / "reference"), str(clean / "candidate"))
    code, text, err = align(*given)
    assert (code, err) == (0, "")
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("warning: the sides are swapped: "))
    assert lines[at].endswith(f"align compare {clean / 'candidate'} {clean / 'reference'}")
    assert any(line.startswith("aligned: vllm and lmdeploy ") for line in lines[at + 1 : at + 3])
    code, text, err = align(*given, "--quiet")
    assert (code, len(text.splitlines())) == (0, 1)
    assert err == f"{lines[at]}\n"


def test_compare_refuses_with_a_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    sides = [str(clean / role) for role in SIDES]
    file = tmp_path / "found.json"
    for arguments, words in (
        (["compare", str(clean), sides[1]], "is a whole run"),
        (["compare", sides[0], str(tmp_path / "nowhere")], "does not exist"),
        (["compare", *sides, "--policy", "mine"], "--policy mine is not known"),
        (["compare", *sides, "--allow", "luck"], "no condition is called luck"),
        (["compare", *sides, "--out", str(clean / "candidate" / "trace" / "trace.json" / "x")], "cannot be written"),
    ):
        code, _, err = align(*arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
        assert "Traceback" not in err
    content = json.loads((clean / "candidate" / "trace" / "trace.json").read_text())
    content["requests"].pop()
    (clean / "candidate" / "trace" / "trace.json").write_text(json.dumps(content))
    assert align("compare", *sides, "--out", str(file))[0] == 2
    found = json.loads(file.read_text())
    assert found["verdict"] == "not comparable"
    assert "different prompts" in found["reason"]


def test_compare_demands_coverage(align: Align, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.attn.q_rope"]

    run = make_run(tmp_path / "run", monkeypatch, without, min_coverage=0.0)
    sides = [str(run / role) for role in SIDES]
    file = tmp_path / "found.json"
    code, _, err = align("compare", *sides, "--out", str(file))
    assert code == 2
    assert "97.5 % of 40" in err
    assert "layers.0.attn.q_rope (not recorded by the candidate)" in err
    assert "--min-coverage 97.5" in err
    found = json.loads(file.read_text())
    assert (found["verdict"], found["coverage"]["demanded"], found["findings"]) == ("not comparable", 100.0, [])
    code, text, _ = align("compare", *sides, "--out", str(file), "--min-coverage", "97.5")
    assert code == 0
    assert "every tensor that was compared is equal" in text
    assert json.loads(file.read_text())["coverage"]["demanded"] == 97.5
    for wrong in ("101", "-1", "nan"):
        code, _, err = align("compare", *sides, "--min-coverage", wrong)
        assert code == 2
        assert f"--min-coverage {wrong} is no percentage" in err
        assert "next: " in err


def test_what_hand_written_files_leave_open_is_said(align: Align, tmp_path: Path) -> None:
    right = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for side, factor in (("a", 1.0), ("b", 1.01), ("same", 1.0)):
        (tmp_path / side).mkdir()
        torch.save(right * factor, tmp_path / side / "layer1_attn_out_rank0.pt")
    code, text, _ = align("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q")
    assert code == 0
    assert "operators could not be judged: no inputs or weights" in text
    assert "--policy seed judges by 1e-3" in text
    assert align("compare", str(tmp_path / "a"), str(tmp_path / "b"), "-q", "--policy", "seed")[0] == 1
    code, text, _ = align("compare", str(tmp_path / "a"), str(tmp_path / "same"))
    assert code == 0
    assert "could not be judged" not in text, "the same bits leave nothing open"
    assert "OpenCompass" not in text
    assert "next: record both engines" in text
    torch.save({}, tmp_path / "same" / "layer1_mlp_down_rank0.pt")
    code, text, err = align("compare", str(tmp_path / "a"), str(tmp_path / "same"), "-q", "--min-coverage", "0")
    assert (code, text) == (2, "")
    assert "layer1_mlp_down_rank0.pt holds a dict" in err


def test_export_into_a_full_directory_has_one_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    _, _, err = align("export", str(clean / "candidate"), "--out", str(tmp_path))
    assert err.splitlines()[-1] == "next: choose another --out"


# --------------------------------------------------------------------------------------------------- export, taps


def test_export_and_compare_the_files(align: Align, clean: Path, tmp_path: Path) -> None:
    for role in SIDES:
        code, text, err = align("export", str(clean / role), "--format", "pt", "--out", str(tmp_path / role))
        assert (code, err) == (0, "")
        assert "canonical shapes" in text
        assert "next: align compare" in text
    assert (tmp_path / "candidate" / "step00000" / "layer1_mlp_up_output_rank0.pt").is_file()
    code, text, _ = align("compare", str(tmp_path / "candidate"), str(tmp_path / "reference"))
    assert code == 0
    assert "aligned" in text


def test_export_refuses_with_a_remedy(align: Align, clean: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("mine")
    trace = str(clean / "candidate")
    for arguments, words in (
        ([trace, "--format", "npz", "--out", str(tmp_path / "o")], "--format npz is not known"),
        ([trace, "--out", str(tmp_path / "full")], "is not empty"),
        ([str(tmp_path / "nowhere"), "--out", str(tmp_path / "o")], "does not exist"),
        ([trace, "--out", str(tmp_path / "full" / "kept" / "below")], "cannot be written"),
    ):
        code, _, err = align("export", *arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("which", ["clean", "faulty"])
def test_native_shapes_are_compared_as_canonical_ones(
    align: Align, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(which)
    found = []
    for native in ([], ["--native"]):
        directories = [str(tmp_path / f"{role}{len(native)}") for role in SIDES]
        for role, directory in zip(SIDES, directories, strict=True):
            code, text, _ = align("export", str(run / role), "--out", directory, *native)
            assert code == 0
            assert (f"shapes as {recordings.ENGINES[role]} has them" if native else "canonical shapes") in text
            assert ("canonical shapes: attn.kv_start_indices: its transform has no inverse" in text) == bool(native)
        file = tmp_path / f"found{len(native)}.json"
        assert align("compare", *directories, "--out", str(file))[0] == (1 if which == "faulty" else 0)
        content = json.loads(file.read_text())
        del content["command"], content["timing"], content["environment"]
        found.append(content)
    assert found[0] == found[1]
    assert bool(found[1]["findings"]) == (which == "faulty")
    q = tmp_path / "candidate1" / "step00000" / "layer0_attn_qkv_output_rank0.pt"
    assert torch.load(q, weights_only=True).shape == (1, 5, (4 + 2 + 2) * 4)


def test_native_shapes_of_an_unknown_engine(align: Align, clean: Path, tmp_path: Path) -> None:
    file = clean / "candidate" / "trace" / "trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "engine": "sglang"}))
    code, _, err = align("export", str(clean / "candidate"), "--out", str(tmp_path / "o"), "--native")
    assert code == 2
    assert "the shapes of sglang are not known" in err
    assert "next: export it without --native" in err
    assert not (tmp_path / "o").exists()


def test_taps_are_printed(align: Align) -> None:
    code, text, _ = align("taps", "lmdeploy")
    assert code == 0
    assert "\t" not in text
    header, *rows = [re.split(" {2,}", line) for line in text.splitlines()]
    assert header == ["checkpoint", "where", "pick", "transform", "inverse", "when"]
    assert any(row[0] == "attn.out" and "dlinfer" in row[1] for row in rows)
    code, _, err = align("taps", "sglang")
    assert code == 2
    assert "align taps lmdeploy" in err
