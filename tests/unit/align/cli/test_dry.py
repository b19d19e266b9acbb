"""``align run --dry-run``: nothing is started, and the costs are those of the model's shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from align.case.schema import Case, CaseRequest
from align.checkpoints.table import structure_of
from align.cli.dry import costs_of
from align.run.flow import Wishes
from tests.unit.align.cli import test_run
from tests.unit.align.cli.test_run import FakeSession
from tests.unit.align.run import fakes

align, checkpoint = test_run.align, test_run.checkpoint
#: The configuration that Meta published for Llama 3 8B.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_it_says_what_it_takes(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    code, text, err = align("--model", str(checkpoint), "--dry-run", "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert "oracle, every checkpoint" in text and "capture" in text
    assert "nothing was started" in text
    assert re.search(r"in all about 2\d s, and [23]\d s where something is wrong: launching .* about 20 s of it", text)
    lean = align("--model", str(checkpoint), "--dry-run", "--lean")[1]
    assert "capture, no values" in lean and "nothing " not in lean.replace("nothing was started", "")
    assert not (tmp_path / "out").exists()
    assert FakeSession.made == []


def test_it_refuses_what_a_run_refuses(align: Callable[..., Any], checkpoint: Path) -> None:
    code, _, err = align("--model", str(checkpoint), "--dry-run", "--tp", "3")
    assert code == 2
    assert "tp must divide" in err


def test_an_8b_model() -> None:
    """2,048 prompt tokens and 16 new ones: values of all checkpoints would be gigabytes, so one layer is kept."""
    case = Case(model="x", requests=(CaseRequest(name="r0", token_ids=tuple([1] * 2048)),))
    structure = structure_of(LLAMA_8B, 1)
    whole, closer, layer, oracle = costs_of(case, fakes.info(), structure, Wishes())
    rows, residual = 2064, 2 * 4096  # rows of the case; bytes of one row of the residual stream
    assert "layers.0.*" in whole.what, "all values exceed the budget"
    assert whole.record_bytes < 0.1 * 32 * 20 * rows * residual
    assert closer.record_bytes > 10 * rows * residual, "values of one layer: q, k, v, norms, mlp …"
    weights = 2 * sum((4096 * 4096 * 2 + 2 * 4096 * 1024, 3 * 4096 * 14336, 2 * 4096))
    assert layer.weight_bytes == weights
    assert 32 * weights < oracle.weight_bytes < 33 * weights + 2 * 2 * 4096 * 128256
    assert oracle.memory < 8e9
    assert oracle.seconds > layer.seconds > 0
