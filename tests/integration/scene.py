"""One cell of the table of faults: a command that is held in the middle, disturbed, and gone on with."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from envs.build import NAMES, Builder
from envs.home import REPOSITORY, align_home
from tests.integration import cells
from tests.integration.cells import Cell, Row
from tests.integration.havoc import Census, full, half_files, read_only, small_disk, traces_taken
from tests.integration.support import align_command, align_environment

#: Stated in the README: nothing of a run is left this many seconds after its command was killed.
GONE_SECONDS = 10.0
_TIMEOUT = 400.0
_MEGABYTES = 160
_STALLED = Path(__file__).with_name("stalled.py")
_ENVIRONMENT = "lmdeploy"
_LOCK = f"""
name = "{_ENVIRONMENT}"
torch_build = "cpu"
disk_mb = 1
imports = ["tiny"]

[[step]]
name = "tiny"
packages = ["tiny==1.0"]
"""
#: What a message begins with, in align and in envs.bootstrap.
_SENTENCES, _NEXT = ("error: ", "interrupted", "terminated", "align: "), ("next: ", "→ ")


@dataclass
class Ended:
    """How a command ended: its exit code as a shell sees it, and what it printed."""

    code: int
    out: str
    err: str
    seconds: float

    def message(self) -> str:
        """What it said was wrong, and what to do next."""
        lines = self.err.splitlines()
        said = [line for line in lines if line.startswith(_SENTENCES)]
        return " ".join([*said, *(line for line in lines if line.startswith(_NEXT))])


class Command:
    """A command that was started; what it prints goes to files, which the processes that outlive it do not hold up."""

    def __init__(self, argv: list[str], env: dict[str, str], logs: Path) -> None:
        self.out, self.err = logs.with_suffix(".out"), logs.with_suffix(".err")
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(argv, env=env, stdout=out, stderr=err, start_new_session=True)
        self._started = time.monotonic()

    def wait(self, since: float | None = None) -> Ended:
        """Its end; seconds count from ``since``, or from its start."""
        code = self.process.wait(_TIMEOUT)
        seconds = time.monotonic() - (self._started if since is None else since)
        return Ended(128 - code if code < 0 else code, self.out.read_text(), self.err.read_text(), seconds)


@dataclass
class Scene:
    """A cell's directories and commands. A context manager: whatever happens, nothing stays mounted or running.

    Attributes:
        folder: the test's own.
        recording: a run that ended, for the stages that need no engine.
    """

    cell: Cell
    folder: Path
    recording: Callable[[], Path]
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Scene:
        """Prepare.

        Raises:
            NotPermittedError: mounting is not permitted.
        """
        with contextlib.ExitStack() as stack:
            self.disk = self.folder / "disk"
            self.disk.mkdir()
            if self.cell.fault == cells.FULL:
                stack.enter_context(small_disk(self.disk, _MEGABYTES))
            self.stall = self.folder / "stall"
            self.stall.mkdir()
            # Sockets have short names, and the test's own directory a long one.
            self.temp = Path(tempfile.mkdtemp(prefix="fault-", dir="/tmp"))
            stack.callback(shutil.rmtree, self.temp, ignore_errors=True)
            self.mark = uuid.uuid4().hex
            self.run = (self.folder if self.cell.stage == "model" else self.disk) / "run"
            self.env = align_environment(
                ALIGN_TEST_CELL=self.mark, TMPDIR=str(self.temp), ALIGN_HOME=str(self._home()), OMP_NUM_THREADS="1"
            )
            # Ray starts its workers with a niceness of 15: on a machine that is busy otherwise they would hardly run.
            self.env["RAY_worker_niceness"] = "0"
            if self.cell.stage == "environment":
                self._make_packages()
            if self.cell.command == cells.RESUME:
                shutil.copytree(self.recording(), self.run)
                for name in ("result.json", "report.md", "run.json"):
                    (self.run / name).unlink()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _home(self) -> Path:
        if self.cell.stage not in ("environment", "model"):
            return align_home()
        home = self.disk / "home"
        home.mkdir()
        if self.cell.stage == "model":  # with the real environments, and without models
            (home / "envs").symlink_to(align_home() / "envs")
        return home

    def _make_packages(self) -> None:
        """A lock of one package, and the package."""
        (self.stall / "locks").mkdir()
        for name in NAMES:
            (self.stall / "locks" / f"{name}.toml").write_text(_LOCK.replace(_ENVIRONMENT, name))
        info = "tiny-1.0.dist-info"
        with zipfile.ZipFile(self.stall / "tiny-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/__init__.py", "VERSION = 1\n")
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in ("tiny/__init__.py", f"{info}/RECORD")))
        self.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.stall), "PIP_NO_CACHE_DIR": "1"}

    # -------------------------------------------------------------------------------------------------- commands

    def _arguments(self) -> list[str]:
        if self.cell.stage == "environment":
            return [_ENVIRONMENT]
        if self.cell.command == cells.RESUME:
            return ["resume", str(self.run)]
        return ["run", "--model", "qwen3", "--out", str(self.run)]

    def _start(self, argv: list[str], name: str) -> Command:
        command = Command(argv, self.env, self.folder / name)
        self._stack.callback(_end, command.process)
        return command

    def _held(self, name: str) -> Command:
        argv = [sys.executable, "-P", str(_STALLED), self.cell.stage, str(self.stall), *self._arguments()]
        return self._start(argv, name)

    def _second(self) -> Command:
        if self.cell.fault == cells.SAME_HOME:
            return self._held("second")
        if self.cell.fault == cells.TWO_RESUMES:
            return self._start(align_command("resume", str(self.run)), "second")
        return self._start(align_command(*self._arguments()), "second")

    # ------------------------------------------------------------------------------------------------- the measure

    def measure(self) -> tuple[Row, Ended]:
        """Hold, disturb, count, go on.

        Returns:
            the row, and what the disturbed command (or the second one) printed.
        """
        with ExitStack() as stack:
            first = self._held("first")
            census = stack.enter_context(Census(first.process.pid, f"ALIGN_TEST_CELL={self.mark}"))
            self._wait_for(lambda: (self.stall / "marker").exists(), first, "the stage was not reached")
            at = time.monotonic()
            if self.cell.fault in (cells.SAME_OUT, cells.TWO_RESUMES, cells.SAME_HOME):
                ended = self._two(first)
            else:
                self._disturb(first, census, stack)
                (self.stall / "release").touch()
                ended = first.wait(at)
            end = time.monotonic()
            orphans = census.wait_until_gone(GONE_SECONDS)
            gone = time.monotonic() - end
            halves = self._halves()
        if orphans:
            ended.err += "\nleft: " + "\nleft: ".join(orphans)
        if halves:
            ended.err += "\nhalf: " + "\nhalf: ".join(halves)
        by, after = self._go_on()
        said = "ready after" if self.cell.stage == "environment" else "aligned"
        well = after.code == 0 and (said in after.out + after.err or self.cell.fault == cells.SAME_HOME)
        if not well:
            ended.err += f"\nafterwards, exit code {after.code}:\n{after.out}{after.err}"
        return Row(
            *self.cell.key,
            exit=str(ended.code),
            seconds=f"{ended.seconds:.1f}",
            gone=f"{gone:.1f}",
            orphans=str(len(orphans)),
            halves=str(len(halves)),
            resumable="yes" if well else "no",
            by=f"{by} ({after.seconds:.0f} s)",
            message=self._short(ended.message()) or "-",
        ), ended

    def _disturb(self, first: Command, census: Census, stack: ExitStack) -> None:
        fault = self.cell.fault
        if fault == cells.KILL:
            first.process.kill()
        elif fault == cells.INTERRUPT:  # as a terminal does: to the whole foreground group
            os.killpg(first.process.pid, signal.SIGINT)
        elif fault == cells.TERMINATE:
            first.process.terminate()
        elif fault == cells.FULL:
            stack.enter_context(full(self.disk))
        elif fault == cells.READ_ONLY:
            stack.enter_context(read_only(self.run if self.run.exists() else self.disk / "home"))
        else:
            victim = {
                cells.HOST: lambda: census.one(environ=f"ALIGN_PROBE_DIR={self.run / 'candidate'}"),
                cells.OTHER_HOST: lambda: census.one(environ=f"ALIGN_PROBE_DIR={self.run / 'reference'}"),
                cells.GUARDIAN: lambda: census.one("/align/run/guardian.py"),
                cells.RAYLET: lambda: census.one("/raylet/raylet --"),
                cells.GCS: lambda: census.one("/gcs/gcs_server --"),
                cells.PIP: lambda: census.one("run_module('pip'"),
            }[fault]()
            victim.kill()

    def _two(self, first: Command) -> Ended:
        """A second command while the first is held; then the first goes on to its end."""
        second = self._second()
        waits = self.cell.stage in ("environment", "model")
        if waits:  # for what the first builds
            self._wait_for(
                lambda: _waits_for_a_lock(second.process.pid), second, "the second command waits for nothing"
            )
            (self.stall / "release").touch()
        ends = [second.wait()]
        (self.stall / "release").touch()
        ends.append(first.wait())
        if waits:  # which of two that waited came first does not matter
            ends.sort(key=lambda end: -end.code)
        assert ends[1].code == 0, f"the other command: {ends[1]}"
        return ends[0]

    def _wait_for(self, ready: Callable[[], bool], command: Command, complaint: str) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not ready():
            ended = command.process.poll()
            assert ended is None, f"{complaint}: exit code {ended}: {command.out.read_text()}{command.err.read_text()}"
            assert time.monotonic() < deadline, complaint
            time.sleep(0.02)

    def _halves(self) -> list[str]:
        """What was left half-way and looks whole."""
        found = half_files(self.run) if self.run.exists() else []
        undisturbed = self.cell.exit == 0 or self.cell.fault in (cells.SAME_OUT, cells.TWO_RESUMES)
        if undisturbed:
            return found
        if self.cell.stage == "environment":
            builder = Builder(Path(self.env["ALIGN_HOME"]), self.stall / "locks")
            found += ["the environment"] if builder.environment(_ENVIRONMENT).ready else []
        if self.cell.stage == "model":
            found += map(str, Path(self.env["ALIGN_HOME"]).glob("models/qwen3-*"))
        if self.cell.stage in ("launch", "capture") and traces_taken(self.run):
            found.append("the traces")
        return found

    def _go_on(self) -> tuple[str, Ended]:
        """By ``align resume``, or by the same command where there is no run yet."""
        if self.cell.stage == "environment":
            return "the same command", self._held("again").wait()
        if not self.run.exists():
            return "the same command", self._start(align_command(*self._arguments()), "again").wait()
        return cells.RESUME, self._start(align_command("resume", str(self.run)), "again").wait()

    def temporary_files(self) -> list[str]:
        """What of this project is left in the directory of temporary files; libraries keep caches there."""
        return sorted(name for name in os.listdir(self.temp) if name.startswith("align-"))

    def _short(self, text: str) -> str:
        """Without what is this test's own."""
        for path, name in ((self.run, "RUN"), (self.env["ALIGN_HOME"], "ALIGN_HOME"), (REPOSITORY, ".")):
            text = text.replace(str(path), name)
        return " ".join(text.split())


def _waits_for_a_lock(pid: int) -> bool:
    """Whether the process has opened a lock file; the one that holds it has it too, so ask of the second."""
    with contextlib.suppress(OSError):
        return any(os.readlink(link).endswith(".lock") for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
