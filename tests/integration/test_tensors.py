"""Tensors of both real engines: clean pairs are silent with whole coverage, faults are named with side and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from align.models.resolve import resolve_model
from align.trace.reader import Trace
from tests.integration.faults import patch
from tests.integration.support import run_align

#: Checkpoints without an operator that is recomputed, and those of which each rank holds a part of the weight's rows.
UNJUDGED, SPLIT = {"attn.kv_start_indices"}, {"embed", "logits"}
NATIVE = {side: ("--numerics", f"{side}=native") for side in SIDES}


def run(out: Path, *arguments: str, code: int, timeout: float = 280.0) -> dict[str, Any]:
    """A joint run's record, after a look at its exit code."""
    done = run_align("run", *arguments, "--out", str(out), timeout=timeout)
    assert done.returncode == code, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((out / "run.json").read_text())
    return record


def everything_was_compared(record: dict[str, Any]) -> None:
    coverage = record["tensors"]["coverage"]
    for part in (coverage["candidate"], coverage["reference"], coverage["paired"]):
        assert part["percent"] == 100, part
    assert all(one["verdict"] in ("equal", "within") for one in record["tensors"]["checkpoints"])
    assert {one["verdict"] for one in record["conditions"] if one["required"]} == {"ok"}
    for one in record["tensors"]["checkpoints"]:
        added = {side: about["verdict"] for side, about in one["added"].items()}
        if one["kind"] in UNJUDGED | (SPLIT if record["case"]["layout"]["tp"] > 1 else set()):
            continue
        assert added == dict.fromkeys(SIDES, "within"), one["name"]


@pytest.mark.parametrize("side", SIDES)
def test_a_clean_pair_with_real_noise_is_silent(side: str, tmp_path: Path) -> None:
    record = run(tmp_path / "out", *NATIVE[side], code=0)
    assert record["findings"] == []
    everything_was_compared(record)
    assert any(one["verdict"] == "within" for one in record["tensors"]["checkpoints"]), "no noise, so nothing is shown"
    assert record["comparisons"]["replay"]["noise"] > 0


@pytest.mark.timeout(600)
def test_a_real_model_is_silent(tmp_path: Path) -> None:
    arguments = ("--model", "smollm2", "--max-new-tokens", "4", *NATIVE["candidate"])
    record = run(tmp_path / "out", *arguments, code=0, timeout=550.0)
    assert record["findings"] == []
    everything_was_compared(record)


def test_two_ranks_are_joined(tmp_path: Path) -> None:
    record = run(tmp_path / "out", "--tp", "2", "--max-new-tokens", "4", *NATIVE["candidate"], code=0)
    everything_was_compared(record)
    names = {one["name"] for one in record["tensors"]["checkpoints"]}
    assert "layers.3.mlp.down_partial" in names
    for side in record["sides"].values():
        observed = {entry["name"]: entry["value"] for entry in side["observed"]}
        assert observed["tp"] == 2
        assert len(side["launched"]["workers"]) >= 2
    steps = json.loads((tmp_path / "out" / "tokens.json").read_text())["free"]
    assert all({step["rank"] for step in steps[role]["steps"]} == {0, 1} for role in steps)


#: Fault → checkpoint, kind and part of the evidence that must be named.
EXPECTED = {
    "swap": ("layers.1.mlp.gate", "weights", "model.layers.1.mlp.gate_proj.weight"),
    "norm": ("layers.2.mlp_norm", "operator", "rms_norm"),
    "row": ("layers.2.mlp.down", "weights", "model.layers.2.mlp.down_proj.weight"),
}


#: The rest belongs to `make extended`.
_USUAL = {("swap", "candidate"), ("norm", "reference"), ("row", "candidate")}


@pytest.mark.parametrize(
    ("fault", "side"),
    [
        pytest.param(fault, side, marks=() if (fault, side) in _USUAL else pytest.mark.extended)
        for fault in EXPECTED
        for side in SIDES
    ],
)
def test_a_fault_is_named_with_its_side_and_place(fault: str, side: str, tmp_path: Path) -> None:
    given = ("--patch", f"{side}={patch(fault, tmp_path)}", "--max-new-tokens", "4")
    record = run(tmp_path / "out", *given, *NATIVE["candidate"], code=1)
    checkpoint, kind, evidence = EXPECTED[fault]
    first = record["findings"][0]
    assert (first["path"], first["side"], first["checkpoint"], first["kind"]) == ("B", side, checkpoint, kind)
    assert evidence in json.dumps(first["evidence"])
    assert all(one["side"] == side for one in record["findings"])
    if fault == "row":
        assert first["evidence"]["rows"] == [5]
    early = [one for one in record["tensors"]["checkpoints"] if one["name"].startswith("layers.0.")]
    assert early
    assert all(one["verdict"] in ("equal", "within") for one in early)
    if fault == "swap":
        assert record["tensors"]["first_divergence"]["name"] == "layers.1.mlp.gate"
        assert record["tensors"]["first_divergence"]["inputs_state"] in ("equal", "within")


