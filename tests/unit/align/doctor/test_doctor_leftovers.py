"""What earlier runs left: told apart from runs in progress, on a fake and on the real ``/proc``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from align.doctor.leftovers import examine_processes, examine_sessions
from align.doctor.processes import processes
from align.doctor.types import Check, Machine, Needs
from align.run import guardian
from align.run.guard import Guard
from tests.unit.align.doctor.fakes import machine, process

GUARDIAN = "/e/bin/python -S /repo/align/run/guardian.py {} {} /tmp/align-abcdefgh"


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    made = machine(tmp_path)
    process(made.proc, 1, "/sbin/init", parent=0)
    process(made.proc, 50, "bash")
    return made


def earlier(here: Machine) -> Check:
    (found,) = examine_processes(here, Needs())
    return found


def test_nothing_is_left(here: Machine) -> None:
    assert earlier(here) == Check("earlier runs", "ok", "no process left")


def test_processes_without_driver_and_guardian(here: Machine) -> None:
    process(here.proc, 100, "raylet --x", mark="aa")
    process(here.proc, 101, "ray::Host", mark="aa", parent=100)
    process(here.proc, 102, "ray-dashboard-agent", parent=100)  # it wrote its title over its mark
    process(here.proc, 103, "gone", mark="aa", state="Z")
    process(here.proc, 104, "other", parent=50)
    found = earlier(here)
    assert (found.state, found.mend) == ("warning", "kill -9 100 101 102")
    assert found.found == "3 processes of a run whose command is gone"


def test_a_run_in_progress_is_left_alone(here: Machine) -> None:
    process(here.proc, 90, "/e/bin/python -P -m align run", parent=50)
    process(here.proc, 91, GUARDIAN.format("aa", 90), parent=90)
    process(here.proc, 100, "raylet --x", mark="aa", parent=90)
    found = earlier(here)
    assert (found.state, found.found) == ("ok", "nothing left; in progress: process 90")


def test_a_run_in_progress_whose_guardian_was_killed(here: Machine) -> None:
    process(here.proc, 90, "/e/bin/python -P -m align run", parent=50)
    process(here.proc, 100, "raylet --x", mark="aa", parent=90)
    process(here.proc, 101, "/e/bin/python host", mark="aa", parent=100)
    assert earlier(here).state == "ok"


def test_a_guardian_at_work_is_not_disturbed(here: Machine) -> None:
    process(here.proc, 91, GUARDIAN.format("aa", 90))
    process(here.proc, 100, "raylet --x", mark="aa")
    found = earlier(here)
    assert (found.state, "its guardian is ending" in found.found) == ("ok", True)


def test_the_dead_among_the_living(here: Machine) -> None:
    process(here.proc, 90, "/e/bin/python -P -m align run", parent=50)
    process(here.proc, 91, GUARDIAN.format("aa", 90), parent=90)
    process(here.proc, 100, "raylet --x", mark="aa", parent=90)
    process(here.proc, 200, "/e/bin/python -m adapters.host", mark="bb")
    process(here.proc, 300, "/e/bin/python -m adapters.host", mark="cc")
    found = earlier(here)
    assert (found.found, found.mend) == ("2 processes of 2 runs whose commands are gone", "kill -9 200 300")


LOG = "/tmp/align-abcdefgh/session_1/logs/agent.log"


def test_agents_that_lost_their_mark_are_known_by_their_logs(here: Machine) -> None:
    """Seen with Ray 2.60.0: of a run that was killed together with its guardian, two agents stay."""
    process(here.proc, 100, "ray::DashboardAgent", writes=LOG)
    process(here.proc, 101, "ray::RuntimeEnvAgent", writes=LOG)
    process(here.proc, 102, "vi", writes="/tmp/align-abcdefgh/notes")
    found = earlier(here)
    assert (found.found, found.mend) == ("2 processes of a run whose command is gone", "kill -9 100 101")


def test_agents_of_a_living_run_without_its_guardian(here: Machine) -> None:
    """The driver writes into the session too, and is none of the leftovers."""
    process(here.proc, 90, "/e/bin/python -P -m align run", parent=50, writes=LOG)
    process(here.proc, 101, "ray::RuntimeEnvAgent", writes=LOG)
    assert earlier(here).found == "nothing left; in progress: process 90"


def test_agents_and_marked_processes_are_one_run(here: Machine) -> None:
    process(here.proc, 100, "raylet", mark="aa", writes=LOG)
    process(here.proc, 101, "ray::RuntimeEnvAgent", writes=LOG)
    assert earlier(here).found == "2 processes of a run whose command is gone"
    process(here.proc, 91, GUARDIAN.format("aa", 90))
    assert "its guardian is ending" in earlier(here).found


def test_a_reader_of_a_log_is_not_part_of_the_run(tmp_path: Path) -> None:
    log = tmp_path / "align-abcdefgh" / "session_1" / "log"
    log.parent.mkdir(parents=True)
    log.touch()
    with open(log):
        assert processes(Path("/proc"))[os.getpid()].session == ""
    with open(log, "a"):
        assert processes(Path("/proc"))[os.getpid()].session == str(tmp_path / "align-abcdefgh")


@pytest.mark.parametrize(("argv", "state"), [("python3 collector.py", "warning"), ("python -m align run", "ok")])
def test_process_1_is_a_driver_only_if_it_is_the_command(tmp_path: Path, argv: str, state: str) -> None:
    here = machine(tmp_path)
    process(here.proc, 1, argv, parent=0)
    process(here.proc, 100, "raylet", mark="aa", parent=1)
    assert earlier(here).state == state


def test_a_process_that_ends_meanwhile_or_is_someone_elses(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.proc / "400").mkdir()
    process(here.proc, 401, "secret", mark="aa")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.parts[-2:] == ("401", "environ"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert earlier(here).state == "ok"


def test_a_real_orphan_and_the_command_that_ends_it() -> None:
    """Its parent ends at once, as a driver that was killed together with its guardian."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    env = {**os.environ, guardian.MARK: f"test-{os.getpid()}"}
    # Other tests may have made this process a collector of orphans: 36 is PR_SET_CHILD_SUBREAPER.
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    out = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True, timeout=30)
    pid = int(out.stdout)
    try:
        (found,) = examine_processes(Machine(), Needs())
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent != 1 and "python" in Path(f"/proc/{parent}/cmdline").read_text():
            pytest.skip("orphans are collected by a Python here, which is taken for a driver")
        assert found.state == "warning"
        assert str(pid) in found.mend.removeprefix("kill -9 ").split()
    finally:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while str(pid) in examine_processes_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert str(pid) not in examine_processes_text()


