"""``align golden`` on recordings of a tiny model, without engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from align.golden import flow, size
from align.golden.record import Followed, load_model, record
from align.models.info import ModelInfo
from align.trace.format import MANIFEST
from tests.unit.align.cli.recorded_runs import Align
from tests.unit.align.golden import tiny

SEQUENCES = (Followed("r0", (5, 9, 2), (7, 9)), Followed("r1", (3, 60, 11, 2, 8), (1, 4)))
Edit = Callable[[Any], None]


def write_side(info: ModelInfo, directory: Path, dtype: torch.dtype, edit: Edit = lambda model: None) -> None:
    """The model in a dtype as a side's trace: what an engine that computes as transformers would have left."""
    model = load_model(info).to(dtype)
    edit(model)
    record(model, info, SEQUENCES, directory / "trace").close()
    file = directory / "trace" / MANIFEST
    content = json.loads(file.read_text())
    content |= {"dtype": str(dtype).removeprefix("torch."), "engine": directory.name, "side": directory.name}
    content["generations"] = {
        "replay": [
            {"request": one.name, "steps": [{"chosen": at, "greedy": at, "top": []} for at in one.generated]}
            for one in SEQUENCES
        ]
    }
    content["model_info"] = {**asdict(info), "path": str(info.path), "config": None}
    file.write_text(json.dumps(content))


def twice(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    info = tiny.build(tmp_path / "model", "Qwen3")

    def make(wrong: str | None = None) -> Path:
        for side in SIDES:
            write_side(info, tmp_path / "run" / side, torch.bfloat16, twice if side == wrong else lambda model: None)
        return tmp_path / "run"

    return make


def test_clean_sides_are_alike(align: Align, run: Callable[..., Path]) -> None:
    place = run()
    code, text, _ = align("golden", str(place))
    assert code == 0, text
    assert "are alike far from golden at 42 of 44 checkpoints; 2 are not observable" in text
    assert "14 rows of both sides (bfloat16)" not in text and "12 rows of both sides (bfloat16)" in text
    with closing(flow.golden_trace(place)) as golden:
        assert golden.manifest["engine"] == "transformers" and golden.dtype == "float32"
    assert "as recorded before" in align("golden", str(place))[1]


@pytest.mark.parametrize("wrong", SIDES)
def test_the_further_side_is_named(align: Align, run: Callable[..., Path], wrong: str) -> None:
    place = run(wrong)
    code, text, _ = align("golden", str(place), "--json", "--quiet")
    assert code == 1
    found = json.loads(text)
    assert found["first"] == "layers.1.mlp.up"
    (first,) = [one for one in found["checkpoints"] if one["name"] == "layers.1.mlp.up"]
    assert first["verdict"] == f"{wrong} further"
    assert first[wrong]["rel_l2"] == pytest.approx(1, rel=0.02)
    code, text, _ = align("golden", str(place), "--quiet")
    assert text.startswith(f"first departure from golden: layers.1.mlp.up: {wrong} further: the {wrong} is ")
    assert "layers.1.mlp.up" in align("golden", str(place), "--verbose")[1]


def without_values(side: Path) -> Callable[[], None]:
    """Take the values out of a trace; the answer puts them back."""
    from safetensors.torch import load_file, save_file

    files = {file: file.read_bytes() for file in (side / "trace" / "rank0").glob("*.safetensors")}
    for file in files:
        save_file({key: one for key, one in load_file(file).items() if key in ("token_ids", "positions")}, file)

    def back() -> None:
        for file, content in files.items():
            file.write_bytes(content)

    return back


def test_refusals(align: Align, run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = run()
    monkeypatch.setattr(size, "available_bytes", lambda: 1000)
    code, text, err = align("golden", str(place), "--json")
    assert code == 2 and "1000" not in err and "0.00 GB of memory are available" in err
    assert json.loads(text)["exit"] == 2
    monkeypatch.undo()
    keep = without_values(place / "candidate")
    code, _, err = align("golden", str(place))
    assert code == 2 and "nothing in" in err and "the candidate's values were not kept" in err and "--capture" in err
    keep()
    code, _, err = align("golden", str(tmp_path / "nowhere"))
    assert code == 2 and "is no directory" in err
    code, _, err = align("golden", str(tmp_path / "model"))
    assert code == 2 and "has no recording of its candidate" in err
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 11}')
    code, _, err = align("golden", str(place))
    assert code == 2 and "is not what it was when" in err