@pytest.mark.extended
def test_lmdeploy_empties_the_padding_row(tmp_path: Path) -> None:
    """A true fault of lmdeploy 0.12.2: with untied weights the embedding of ``pad_token_id`` is set to zero."""
    info = resolve_model("qwen3")
    model = tmp_path / "padded"
    model.mkdir()
    for file in info.path.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps({**info.config, "pad_token_id": 2}))
    record = run(tmp_path / "out", "--model", str(model), "--max-new-tokens", "2", code=1)
    first = record["findings"][0]
    assert (first["kind"], first["side"], first["checkpoint"]) == ("weights", "candidate", "embed")
    assert first["evidence"]["rows"] == [2]


#: What makes a condition false → its name.
FALSE = {
    "warmup": "candidate.env.LMDEPLOY_SKIP_WARMUP=0",
    "prefix_caching": "reference.enable_prefix_caching=true",
    "dtype": "candidate.dtype=float16",
    "block_size": "candidate.block_size=64",
    "greedy": "candidate.sampling.top_k=5",
    "norm_eps": 'reference.hf_overrides={"rms_norm_eps": 0.001}',
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("warmup", "greedy", "norm_eps") else pytest.mark.extended)
        for name in FALSE
    ],
)
def test_a_false_condition_is_named(name: str, tmp_path: Path) -> None:
    done = run_align("run", "--max-new-tokens", "2", "--set", FALSE[name], "--out", str(tmp_path / "out"))
    assert done.returncode == 2, done.stdout + done.stderr
    side = FALSE[name].partition(".")[0]
    assert name in done.stderr
    assert side in done.stderr
    assert f"--allow {name}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.extended
def test_an_allowed_condition_marks_the_verdict(tmp_path: Path) -> None:
    given = ("--set", FALSE["prefix_caching"], "--allow", "prefix_caching", "--max-new-tokens", "2")
    done = run_align("run", *given, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["allowed"] == ["prefix_caching"]
    assert "prefix_caching" in done.stdout


@pytest.mark.timeout(600)
def test_captures_made_apart_give_the_same_findings(tmp_path: Path) -> None:
    fault = patch("norm", tmp_path)
    # Recordings alone make no transplant.
    given = ("--patch", f"candidate={fault}", "--max-new-tokens", "4", "--no-confirm")
    joint = run(tmp_path / "joint", *given, *NATIVE["candidate"], code=1)
    case = str(tmp_path / "joint" / "case.json")
    reference, candidate = str(tmp_path / "reference"), str(tmp_path / "candidate")
    done = run_align("capture", "vllm", "--side", "reference", "--case", case, "--out", reference)
    assert done.returncode == 0, done.stdout + done.stderr
    more = ("--side", "candidate", "--case", case, "--along", reference, "--patch", str(fault), "--out", candidate)
    done = run_align("capture", "lmdeploy", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "apart.json"
    done = run_align("compare", candidate, reference, "--out", str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    apart = json.loads(file.read_text())
    assert apart["findings"] == joint["findings"]
    assert apart["verdict"] == joint["verdict"]
    # The seeds' own form: one .pt file per operator and rank, compared again without our traces.
    for name in ("candidate", "reference"):
        done = run_align("export", str(tmp_path / name), "--format", "pt", "--out", str(tmp_path / f"{name}-pt"))
        assert done.returncode == 0, done.stdout + done.stderr
    step = tmp_path / "candidate-pt" / "step00000"
    value = torch.load(step / "layer0_attn_out_output_rank0.pt", weights_only=True)
    trace = Trace(Path(candidate))
    written = trace.tensor(0, 0, "layers.0.attn.out")
    assert written is not None
    assert torch.equal(value, written)
    done = run_align("compare", str(tmp_path / "candidate-pt"), str(tmp_path / "reference-pt"), "--policy", "seed")
    assert done.returncode == 1, "the seeds' thresholds do not pass other numerics"
    assert "layers.0.attn_norm" in done.stdout


def test_hand_written_dumps_compare(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for side in ("ours", "theirs"):
        (tmp_path / side).mkdir()
    for layer in range(2):
        for operator in ("attn_out", "mlp_out"):
            value = torch.randn(5, 8).bfloat16()
            name = f"layer{layer}_{operator}_rank0.pt"
            torch.save(value, tmp_path / "theirs" / name)
            torch.save(value * 2 if (layer, operator) == (1, "mlp_out") else value, tmp_path / "ours" / name)
    done = run_align("compare", str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "layer1_mlp_out" in done.stdout
