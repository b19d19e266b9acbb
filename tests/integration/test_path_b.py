"""Path B: the operator that is wrong is named with its side, its channels and the kind of fault, on either side.

Most of it is ``make extended``. Rows of a projection as in the field's own example: 8 of 256, which comparisons of
whole tensors do not see.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.base import SIDES, Request
from align.case.schema import parse_case
from align.checkpoints.table import structure_of
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.run.recording import estimated_bytes
from tests.integration.faults import EIGHT, patch
from tests.integration.support import run_align

pytestmark = pytest.mark.timeout(600)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}


def diverged(directory: Path, fault: str, side: str, *arguments: str) -> dict[str, Any]:
    out = directory / "run"
    given = ("--quiet", "--patch", f"{side}={patch(fault, directory)}", "--out", str(out), *arguments)
    done = run_align("run", *given, timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    first = result["transplants"][0]
    # One row of 576 that is 2 % too large moves the next block's input by 1e-5 of itself, less than rounding does.
    accepted = ("confirmed", "not measurable") if fault.endswith("row_2_17") else ("confirmed",)
    assert first["side"] == side and first["verdict"] in accepted, first["summary"]
    return result


def variant(directory: Path, **changes: Any) -> Path:
    """The tiny model with another configuration."""
    info = resolve_model("qwen3")
    model = directory / "model"
    shutil.copytree(info.path, model)
    (model / "config.json").write_text(json.dumps({**info.config, **changes}))
    return model


def kept_bytes(run: Path, side: str) -> int:
    """All that one side's workers recorded, in both looks."""
    return sum(file.stat().st_size for look in ("trace", "closer") for file in (run / side / look).glob("rank*/*"))


def whole_bytes(run: Path, info: ModelInfo) -> int:
    """Values of every checkpoint of the same run, and nothing else."""
    case = parse_case((run / "case.json").read_text())
    requests = [Request(one.name, one.token_ids, case.new_tokens(one)) for one in case.requests]
    return estimated_bytes(structure_of(info.config), requests)


def cases(*usual: tuple[str, str], faults: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(fault, side, marks=() if (fault, side) in usual else pytest.mark.extended)
        for fault in faults
        for side in SIDES
    ]


# ------------------------------------------------------------------------------------------------- rows of a projection

#: Each fault in both models, on the one side here and on the other there.
ROWS = ("eight_rows", "row_5", "row_2", "eight_weight_rows", "weight_row_5", "weight_row_2")
PLACES = [
    pytest.param(f"{fault}{layer}", side, marks=() if (fault, layer) == ("row_2", "") else pytest.mark.extended)
    for at, fault in enumerate(ROWS)
    for layer, side in (("", SIDES[at % 2]), ("_17", SIDES[1 - at % 2]))
]


@pytest.mark.parametrize(("fault", "side"), PLACES)
def test_rows_of_a_projection_are_named_from_two_percent_of_the_bytes(fault: str, side: str, tmp_path: Path) -> None:
    model, layer = ("smollm2", 17) if fault.endswith("_17") else ("qwen3", 2)
    result = diverged(tmp_path, fault, side, "--model", model, "--lean")
    first = result["findings"][0]
    name = f"layers.{layer}.mlp.down"
    assert (first["path"], first["side"], first["checkpoint"]) == ("B", side, name)
    assert first["kind"] == ("weights" if "weight" in fault else "operator")
    channels = EIGHT if fault.startswith("eight") else [41]
    diagnosis = result["diagnosis"]
    assert diagnosis["side"] == side
    assert sorted(diagnosis["channels"]) == channels
    fit = diagnosis["fits"][0]
    assert (fit["kind"], fit["explains"]) == ("factor_channels", True)
    if "weight" in fault:
        assert first["evidence"]["rows"] == channels
    # Two recordings of each side, without a new launch, and two percent of what all values take.
    run = tmp_path / "run"
    stages = [one["stage"] for one in result["walk"]]
    assert (stages.count("launch"), stages.count("record"), stages.count("record alone")) == (1, 1, 1)
    assert "record again" not in stages
    whole = whole_bytes(run, resolve_model(model))
    for role in SIDES:
        assert kept_bytes(run, role) <= 0.02 * whole, f"{role}: {kept_bytes(run, role)} of {whole}"


# ------------------------------------------------------------------------------------------------------- the catalogue


@pytest.mark.parametrize(("fault", "side"), cases(faults=("rope_precision",)))
def test_angles_in_low_precision_are_named(fault: str, side: str, tmp_path: Path) -> None:
    """F10: it grows with the position, so one prompt has 2,000 tokens."""
    chance = random.Random(5)
    prompts = [
        {"name": "long", "token_ids": [chance.randrange(3, 990) for _ in range(2000)], "max_new_tokens": 4},
        {"name": "short", "token_ids": [chance.randrange(3, 990) for _ in range(9)], "max_new_tokens": 4},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    result = diverged(tmp_path, fault, side, "--prompts", str(file))
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["side"]) == ("B", "operator", side)
    assert first["checkpoint"] == "layers.0.attn.q_rope"
    assert first["requests"] == ["long"]
    assert result["diagnosis"]["fault"] == "rope_precision"


