"""Directories that are written to."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from align.doctor import disk
from align.doctor.types import Check, Needs
from tests.unit.align.doctor.fakes import NAMES, machine

NEEDS = Needs()
Usage = namedtuple("Usage", "total used free")


def usage(monkeypatch: pytest.MonkeyPatch, free: float, total: float = 500e9) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(int(total), int(total - free), int(free)))


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def file(**_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", file)


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_home_that_does_not_exist_yet_is_fine_and_is_not_made(tmp_path: Path) -> None:
    found = by_name(disk.examine_home(machine(tmp_path), NEEDS))
    assert (found["ALIGN_HOME"].state, "made when it is needed" in found["ALIGN_HOME"].found) == ("ok", True)
    assert not (tmp_path / "home").exists()


def test_a_home_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    assert by_name(disk.examine_home(machine(tmp_path), NEEDS))["ALIGN_HOME"].found == str(tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    here = machine(tmp_path)
    here.home.touch()
    (found,) = disk.examine_home(here, NEEDS)
    assert (found.state, "is no directory" in found.found, found.mend) == (
        "missing",
        True,
        "ALIGN_HOME=/path make align",
    )
    (runs,) = disk.examine_runs(here, NEEDS)
    assert (runs.name, runs.state) == ("runs", "missing")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOLCK])
def test_directories_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refuse(monkeypatch, number)
    here = machine(tmp_path)
    for examination in (disk.examine_home, disk.examine_runs, disk.examine_temporary):
        (found,) = examination(here, NEEDS)
        assert (found.state, os.strerror(number) in found.found) == ("missing", True)


def test_a_home_on_a_disk_that_runs_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Flags = namedtuple("Flags", "f_flag")
    usage(monkeypatch, 100e9)
    monkeypatch.setattr(os, "statvfs", lambda path: Flags(os.ST_NOEXEC | os.ST_RELATIME))
    assert by_name(disk.examine_home(machine(tmp_path), NEEDS))["ALIGN_HOME"].state == "missing"


def test_space_to_build_is_what_the_locks_of_absent_environments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine(tmp_path)  # each lock needs 1 MB
    usage(monkeypatch, 2.9e6)
    short = by_name(disk.examine_home(here, NEEDS))["disk to build"]
    assert (short.state, "driver, lmdeploy, vllm needs 3 MB" in short.found) == ("missing", True)
    usage(monkeypatch, 3.1e6)
    assert by_name(disk.examine_home(here, NEEDS))["disk to build"].state == "ok"
    usage(monkeypatch, 2.9e6)
    here.builder.ensure("vllm")
    assert by_name(disk.examine_home(here, NEEDS))["disk to build"].state == "ok"
    for name in NAMES:
        here.builder.ensure(name)
    usage(monkeypatch, 0)
    assert "all environments are built" in by_name(disk.examine_home(here, NEEDS))["disk to build"].found


def test_on_hardware_the_driver_alone_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage(monkeypatch, 1.1e6)
    here = machine(tmp_path, device="ascend")
    assert by_name(disk.examine_home(here, NEEDS))["disk to build"].state == "ok"


@pytest.mark.parametrize(("free", "state"), [(0.1e9, "missing"), (1e9, "warning"), (3e9, "ok")])
def test_space_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str) -> None:
    usage(monkeypatch, free)
    (found,) = disk.examine_runs(machine(tmp_path), NEEDS)
    assert (found.name, found.state) == ("disk to run", state)


@pytest.mark.parametrize(
    ("free", "total", "state"), [(0.4e9, 1e9, "missing"), (4e9, 100e9, "warning"), (6e9, 100e9, "ok")]
)
def test_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, total: float, state: str
) -> None:
    usage(monkeypatch, free, total)
    (found,) = disk.examine_temporary(machine(tmp_path, temporary=Path("/")), NEEDS)
    assert found.state == state


def test_a_temporary_directory_with_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage(monkeypatch, 400e9)
    long = tmp_path / ("x" * 71)
    long.mkdir()
    (found,) = disk.examine_temporary(machine(tmp_path, temporary=long), NEEDS)
    assert (found.state, found.mend) == ("warning", "TMPDIR=/tmp make align")


def test_a_socket_fits_into_the_longest_directory_that_is_accepted() -> None:
    """vLLM appends ``/`` and a UUID of 36 characters; the kernel takes 107 bytes."""
    import socket

    path = "/tmp/" + "y" * (NEEDS.socket_directory - 5 + 37)
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(FileNotFoundError):
        server.connect(path)
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(OSError, match="too long"):
        server.connect(path + "y")
