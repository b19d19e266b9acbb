"""Where things are kept, and files that are complete or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from envs import home
from envs.errors import EnvError


@pytest.mark.parametrize(
    ("named", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("~/b", "", "/users/me/b"),
        ("", "/x", "/x/align"),
        ("", "", "/users/me/.cache/align"),
        ("", "relative", "/users/me/.cache/align"),
    ],
)
def test_home(named: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("ALIGN_HOME", named)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert home.align_home() == Path(expected)


def test_relative_home_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALIGN_HOME", "cache")
    assert home.align_home() == tmp_path / "cache"


def test_write_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    home.write_atomically(path, "one", mode=0o755)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one", 0o755)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        home.write_atomically(path, "two")
    assert path.read_text() == "one"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_full_disk_has_its_own_hint(tmp_path: Path) -> None:
    full = home.os_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path, "build it")
    denied = home.os_error(OSError(errno.EACCES, "Permission denied"), tmp_path, "build it")
    assert isinstance(full, EnvError)
    assert "is full" in full.message
    assert full.hint != denied.hint
    assert denied.message == f"cannot build it: {tmp_path}: Permission denied"
