"""``ulimit`` and a container's limit on threads."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from align.doctor.limits import examine_files, examine_sizes, examine_threads
from align.doctor.types import Needs
from tests.unit.align.doctor.fakes import machine, process

UNLIMITED = resource.RLIM_INFINITY


def limit(monkeypatch: pytest.MonkeyPatch, limits: Mapping[int, tuple[int, int]]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, (UNLIMITED, UNLIMITED)))


@pytest.mark.parametrize(
    ("soft", "hard", "state"),
    [
        (100, 200, "missing"),
        (1024, 1024, "warning"),
        (1024, 65536, "ok"),  # Ray raises it
        (1024, UNLIMITED, "ok"),
        (UNLIMITED, UNLIMITED, "ok"),
    ],
)
def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, state: str) -> None:
    limit(monkeypatch, {resource.RLIMIT_NOFILE: (soft, hard)})
    (found,) = examine_files(machine(tmp_path), Needs())
    assert (found.state, str(UNLIMITED) in found.found) == (state, False)


@pytest.mark.parametrize(("threads", "state"), [(900, "missing"), (700, "warning"), (300, "ok")])
def test_threads_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, state: str) -> None:
    limit(monkeypatch, {resource.RLIMIT_NPROC: (1200, 1200)})
    here = machine(tmp_path, uid=1000)
    process(here.proc, 5, "a", uid=1000, threads=threads)
    process(here.proc, 6, "b", uid=1001, threads=5000)
    (found,) = examine_threads(here, Needs())
    assert (found.state, found.found.split()[0]) == (state, str(1200 - threads))


def test_root_has_no_limit_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, {resource.RLIMIT_NPROC: (10, 10)})
    (found,) = examine_threads(machine(tmp_path, uid=0), Needs())
    assert (found.state, found.found) == ("ok", "no limit")


@pytest.mark.parametrize(("current", "state"), [(900, "missing"), (500, "warning"), (100, "ok")])
def test_threads_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: int, state: str) -> None:
    limit(monkeypatch, {})
    here = machine(tmp_path, uid=0)
    (here.cgroup / "pids.max").write_text("1000\n")
    (here.cgroup / "pids.current").write_text(f"{current}\n")
    (found,) = examine_threads(here, Needs())
    assert (found.state, "container" in found.found) == (state, True)


def test_a_user_with_few_threads_in_a_container_with_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, {resource.RLIMIT_NPROC: (100, 100)})
    here = machine(tmp_path, uid=1000)
    (here.cgroup / "pids.max").write_text("10000\n")
    (here.cgroup / "pids.current").write_text("10\n")
    assert [check.state for check in examine_threads(here, Needs())] == ["ok", "missing"]


def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(tmp_path)
    limit(monkeypatch, {})
    assert [check.state for check in examine_sizes(here, Needs())] == ["ok"]
    limit(monkeypatch, {resource.RLIMIT_AS: (8 << 30, 8 << 30), resource.RLIMIT_FSIZE: (1 << 20, 1 << 20)})
    (found,) = examine_sizes(here, Needs())
    assert (found.state, found.mend) == ("warning", "ulimit -v unlimited; ulimit -f unlimited")