@pytest.mark.parametrize(("fault", "side"), cases(("rope_scaling", "candidate"), faults=("rope_scaling",)))
def test_an_ignored_rope_scaling_is_named(fault: str, side: str, tmp_path: Path) -> None:
    """F11."""
    result = diverged(tmp_path, fault, side, "--model", str(variant(tmp_path, rope_scaling=YARN)))
    first = result["findings"][0]
    assert (first["kind"], first["side"], first["checkpoint"]) == ("operator", side, "layers.0.attn.q_rope")
    assert result["diagnosis"]["fault"] == "rope_scaling"
    (told,) = [one for one in result["findings"] if one["kind"] == "configuration"]
    assert told["side"] == side
    assert "rope_frequencies" in told["evidence"]["what"]


@pytest.mark.parametrize(("fault", "side"), cases(faults=("eps",)))
def test_a_wrong_epsilon_is_named(fault: str, side: str, tmp_path: Path) -> None:
    """F13: with embeddings of rms 0.02 an epsilon of 1e-5 instead of 1e-6 is some percent."""
    model = variant(tmp_path)
    tensors = load_file(model / "model.safetensors")
    key = "model.embed_tokens.weight"
    tensors[key] = (tensors[key].float() * 0.02).to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    result = diverged(tmp_path, fault, side, "--model", str(model))
    first = result["findings"][0]
    assert (first["kind"], first["side"], first["checkpoint"]) == ("operator", side, "layers.0.attn_norm")
    assert result["diagnosis"]["fault"] == "eps"


@pytest.mark.parametrize(("fault", "side"), cases(faults=("qk",)))
def test_exchanged_norms_of_query_and_key_are_named(fault: str, side: str, tmp_path: Path) -> None:
    """F14."""
    result = diverged(tmp_path, fault, side)
    found = [(one["kind"], one["side"], one["checkpoint"]) for one in result["findings"][:2]]
    assert found == [("weights", side, f"layers.1.attn.{one}_norm") for one in "qk"]
    # Which rows are whose is known exactly: the one holds what the other should.
    held = [one["evidence"]["holds"] for one in result["findings"][:2]]
    assert held == [f"model.layers.1.self_attn.{one}_norm.weight" for one in "kq"]


@pytest.mark.parametrize(("fault", "side"), cases(faults=("swap",)))
def test_exchanged_projections_are_named(fault: str, side: str, tmp_path: Path) -> None:
    """F15."""
    result = diverged(tmp_path, fault, side)
    found = [(one["kind"], one["side"], one["checkpoint"]) for one in result["findings"][:2]]
    assert found == [("weights", side, f"layers.1.mlp.{one}") for one in ("gate", "up")]
    assert result["diagnosis"]["fault"] == "exchanged"


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
def test_a_wrong_accusation_is_refuted(side: str, tmp_path: Path) -> None:
    """The fault is in layer 2's norm; whoever accuses layer 1 is told no."""
    result = diverged(tmp_path, "norm", side, "--confirm", f"{side}:layers.1.mlp.up")
    outcomes = {one["checkpoint"]: one["verdict"] for one in result["transplants"]}
    assert outcomes == {"layers.2.mlp_norm": "confirmed", "layers.1.mlp.up": "refuted"}


_FIX = '''"""A fix.

File: norm.py
Change: the factor is taken out
Reason: nothing asked for it
"""


def apply(ctx):
    pass


def after_load(ctx):
    norm = ctx.model.model.layers[2].post_attention_layernorm
    getattr(norm, "impl", norm).is_wrong = False
'''


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
def test_a_paired_run_shows_that_a_fix_mends_it(side: str, tmp_path: Path) -> None:
    diverged(tmp_path, "norm", side)
    (tmp_path / "fix.py").write_text(_FIX)
    given = ("--patch", f"{side}={tmp_path / 'fix.py'}", "--out", str(tmp_path / "fixed"), "--quiet")
    done = run_align("replay", str(tmp_path / "run"), *given, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "fixed" / "result.json").read_text())
    assert (result["verdict"], result["findings"]) == ("aligned", [])
    assert ("norm.py", "the factor is taken out") in [(one["file"], one["change"]) for one in result["measures"]]
    paired = result["paired"]
    assert (paired["earlier"], paired["verdict"], paired["outcome"]) == ("run", "diverged", "mended")
    assert (paired["changes"], paired["confounded"], paired["conclusive"]) == (1, [], True)
    assert paired["headline"]["checkpoint"] == "layers.2.mlp_norm" and paired["gone"][0] == paired["headline"]
