"""Path C: what is wrong with the communication is named with its kind, side, place and ranks, on either engine.

Most of it is ``make extended``. With one rank the same patches do nothing, and what is wrong with one rank too is not
path C.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from tests.integration.faults import patch
from tests.integration.parallel_faults import PARALLEL_FAULTS, parallel_patch
from tests.integration.support import ENGINES, run_align

pytestmark = pytest.mark.timeout(600)
#: One of reduces, one of shards, one of what rank 1 alone does.
_USUAL = (("missing", "candidate"), ("head_map", "reference"), ("stale", "candidate"))
TP2 = ("--model", "qwen3", "--tp", "2", "--max-new-tokens", "6", "--no-confirm", "--no-ladder")


def run(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    out = directory / "run"
    done = run_align("run", "--quiet", "--out", str(out), *arguments, timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def cases() -> list[Any]:
    return [
        pytest.param(name, side, marks=() if (name, side) in _USUAL else pytest.mark.extended)
        for name, fault in PARALLEL_FAULTS.items()
        for side in SIDES
        if ENGINES[side] in fault.engines
    ]


@pytest.mark.parametrize(("name", "side"), cases())
def test_a_fault_of_communication_is_named(name: str, side: str, tmp_path: Path) -> None:
    fault = PARALLEL_FAULTS[name]
    code, result, output = run(tmp_path, *TP2, "--patch", f"{side}={parallel_patch(name, tmp_path)}")
    assert code == 1, output
    first, *others = result["findings"]
    assert (first["path"], first["kind"], first["side"]) == ("C", fault.kind, side), first["summary"]
    assert (first["checkpoint"], tuple(first["ranks"])) == (fault.checkpoint, fault.ranks), first["summary"]
    assert fault.phase is None or first["phase"] == fault.phase
    found = first["evidence"]
    for key, expected in fault.numbers.items():
        assert found[key] == (pytest.approx(expected, rel=0.02) if isinstance(expected, float) else expected), key
    assert not [one for one in others if one["path"] == "C"], "one fault is one finding"


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
def test_copies_of_key_heads_on_wrong_ranks_are_named(side: str, tmp_path: Path) -> None:
    """F22: four ranks and two key/value heads. Rank r takes head r % 2 instead of r // 2: ranks 1 and 2 are wrong."""
    given = ("--model", "qwen3", "--tp", "4", "--max-new-tokens", "4", "--no-confirm", "--no-ladder")
    code, result, output = run(tmp_path, *given, "--patch", f"{side}={parallel_patch('head_map', tmp_path)}")
    assert code == 1, output
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["side"]) == ("C", "head_map", side), first["summary"]
    assert (first["checkpoint"], first["ranks"]) == ("layers.0.attn.k", [1, 2]), first["summary"]


@pytest.mark.extended
def test_with_one_rank_the_same_patches_do_nothing(tmp_path: Path) -> None:
    given = [word for name in PARALLEL_FAULTS for side in SIDES for word in _patched(name, side, tmp_path)]
    code, result, output = run(tmp_path, "--model", "qwen3", "--max-new-tokens", "6", *given)
    assert (code, result["findings"]) == (0, []), output


def _patched(name: str, side: str, directory: Path) -> tuple[str, str]:
    return "--patch", f"{side}={parallel_patch(name, directory)}"


@pytest.mark.extended
@pytest.mark.parametrize("numerics", ["native", "fp32-internal"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-mqa"])
def test_right_ranks_are_silent(model: str, numerics: str, tmp_path: Path) -> None:
    """N1; with one key/value head every rank holds a copy of it, and the vocabulary is padded."""
    given = [word for side in SIDES for word in ("--numerics", f"{side}={numerics}")]
    code, result, output = run(tmp_path, "--model", model, "--tp", "2", *given)
    assert (code, result["verdict"], result["findings"]) == (0, "aligned", []), output
    for side in SIDES:
        audit = result["collectives"][side]
        assert audit["observable"] and not audit["faults"] and not any(row["unseen"] for row in audit["rows"]), audit
        # Each of 4 layers reduces twice in every forward.
        assert sum(row["right"] for row in audit["rows"] if row["operation"] == "all_reduce") >= 8


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
def test_what_is_wrong_with_one_rank_too_is_not_path_c(side: str, tmp_path: Path) -> None:
    code, result, output = run(tmp_path, *TP2, "--patch", f"{side}={patch('norm', tmp_path)}")
    assert code == 1, output
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["checkpoint"]) == ("B", "operator", "layers.2.mlp_norm")
    assert first["ranks"] == [0, 1] and not [one for one in result["findings"] if one["path"] == "C"]
