"""Hashes of checkpoint files, and that they are computed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from align.conditions import file_hashes, files
from align.errors import UserError


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    path = tmp_path / "model"
    path.mkdir()
    for name in ("model.safetensors", "config.json", "notes.txt"):
        (path / name).write_bytes(name.encode() * 1000)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were really read."""
    seen: list[str] = []
    original = files.sha256

    def recording(file: Path) -> str:
        seen.append(file.name)
        return original(file)

    monkeypatch.setattr(files, "sha256", recording)
    return seen


def test_hashes_of_what_decides_a_model(checkpoint: Path) -> None:
    assert file_hashes(checkpoint) == {
        name: hashlib.sha256(name.encode() * 1000).hexdigest() for name in ("model.safetensors", "config.json")
    }


def test_files_are_read_once(checkpoint: Path, hashed: list[str]) -> None:
    first = file_hashes(checkpoint)
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    hashed.clear()
    assert file_hashes(checkpoint) == first and hashed == []


def test_a_changed_file_is_read_again(checkpoint: Path, hashed: list[str]) -> None:
    before = file_hashes(checkpoint)
    hashed.clear()
    weights = checkpoint / "model.safetensors"
    status = weights.stat()
    changed = bytearray(weights.read_bytes())
    changed[0] ^= 1
    weights.write_bytes(changed)  # same name, same length
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = file_hashes(checkpoint)
    assert hashed == ["model.safetensors"]
    assert after["model.safetensors"] != before["model.safetensors"]


def test_a_replaced_file_of_the_same_times_is_read_again(checkpoint: Path, hashed: list[str]) -> None:
    file_hashes(checkpoint)
    hashed.clear()
    weights, other = checkpoint / "model.safetensors", checkpoint / "other"
    other.write_bytes(b"x" * weights.stat().st_size)
    status = weights.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(weights)
    file_hashes(checkpoint)
    assert hashed == ["model.safetensors"]


def test_a_broken_cache_costs_time_only(checkpoint: Path, hashed: list[str], tmp_path: Path) -> None:
    first = file_hashes(checkpoint)
    (cache,) = (tmp_path / "home").glob("*.json")
    cache.write_text("{")
    hashed.clear()
    assert file_hashes(checkpoint) == first and len(hashed) == 2


def test_a_home_that_cannot_be_written_costs_time_only(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the way")
    assert set(file_hashes(checkpoint)) == {"config.json", "model.safetensors"}


def test_an_unreadable_file_is_the_users(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "sha256", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        file_hashes(checkpoint)
