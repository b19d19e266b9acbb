"""What must be known about a checkpoint before anything runs: sizes, ids, and whether its files are whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.errors import UserError

#: The longest safetensors header that is believed, in bytes (the format's own limit).
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelInfo:
    """A checkpoint on this machine.

    Attributes:
        name: preset name, or the directory's name.
        path: directory that holds config.json and safetensors.
        preset: whether this project built it.
        config: parsed config.json.
        vocab_size: valid token ids are ``0 … vocab_size - 1``.
        max_positions: longest sequence (prompt and generated), in tokens.
        heads, kv_heads, head_dim, layers, hidden, intermediate: sizes of the decoder.
        bos_id: id that opens a sequence; ``None`` when the configuration names none.
        eos_ids: ids that end a generation, from generation_config.json or else config.json.
        fingerprint: 16 hex digits over the files' names and sizes and config.json's content.
    """

    name: str
    path: Path
    preset: bool
    config: Mapping[str, Any]
    vocab_size: int
    max_positions: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    hidden: int
    intermediate: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    fingerprint: str


def read_info(path: Path, *, name: str | None = None, preset: bool = False) -> ModelInfo:
    """Read a checkpoint directory and check that its files are whole; weights are not loaded.

    Raises:
        UserError: no such directory, no or broken config.json, weights missing, half written or in another
            format.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise UserError(f"model directory {path} {what}", "give the directory that holds config.json and *.safetensors")
    config = _read_json(path / "config.json", required=True)
    check_weights(path)
    generation = _read_json(path / "generation_config.json", required=False)
    size = _Sizes(config, path / "config.json")
    heads = size("num_attention_heads")
    hidden = size("hidden_size")
    return ModelInfo(
        name=name or path.name,
        path=path,
        preset=preset,
        config=config,
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")),
        fingerprint=_fingerprint(path),
    )


class _Sizes:
    """Positive integers of a configuration; a wrong one is the user's to repair."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self.config = config
        self.file = file

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"{self.file} has {key} = {value!r}, not a positive integer",
                "use a decoder-only language model with its sizes at the top level of config.json",
            )
        return value


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else ()


def _read_json(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise UserError(
            f"{file} is missing", "give a Hugging Face checkpoint directory (config.json beside the weights)"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}", "check the file's permissions") from error
    except ValueError as error:  # both broken JSON and bytes that are not UTF-8
        raise UserError(f"{file} is not JSON: {error}", "download the file again or repair it") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{file} holds a JSON {type(parsed).__name__}, not an object", "download the file again")
    return parsed


def check_weights(path: Path) -> tuple[Path, ...]:
    """Return the checkpoint's safetensors files after checking that each is there and as long as its header
    says.

    Raises:
        UserError: names the missing or cut file.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map", "download the file again")
        files = tuple(path / str(shard) for shard in sorted(set(map(str, weight_map.values()))))
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
            raise UserError(f"{index} refers to absent weights: {shown}", f"download the missing files into {path}")
    else:
        files = tuple(sorted(path.glob("*.safetensors")))
        if not files:
            other = sorted(file.name for suffix in ("*.bin", "*.gguf", "*.pth") for file in path.glob(suffix))
            seen = f" (only {', '.join(other[:3])})" if other else ""
            raise UserError(f"{path} holds no *.safetensors{seen}", "convert or download the weights as safetensors")
    for file in files:
        _check_length(file)
    return files


def _check_length(file: Path) -> None:
    """Compare a safetensors file's length with the one that its header announces."""
    hint = "the download or copy was cut: fetch the file again"
    actual = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or length > min(MAX_HEADER_BYTES, actual - 8):
            raise UserError(f"{file} is not a whole safetensors file ({actual} bytes)", hint)
        try:
            header = json.loads(stream.read(length))
            data = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise UserError(f"{file} has a broken safetensors header", hint) from error
    if actual != 8 + length + data:
        raise UserError(f"{file} has {actual} bytes, its header says {8 + length + data}", hint)


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    for entry in sorted(os.scandir(path), key=lambda item: item.name):
        if entry.is_file() and not entry.name.startswith("."):
            digest.update(f"{entry.name}\0{entry.stat().st_size}\n".encode())
    digest.update((path / "config.json").read_bytes())
    return digest.hexdigest()[:16]
