"""Directories are built in one step: killed, failing and simultaneous builders leave nothing half written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from align.errors import UserError
from align.models.cache import build_once, models_dir


def write_two_files(folder: Path) -> None:
    (folder / "first").write_text("1")
    (folder / "second").write_text("2")


def slow_build(target: str, log: str) -> None:
    """Builds ``target`` and notes in ``log`` that it did the work."""

    def build(folder: Path) -> None:
        with open(log, "a") as stream:
            stream.write(f"{os.getpid()}\n")
        (folder / "first").write_text("1")
        time.sleep(0.3)
        (folder / "second").write_text("2")

    build_once(Path(target), build)


def endless_build(target: str, started: str) -> None:
    def build(folder: Path) -> None:
        (folder / "first").write_text("1")
        Path(started).touch()
        time.sleep(600)

    build_once(Path(target), build)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ALIGN_HOME": "/a/b"}, "/a/b"),
        ({"ALIGN_HOME": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/align"),
        ({"ALIGN_HOME": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/align"),
        ({"ALIGN_HOME": "~/c", "HOME": "/h"}, "/h/c"),
    ],
)
def test_models_live_in_the_cache(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("ALIGN_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models_dir() == Path(expected, "models")
    assert models_dir() == Path(expected) / "models"


def test_second_call_does_not_build(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write_two_files(folder)

    assert build_once(target, build) == build_once(target, build) == target
    assert len(calls) == 1
    assert sorted(file.name for file in target.iterdir()) == ["first", "second"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_two_files(folder)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(tmp_path / "model", build)
    assert [file.name for file in tmp_path.iterdir()] == [".model.lock"]
    build_once(tmp_path / "model", write_two_files)
    assert (tmp_path / "model" / "second").is_file()


def test_two_builders_at_once_build_once(tmp_path: Path) -> None:
    target, log = tmp_path / "model", tmp_path / "log"
    spawn = multiprocessing.get_context("fork")
    builders = [spawn.Process(target=slow_build, args=(str(target), str(log))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(30)
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert sorted(file.name for file in target.iterdir()) == ["first", "second"]


def test_killed_build_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    target, started = tmp_path / "model", tmp_path / "started"
    builder = multiprocessing.get_context("fork").Process(target=endless_build, args=(str(target), str(started)))
    builder.start()
    deadline = time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(30)
    left = list(tmp_path.glob(".model.building-*"))
    assert len(left) == 1 and not target.exists()
    build_once(target, write_two_files)
    assert (target / "second").read_text() == "2"
    assert not list(tmp_path.glob(".model.building-*")), "what the killed builder left is removed"


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.ENOSPC, "no space left", "free some space"),
        (errno.EDQUOT, "no space left", "ALIGN_HOME"),
        (errno.EROFS, "read-only", "ALIGN_HOME"),
        (errno.EACCES, "permission denied", "ALIGN_HOME"),
        (errno.EIO, "cannot write", "working disk"),
    ],
)
def test_storage_errors_say_what_to_do(tmp_path: Path, number: int, message: str, hint: str) -> None:
    def build(folder: Path) -> None:
        (folder / "first").write_text("1")
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError) as caught:
        build_once(tmp_path / "model", build)
    assert message in caught.value.message and hint in caught.value.hint
    assert [file.name for file in tmp_path.iterdir()] == [".model.lock"]


def test_full_disk_for_real(tmp_path: Path) -> None:
    """A file size limit is the nearest thing to a full disk that needs no privileges."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from align.errors import UserError\n"
        "from align.models.cache import build_once\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    build_once(Path(sys.argv[1]), lambda folder: (folder / 'w').write_bytes(bytes(5000)) and None)\n"
        "except UserError as error:\n"
        "    print(error.message)\n"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert "cannot write" in done.stdout and "File too large" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == [".model.lock"]


def test_cache_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        build_once(tmp_path / "file" / "models" / "model", write_two_files)


def test_finished_model_needs_no_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_once(tmp_path / "model", write_two_files)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build_once(target, write_two_files) == target
