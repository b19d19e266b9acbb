"""The checkpoints of the presets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from align.doctor.types import Check, Machine, Needs


def examine(machine: Machine, needs: Needs) -> Iterator[Check]:
    """One answer for each preset."""
    from align.models.presets import PRESETS

    for preset in PRESETS.values():
        yield model(preset.name, machine.home / "models" / preset.path.name)


def model(name: str, path: Path) -> Check:
    """Args: directory of a preset's checkpoint, which appears in one step when it is whole."""
    title = f"model {name}"
    if not path.exists():
        return Check(title, "ok", "made on first use")
    config, weights = path / "config.json", sorted(path.glob("*.safetensors"))
    empty = [file.name for file in (config, *weights) if not file.is_file() or file.stat().st_size == 0]
    if empty or not weights:
        found = f"damaged: {', '.join(empty) or '*.safetensors'} is not there or empty in {path}"
        return Check(title, "missing", found, f"rm -r {shlex.quote(str(path))}  # it is made again")
    return Check(title, "ok", path.name)