def examine_processes_text() -> list[str]:
    (found,) = examine_processes(Machine(), Needs())
    return found.mend.split()


def test_a_real_guardian_is_recognised() -> None:
    """Its command line is what the examination expects."""
    run_id = f"guarded-{os.getpid()}"
    guard = Guard(run_id)
    member = subprocess.Popen(["sleep", "60"], env={**os.environ, guardian.MARK: run_id})
    try:
        (found,) = examine_processes(Machine(), Needs())
        assert str(os.getpid()) in found.found or found.state == "warning", found
        assert str(member.pid) not in found.mend.split()
    finally:
        guard.close()
        member.kill()
        member.wait()


def session(here: Machine, name: str) -> Path:
    path = here.temporary / name
    (path / "session_2026").mkdir(parents=True)
    (path / "session_2026" / "log").write_bytes(b"x" * 2_000_000)
    return path


def test_sessions_that_nobody_uses(here: Machine) -> None:
    (none,) = examine_sessions(here, Needs())
    assert none.state == "ok"
    old = session(here, "align-aaaaaaaa")
    used = session(here, "align-bbbbbbbb")
    (here.temporary / "align-notes").mkdir()
    session(here, "other-cccccccc")
    process(here.proc, 91, f"/e/bin/python -S guardian.py aa 90 {used}")
    written = session(here, "align-dddddddd")
    process(here.proc, 92, "ray::RuntimeEnvAgent", writes=f"{written}/session_2026/log")
    (found,) = examine_sessions(here, Needs())
    assert (found.state, found.found, found.mend) == ("warning", f"2 MB in {old}", f"rm -r {old}")


def test_sessions_in_the_place_for_short_paths(tmp_path: Path) -> None:
    short = tmp_path / "short"
    (short / "align-aaaaaaaa" / "session_1").mkdir(parents=True)
    (found,) = examine_sessions(machine(tmp_path, short_temporary=short), Needs())
    assert found.mend == f"rm -r {short}/align-aaaaaaaa"


def test_many_sessions_are_counted_and_all_removed(here: Machine) -> None:
    names = [session(here, f"align-{number:08}") for number in range(6)]
    (found,) = examine_sessions(here, Needs())
    assert found.found.endswith("and 2 more")
    assert found.mend.split()[2:] == [str(path) for path in names]


def test_a_run_calls_its_directory_as_expected() -> None:
    guard = Guard("named")
    try:
        assert Path(guard.temp_dir).name.startswith("align-")
    finally:
        guard.close()
