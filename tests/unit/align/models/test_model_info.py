"""Checkpoints on disk: what is read, and every way in which they can be damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from align.errors import UserError
from align.models import PRESETS, qwen3, read_info, resolve_model
from align.models.files import PROMPTS_FILE, read_prompts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint, with one tiny tensor."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    change_json(folder / "config.json", qwen3.CONFIG)
    save_file({"a": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


def change_json(file: Path, changes: dict[str, Any]) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}))


def test_sizes_are_read(checkpoint: Path) -> None:
    info = resolve_model(str(checkpoint))
    assert (info.name, info.path, info.preset) == ("my-model", checkpoint, False)
    assert (info.vocab_size, info.max_positions, info.layers) == (1024, 4096, 4)
    assert (info.heads, info.kv_heads, info.head_dim) == (4, 2, 128)
    assert (info.hidden, info.intermediate) == (256, 512)
    assert (info.bos_id, info.eos_ids) == (0, (1,))
    assert info.config["model_type"] == "qwen3"


def test_absent_sizes_have_their_usual_meaning(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", {"head_dim": None, "num_key_value_heads": None, "bos_token_id": None})
    info = read_info(checkpoint)
    assert (info.kv_heads, info.head_dim, info.bos_id) == (4, 64, None)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (None, None, ()),
        (7, {"eos_token_id": [1, 2]}, (1, 2)),
        (7, {"do_sample": False}, (7,)),
    ],
)
def test_eos_ids(checkpoint: Path, config_eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    change_json(checkpoint / "config.json", {"eos_token_id": config_eos})
    if generation is not None:
        change_json(checkpoint / "generation_config.json", generation)
    assert read_info(checkpoint).eos_ids == expected


def test_fingerprint_follows_the_files(checkpoint: Path) -> None:
    first = read_info(checkpoint).fingerprint
    assert read_info(checkpoint).fingerprint == first and len(first) == 16
    copy = checkpoint.with_name("copy")
    shutil.copytree(checkpoint, copy)
    assert read_info(copy).fingerprint == first, "the place does not matter"
    (copy / "extra.json").write_text("{}")
    assert read_info(copy).fingerprint != first
    change_json(checkpoint / "config.json", {"rope_theta": 2000000.0})
    assert read_info(checkpoint).fingerprint != first, "same length, other content"


def test_sharded_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert read_info(checkpoint).name == "my-model"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"absent weights: model-2\.safetensors"):
        read_info(checkpoint)
    index.write_text("{}")
    with pytest.raises(UserError, match="no weight_map"):
        read_info(checkpoint)


@pytest.mark.parametrize("length", [0, 5, 8, 60, -1])
def test_cut_weights(checkpoint: Path, length: int) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:length])
    with pytest.raises(UserError) as caught:
        read_info(checkpoint)
    assert "model.safetensors" in caught.value.message and "fetch the file again" in caught.value.hint


@pytest.mark.parametrize("header", [b"[]", b"{}", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}'])
def test_broken_header(checkpoint: Path, header: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="broken safetensors header"):
        read_info(checkpoint)


def test_weights_in_another_format(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \*\.safetensors \(only pytorch_model\.bin\)"):
        read_info(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"[]", "not an object"), (b"\xff\xfe", "is not JSON"), (b"", "is not JSON")],
)
def test_broken_config(checkpoint: Path, content: bytes, message: str) -> None:
    (checkpoint / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_info(checkpoint)


@pytest.mark.parametrize("value", [None, 0, -4, "4", 4.0, True])
def test_sizes_must_be_positive_integers(checkpoint: Path, value: Any) -> None:
    change_json(checkpoint / "config.json", {"num_attention_heads": value})
    with pytest.raises(UserError, match="num_attention_heads"):
        read_info(checkpoint)


def test_missing_files(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing"):
        read_info(checkpoint)
    with pytest.raises(UserError, match="does not exist"):
        resolve_model(str(checkpoint / "absent"))
    with pytest.raises(UserError, match="is not a directory"):
        resolve_model(str(checkpoint / "model.safetensors"))


# --------------------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize(
    ("text", "meant"), [("qwen", "qwen3"), ("Qwen3", "qwen3"), ("smolm2", "smollm2"), ("zzz", None)]
)
def test_unknown_name_lists_presets(text: str, meant: str | None) -> None:
    with pytest.raises(UserError, match="unknown model") as caught:
        resolve_model(text)
    assert "qwen3, qwen3-mqa, qwen3-moe, qwen2-moe, mistral, gemma2, smollm2" in caught.value.hint
    assert ("did you mean" in caught.value.hint) == (meant is not None)
    if meant:
        assert f"did you mean {meant}?" in caught.value.hint


@pytest.mark.parametrize("text", ["", " ", "a\0b"])
def test_no_name(text: str) -> None:
    with pytest.raises(UserError, match="names no model"):
        resolve_model(text)


def test_preset_is_built_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    lines: list[str] = []
    info = resolve_model("qwen3", lines.append)
    assert info.preset and info.name == "qwen3"
    assert info.path == tmp_path / "models" / f"qwen3-{PRESETS['qwen3'].key}"
    assert lines and "building qwen3" in lines[0]
    lines.clear()
    assert resolve_model("qwen3", lines.append) == info
    assert lines == []


def test_preset_wins_over_a_directory(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    checkpoint.rename(tmp_path / "qwen3")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("qwen3").preset
    other = resolve_model("./qwen3")
    assert not other.preset and other.path == tmp_path / "qwen3"


def test_key_follows_the_recipe() -> None:
    from dataclasses import replace

    preset = PRESETS["qwen3"]
    assert len(preset.key) == 12
    assert replace(preset, recipe={**preset.recipe, "seed": 1}).key != preset.key


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"token_ids": ["a"], "text": null}]', '[{"text": ""}]'])
def test_damaged_prompts(tmp_path: Path, content: str) -> None:
    (tmp_path / PROMPTS_FILE).write_text(content)
    with pytest.raises(UserError, match="missing or damaged") as caught:
        read_prompts(tmp_path)
    assert "builds it again" in caught.value.hint
