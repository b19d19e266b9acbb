"""The run's directory: names, refusals, and files that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from align.errors import UserError
from align.run.directory import RunDirectory, disk_error


def test_made_names_are_unique_and_carry_the_label(tmp_path: Path) -> None:
    made = [RunDirectory(None, tmp_path / "runs", "qwen3").path for _ in range(5)]
    assert len(set(made)) == 5
    assert all(path.is_dir() and path.parent == tmp_path / "runs" and "qwen3" in path.name for path in made)


def test_a_given_directory_is_made_with_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("a/b/c"), tmp_path / "runs", "qwen3")
    assert run.path == tmp_path / "a" / "b" / "c"
    assert run.path.is_dir()
    assert not (tmp_path / "runs").exists()


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert RunDirectory(tmp_path / "out", tmp_path, "x").path == tmp_path / "out"


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "case.json").write_text("{}")
    with pytest.raises(UserError, match="is not an empty directory") as caught:
        RunDirectory(tmp_path / "out", tmp_path, "x")
    assert "choose another --out" in caught.value.hint
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["case.json"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for path in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(UserError) as caught:
            RunDirectory(path, tmp_path, "x")
        assert "--out" in caught.value.hint
    assert (tmp_path / "out").read_text() == "mine"


def fail_with(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "free disk space"), (errno.EDQUOT, "free disk space"), (errno.EACCES, "writable directory"),
     (errno.EROFS, "writable directory"), (errno.ENAMETOOLONG, "another directory")],
)  # fmt: skip
def test_directories_that_cannot_be_made(
    number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", fail_with(number))
    with pytest.raises(UserError, match="out") as caught:
        RunDirectory(tmp_path / "out", tmp_path, "x")
    assert hint in caught.value.hint
    assert "--out" in caught.value.hint


def test_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(Path, "mkdir", _obeying(Path.mkdir))
    with pytest.raises(UserError, match="cannot be written: Permission denied") as caught:
        RunDirectory(locked / "out", tmp_path, "x")
    assert "writable directory" in caught.value.hint


def _obeying(mkdir: Any) -> Any:
    """mkdir as it is for a user whom permissions hold back, also when root runs the tests."""

    def obedient(path: Path, *args: Any, **kwargs: Any) -> Any:
        parent = path.parent
        if parent.is_dir() and not parent.stat().st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return mkdir(path, *args, **kwargs)

    return obedient


def test_files_are_written_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "out", tmp_path, "x")
    assert run.write("case.json", "first") == run.path / "case.json"
    run.write("case.json", "second")
    run.write_json("tokens.json", {"text": "é", "ids": [1, 2]})
    assert (run.path / "case.json").read_text() == "second"
    text = (run.path / "tokens.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"text": "é", "ids": [1, 2]}
    assert "é" in text
    assert text.endswith("\n")
    assert sorted(path.name for path in run.path.iterdir()) == ["case.json", "tokens.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "out", tmp_path, "x")
    run.write("run.json", "old")
    write = Path.write_text

    def half(self: Path, text: str, **kwargs: Any) -> int:
        write(self, text[: len(text) // 2], **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    for name in ("run.json", "new.json"):
        with pytest.raises(UserError, match="no space is left") as caught:
            run.write(name, "x" * 100)
        assert name in caught.value.message
        assert caught.value.exit_code == 2
    assert [path.name for path in run.path.iterdir()] == ["run.json"]
    assert (run.path / "run.json").read_text() == "old"


def test_every_disk_error_ends_with_what_to_do(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EIO, errno.ENOTDIR, errno.ELOOP):
        error = disk_error(OSError(number, os.strerror(number)), tmp_path)
        assert str(tmp_path) in error.message
        assert "--out" in error.hint
    assert "odd" in disk_error(OSError("odd"), tmp_path).message


def test_nothing_is_taken_back_if_the_log_cannot_be_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", tmp_path, "x")
    log = directory.write("engine.log", "why")
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with pytest.raises(OSError, match="exists"):
        directory.withdraw(log, blocked)
    assert log.read_text() == "why"
    assert directory.withdraw(tmp_path / "run" / "no.log", tmp_path / "logs") is None
    assert not directory.path.exists()
