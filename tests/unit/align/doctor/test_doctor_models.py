"""The presets' checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.doctor.models import examine, model
from align.doctor.types import Needs
from align.models.presets import PRESETS
from tests.unit.align.doctor.fakes import machine


def test_presets_that_are_not_made_yet_are_fine(tmp_path: Path) -> None:
    found = list(examine(machine(tmp_path), Needs()))
    assert [(check.name, check.state, check.found) for check in found] == [
        (f"model {name}", "ok", "made on first use") for name in PRESETS
    ]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "models" / PRESETS["qwen3"].path.name
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("weights")
    return path


def test_a_preset_that_is_made(tmp_path: Path, made: Path) -> None:
    assert next(examine(machine(tmp_path), Needs())).found == made.name


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "empty"])
def test_a_damaged_one_is_made_again_once_it_is_removed(made: Path, damage: str) -> None:
    if damage == "empty":
        (made / "model.safetensors").write_text("")
    else:
        (made / damage).unlink()
    found = model("qwen3", made)
    assert (found.state, found.mend.startswith(f"rm -r {made}  #")) == ("missing", True)
