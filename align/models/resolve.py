"""From what the user wrote after ``MODEL=`` to a checkpoint on this machine."""

from __future__ import annotations

import difflib
from pathlib import Path

from align.errors import UserError
from align.models.cache import Say
from align.models.info import ModelInfo, read_info
from align.models.presets import PRESETS


def _silent(line: str) -> None:
    """Progress goes nowhere."""


def resolve_model(text: str, say: Say = _silent) -> ModelInfo:
    """Find a preset (built at first use) or a local Hugging Face checkpoint directory.

    A preset's name wins over a directory of that name; write ``./qwen3`` for the directory. ``qwen3_moe`` is
    ``qwen3-moe``.

    Args:
        text: preset name or path.
        say: called with one line before each long step of a build.

    Raises:
        UserError: unknown name, missing or damaged checkpoint, or a preset that cannot be built.
    """
    preset = PRESETS.get(text) or PRESETS.get(text.replace("_", "-"))
    if preset is not None:
        return read_info(preset.ensure(say), name=preset.name, preset=True)
    if not text.strip() or "\0" in text:
        raise UserError(f"{text!r} names no model", f"give one of {', '.join(PRESETS)} or a checkpoint directory")
    path = Path(text).expanduser()
    if path.exists() or "/" in text or text.startswith((".", "~")):
        return read_info(path.absolute())
    nearest = difflib.get_close_matches(text.lower(), PRESETS, n=1, cutoff=0.5)
    meant = f"did you mean {nearest[0]}? " if nearest else ""
    raise UserError(
        f"unknown model {text!r}",
        f"{meant}presets are {', '.join(PRESETS)}; anything else must be the path of a checkpoint directory",
    )
