"""The states of environments, who uses them, and what they take."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs import survey
from envs.build import MARKER, Builder
from envs.errors import EnvError
from tests.unit.envs.fakes import LOCK, FakePip, write_lock
from tests.unit.envs.test_installed import install


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "home", write_lock(tmp_path / "locks"), FakePip())


def state(builder: Builder) -> tuple[str, int | None]:
    (found,) = survey.survey(builder, ["tiny"])
    return found.state, found.holder


def test_absent_built_and_unfinished(builder: Builder) -> None:
    assert state(builder) == ("absent", None)
    built = builder.ensure("tiny")
    assert state(builder) == ("built", None)
    (built.path / MARKER).unlink()
    assert state(builder) == ("unfinished", None)


def test_a_build_under_way_and_who_builds(builder: Builder) -> None:
    path = builder.environment("tiny").path
    path.mkdir(parents=True)
    with open(f"{path}.lock", "w") as lock:
        lock.write("4321\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state(builder) == ("building", 4321)
    assert state(builder) == ("unfinished", None), "the holder is gone, and its number alone means nothing"


def test_looking_does_not_make_or_keep_a_lock(builder: Builder) -> None:
    path = builder.environment("tiny").path
    state(builder)
    assert not Path(f"{path}.lock").exists()
    builder.ensure("tiny")
    state(builder)
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_environments_of_other_locks_are_found(builder: Builder) -> None:
    old = builder.ensure("tiny").path
    half = builder.home / "envs" / "vllm-0123456789ab"
    half.mkdir()
    (builder.home / "envs" / "my-notes").mkdir()
    assert [(one.name, one.key, one.state) for one in survey.others(builder)] == [
        ("vllm", "0123456789ab", "unfinished")
    ]
    write_lock(builder.locks, LOCK.replace("two==2.0", "two==2.1"))
    found = {one.path: (one.state, one.current) for one in survey.survey(builder, ["tiny"])}
    assert found == {
        builder.environment("tiny").path: ("absent", True),
        old: ("built", False),
        half: ("unfinished", False),
    }


def test_with_a_damaged_lock_nothing_is_called_old(builder: Builder) -> None:
    builder.ensure("tiny")
    write_lock(builder.locks, "name = ", "other")
    with pytest.raises(EnvError, match="damaged"):
        survey.others(builder)


def test_departures_know_what_the_lock_removes(builder: Builder) -> None:
    site = builder.ensure("tiny").site_packages
    for name, version in builder.environment("tiny").versions.items():
        install(site, name, version, {f"{name}/lib/a.so": "a", f"{name}/b.py": "b"})
    assert survey.departures_of(builder, "tiny") == ()
    (site / "two" / "lib" / "a.so").unlink()
    assert survey.departures_of(builder, "tiny") == ()
    (site / "two" / "b.py").unlink()
    assert [one.file for one in survey.departures_of(builder, "tiny")] == ["two/b.py"]


def test_users_by_command_line_and_by_mapped_library(tmp_path: Path) -> None:
    env, other = tmp_path / "envs" / "a-0", tmp_path / "envs" / "a-01"
    for pid, cmdline, maps in (
        ("7", f"{env}/bin/python\0-m\0align\0", ""),
        ("12", "ray::Host\0", f"7f00-7f01 r-xp 0 08:01 5 {env}/lib/torch.so\n"),
        ("13", f"{other}/bin/python\0", ""),
        ("14", "vi\0notes\0", ""),
    ):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "cmdline").write_text(cmdline)
        (tmp_path / "proc" / pid / "maps").write_text(maps)
    (tmp_path / "proc" / "15").mkdir()  # it ends while it is looked at
    (tmp_path / "proc" / "meminfo").touch()
    assert survey.users([env, other], tmp_path / "proc") == {env: (7, 12), other: (13,)}


def test_this_process_uses_its_own_environment(tmp_path: Path) -> None:
    assert os.getpid() in survey.users([Path(sys.prefix)])[Path(sys.prefix)]
    assert survey.users([tmp_path]) == {tmp_path: ()}


def test_a_process_that_hides_its_command_line_is_found_by_its_libraries(tmp_path: Path) -> None:
    """The interpreter starts under another name, as Ray's workers end up after they changed their title."""
    code = "import ctypes, sys, time; ctypes.CDLL(sys.stdin.readline().strip()); print(1, flush=True); time.sleep(60)"
    library = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line and "r-xp" in line
    )
    copy = tmp_path / "lib" / "own.so"
    copy.parent.mkdir()
    copy.write_bytes(Path(library).read_bytes())
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{copy}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline() == b"1\n"
        assert survey.users([tmp_path])[tmp_path] == (process.pid,)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 5
    while survey.users([tmp_path])[tmp_path] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert survey.users([tmp_path])[tmp_path] == ()


def test_size_is_what_the_disk_gives(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(os.urandom(1_000_000))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "file")
    assert 1_000_000 <= survey.size(tmp_path) < 1_020_000
    assert survey.size(tmp_path / "absent") == 0
