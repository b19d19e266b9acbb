"""A checkpoint of a model's first layers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from align.models.files import write_json
from align.models.info import check_weights

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_INDEX = "model.safetensors.index.json"
#: Settings of config.json with one entry per layer.
_PER_LAYER = ("layer_types",)


def cut_layers(model: Path, layers: int, out: Path) -> Path:
    """Copy a checkpoint with its first layers alone; everything that is not of a layer stays.

    Args:
        layers: how many stay, at least 1.

    Returns:
        ``out``, a Hugging Face checkpoint of one safetensors file.

    Raises:
        UserError: the checkpoint's files are missing, cut or broken.
        OSError: ``out`` cannot be written.
    """
    assert layers >= 1, layers
    weights = check_weights(model)
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (_INDEX, "config.json"):
            shutil.copyfile(file, out / file.name)
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    for name in _PER_LAYER:
        if isinstance(config.get(name), list):
            config[name] = config[name][:layers]
    write_json(out / "config.json", config)
    kept = {}
    for file in weights:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                found = _LAYER.search(name)
                if found is None or int(found[1]) < layers:
                    kept[name] = opened.get_tensor(name)
    save_file(kept, out / "model.safetensors", {"format": "pt"})
    return out


def weight_bytes(model: Path) -> int:
    """Bytes of a checkpoint's safetensors files.

    Raises:
        UserError: they are missing, cut or broken.
    """
    return sum(file.stat().st_size for file in check_weights(model))
