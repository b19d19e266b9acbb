"""Memory, shared memory, and the limits of control groups."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from align.doctor import cgroup
from align.doctor.memory import examine_memory, examine_shared
from align.doctor.types import Check, Machine, Needs
from tests.unit.align.doctor.fakes import machine

GB = 1_000_000_000


def with_memory(root: Path, available: float, total: float = 16) -> Machine:
    here = machine(root)
    kb = [round(value * GB / 1024) for value in (total, available)]
    (here.proc / "meminfo").write_text(f"MemTotal: {kb[0]} kB\nMemFree: 5 kB\nMemAvailable: {kb[1]} kB\nHugePages: 0\n")
    return here


def group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def memory(here: Machine) -> Check:
    (found,) = examine_memory(here, Needs())
    return found


@pytest.mark.parametrize(("available", "state"), [(2, "missing"), (5, "warning"), (12, "ok")])
def test_available_memory(tmp_path: Path, available: float, state: str) -> None:
    assert memory(with_memory(tmp_path, available)).state == state


def test_what_ray_keeps_in_reserve_does_not_count(tmp_path: Path) -> None:
    """Ray kills workers when 95 % of the memory are in use: of 100 GB the last 5 cannot be taken."""
    found = memory(with_memory(tmp_path, 7, total=100))
    assert (found.state, "5.0 GB of it is the reserve" in found.found) == ("missing", True)
    assert memory(with_memory(tmp_path / "b", 7.4, total=16)).state == "ok"


@pytest.mark.parametrize("place", ["", "docker/1234"])
def test_a_containers_limit_of_version_2(tmp_path: Path, place: str) -> None:
    here = with_memory(tmp_path, 12)
    (here.proc / "self" / "cgroup").write_text(f"0::/{place}\n")
    group(here.cgroup / place, memory__max=4 * GB, memory__current=2 * GB)
    found = memory(here)
    assert (found.state, "2.0 GB available of the container's limit (4.0 GB)" in found.found) == ("missing", True)
    assert found.mend.startswith("docker run --memory")


def test_a_containers_limit_of_version_1_at_the_root_of_the_mount(tmp_path: Path) -> None:
    here = with_memory(tmp_path, 12)
    (here.proc / "self" / "cgroup").write_text("4:memory:/docker/1234\n9:name=systemd:/\n0::/\n")
    files = {"memory__limit_in_bytes": 6 * GB, "memory__usage_in_bytes": 3 * GB}
    group(here.cgroup / "memory", **files)
    assert cgroup.memory(here.proc, here.cgroup) == cgroup.Limit(6 * GB, 3 * GB)
    group(here.cgroup / "memory", memory__stat=f"inactive_file 5\ntotal_inactive_file {GB}")
    assert cgroup.memory(here.proc, here.cgroup) == cgroup.Limit(6 * GB, 2 * GB), "that cache is given back"
    assert memory(here).state == "warning"


def test_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    here = with_memory(tmp_path, 12)
    (here.proc / "self" / "cgroup").write_text("0::/a/b\n")
    group(here.cgroup / "a", memory__max=8 * GB, memory__current=7 * GB)
    group(here.cgroup / "a" / "b", memory__max=6 * GB, memory__current=2 * GB)
    assert cgroup.memory(here.proc, here.cgroup) == cgroup.Limit(8 * GB, 7 * GB)


@pytest.mark.parametrize(
    "files",
    [{}, {"memory__max": "max", "memory__current": 5}, {"memory__max": (1 << 63) - 4096, "memory__current": 5}],
)
def test_no_limit(tmp_path: Path, files: dict[str, object]) -> None:
    here = with_memory(tmp_path, 12)
    (here.proc / "self" / "cgroup").write_text("0::/\n")
    group(here.cgroup, **files)
    assert cgroup.memory(here.proc, here.cgroup) is None
    assert "of the machine's memory" in memory(here).found


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Usage = namedtuple("Usage", "total used free")
    here = machine(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    (small,) = examine_shared(here, Needs())
    assert (small.state, "--shm-size=1g" in small.mend) == ("warning", True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GB, 0, GB))
    (large,) = examine_shared(here, Needs())
    assert large.state == "ok"
    here.shm.rmdir()
    (gone,) = examine_shared(here, Needs())
    assert gone.state == "missing"
