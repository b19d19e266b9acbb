"""Models: presets that are built on demand, and local checkpoints."""

from align.models.info import ModelInfo, read_info
from align.models.presets import PRESETS, Preset
from align.models.resolve import resolve_model

__all__ = ["PRESETS", "ModelInfo", "Preset", "read_info", "resolve_model"]
