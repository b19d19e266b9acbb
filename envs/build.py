"""Building virtual environments so that a killed build is never taken for a finished one.

An environment is built at its final path (its scripts contain it) while a lock file is held, and its marker
file is written last. No marker: not finished, and the next build starts it anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from envs import lockfile
from envs.errors import EnvError
from envs.home import SPACE_HINT, WRITABLE_HINT, align_home, make_directory, os_error, write_atomically
from envs.lockfile import Lock, Step
from envs.run import HEARTBEAT_S, Outcome, Runner, run

#: How long a waiting builder looks for the number of a live holder before it speaks all the same.
HOLDER_S = 2.0

#: Names of the environments, in the order in which they are built.
NAMES = ("driver", "lmdeploy", "vllm")

MARKER = "align-env.json"

_DIRECTORY = re.compile(r"[a-z]+-[0-9a-f]{12}")

#: Receives one finished line of text.
Progress = Callable[[str], None]

# pip ends with its builder, even if that is killed by force: 1 is PR_SET_PDEATHSIG, 15 SIGTERM.
_PIP = (
    "import ctypes, runpy, sys; ctypes.CDLL(None).prctl(1, 15); "
    "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
# Settings that would put packages elsewhere; where pip finds them (index, proxy) stays the user's.
_UNWANTED = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"}) | {
    f"PIP_{option}"
    for option in (
        *("TARGET", "PREFIX", "ROOT", "USER", "CONSTRAINT", "REQUIREMENT", "NO_BINARY", "ONLY_BINARY"),
        *("REQUIRE_VIRTUALENV", "PYTHON", "DRY_RUN", "QUIET", "LOG"),
    )
}
_FULL_DISK = ("No space left on device", "Errno 28", "Disk quota exceeded")
_READ_ONLY = ("Read-only file system", "Errno 30", "Permission denied", "Errno 13")
_NO_PACKAGE = (
    "No matching distribution",
    "Temporary failure",
    "Connection",
    "ProxyError",
    "timed out",
    "SSLError",
)


@dataclass(frozen=True)
class Environment:
    """One virtual environment, built or not.

    Attributes:
        name: ``driver``, ``lmdeploy`` or ``vllm``.
        key: hexadecimal key of its content (SHA-256).
        path: directory of the virtual environment.
        ready: built completely, with its base interpreter still in place.
        versions: pinned version of every package in it.
    """

    name: str
    key: str
    path: Path
    ready: bool
    versions: dict[str, str]

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The directory that packages are installed in."""
        return self.path / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"


def _is_ready(path: Path, key: str) -> bool:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # exists() follows the link to the base interpreter, which may have been removed since.
    return isinstance(marker, dict) and marker.get("key") == key and (path / "bin" / "python").exists()


@dataclass
class Builder:
    """Builds and finds environments below one ``home``; ``runner`` and ``locks`` are replaced by tests."""

    home: Path = field(default_factory=align_home)
    locks: Path = lockfile.LOCKS
    runner: Runner = run

    def environment(self, name: str) -> Environment:
        """Return the environment as it is now, without building anything.

        Raises:
            EnvError: unknown name or damaged lock.
        """
        return self._environment(lockfile.load(name, self.locks))

    def _environment(self, lock: Lock) -> Environment:
        key = lock.key()
        path = self.home / "envs" / f"{lock.name}-{key[:12]}"
        return Environment(lock.name, key, path, _is_ready(path, key), lock.versions)

    def ensure(self, name: str, progress: Progress | None = None, *, rebuild: bool = False) -> Environment:
        """Return the finished environment, building it first where necessary (minutes, needs the network).

        If somebody else is building it, wait for that and use the result.

        Args:
            name: of the environment.
            progress: receives lines for the user, without the environment's name.
            rebuild: build even if it is finished.

        Raises:
            EnvError: it cannot be built; nothing is left that could be taken for a finished environment.
        """
        say = progress or (lambda line: None)
        lock = lockfile.load(name, self.locks)
        found = self._environment(lock)
        if found.ready and not rebuild:
            return found
        make_directory(found.path.parent)
        logs = make_directory(self.home / "logs")
        with self._exclusive(found, say) as descriptor:
            found = self._environment(lock)
            if found.ready and not rebuild:
                return found
            try:
                self._discard(found, say, rebuild)
                self.check_space([name])
                log = logs / f"{found.path.name}.log"
                log.write_text("", encoding="utf-8")
                _Build(lock, found, self.runner, log, say, descriptor).run()
            except OSError as error:
                shutil.rmtree(found.path, ignore_errors=True)
                raise os_error(error, found.path, f"build the {name} environment") from error
            except EnvError:
                shutil.rmtree(found.path, ignore_errors=True)
                raise
        return self._environment(lock)

    def check_space(self, names: Sequence[str]) -> None:
        """Raise EnvError unless the disk has room for those of ``names`` that are still to be built."""
        locks = [lockfile.load(name, self.locks) for name in names]
        needed = sum(lock.disk_mb for lock in locks if not self._environment(lock).ready)
        existing = self.home
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free // 1_000_000
        if needed > free:
            what = f"building {', '.join(names)} needs {needed / 1000:.1f} GB"
            raise EnvError(f"{what}, and the disk of {self.home} has {free / 1000:.1f} GB free", SPACE_HINT)

    def directories(self) -> list[Path]:
        """Every environment below the home, of whatever lock, finished or not; sorted by name."""
        found = (self.home / "envs").glob("*-*")
        return sorted(path for path in found if path.is_dir() and _DIRECTORY.fullmatch(path.name))

    def clean(self, progress: Progress | None = None, keep: Callable[[Path], str] = lambda path: "") -> int:
        """Remove every environment that nobody is building, finished or not; return how many were removed.

        Args:
            progress: receives a line for each environment.
            keep: asked about each directory while nobody can build it; answers why it stays, or nothing.

        Raises:
            EnvError: one cannot be removed; it is not taken for a finished one any more.
        """
        say = progress or (lambda line: None)
        removed = 0
        for path in self.directories():
            try:
                with open(path.with_name(f"{path.name}.lock"), "a", encoding="utf-8") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        say(f"{path.name} is being built: kept")
                        continue
                    if why := keep(path):
                        say(f"{path.name} {why}: kept")
                        continue
                    (path / MARKER).unlink(missing_ok=True)
                    shutil.rmtree(path)
            except OSError as error:
                raise os_error(error, path, "remove the environment") from error
            removed += 1
            say(f"{path.name} removed")
        return removed

    def _discard(self, found: Environment, say: Progress, rebuild: bool) -> None:
        if not found.path.exists():
            return
        marker = found.path / MARKER
        why = "rebuild asked for" if rebuild else "its interpreter is gone" if marker.exists() else "left unfinished"
        say(f"removing what is at {found.path}: {why}")
        # The marker goes first: a removal that is killed half-way must not look finished.
        marker.unlink(missing_ok=True)
        shutil.rmtree(found.path)

    @contextmanager
    def _exclusive(self, found: Environment, say: Progress) -> Iterator[int]:
        """Hold the lock of an environment and yield its descriptor; wait for another builder and say so."""
        path = found.path.with_name(f"{found.path.name}.lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise os_error(error, path, f"lock the {found.name} environment") from error
        try:
            start = time.monotonic()
            said = -HEARTBEAT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - start
                    # The holder writes its number just after it has the lock, over that of the one before.
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                    if waited - said >= HEARTBEAT_S and (waited > HOLDER_S or Path("/proc", holder or "?").exists()):
                        say(f"another build is under way (process {holder}); waiting for it ({waited:.0f} s)")
                        said = waited
                    time.sleep(0.2)
                except OSError as error:
                    raise os_error(error, path, f"lock the {found.name} environment") from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass
class _Build:
    """One build of one environment, from nothing to its marker."""

    lock: Lock
    target: Environment
    runner: Runner
    log: Path
    say: Progress
    descriptor: int

    def run(self) -> None:
        start = time.monotonic()
        self._require_venv()
        total = len(self.lock.steps) + 2
        # -I: neither the user's PYTHONPATH nor the current directory may leak into what is built.
        self._stage(1, total, "virtual environment", [sys.executable, "-I", "-m", "venv", str(self.target.path)])
        for number, step in enumerate(self.lock.steps, start=2):
            self._install(number, total, step)
        check = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in self.lock.imports)
        self._stage(total, total, "import check", [str(self.target.python), "-I", "-c", check])
        elapsed = time.monotonic() - start
        marker = {
            "name": self.lock.name,
            "key": self.target.key,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "torch_build": self.lock.torch_build,
            "seconds": round(elapsed, 1),
            "packages": self.lock.versions,
        }
        os.sync()  # the marker vouches for every file before it
        write_atomically(self.target.path / MARKER, json.dumps(marker, indent=2, sort_keys=True) + "\n")
        self.say(f"ready after {elapsed:.0f} s: {self.target.path}")

    def _require_venv(self) -> None:
        missing = [module for module in ("venv", "ensurepip") if find_spec(module) is None]
        if missing:
            package = "python{}.{}-venv".format(*sys.version_info[:2])
            raise EnvError(
                f"{sys.executable} cannot create environments: it has no module {' and '.join(missing)}",
                f"install it (Debian: apt-get install {package}) or name another: PYTHON=/path make env",
            )

    def _install(self, number: int, total: int, step: Step) -> None:
        packages = self.target.site_packages
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-color"]
        pip = [
            str(self.target.python),
            "-I",
            "-c",
            _PIP,
            *step.pip_arguments(packages, platform.machine()),
            *options,
        ]
        count = len(step.packages)
        name = step.name if count == 1 else f"{step.name}: {count} packages"
        self._stage(number, total, name, pip, step)
        for relative in step.remove:
            shutil.rmtree(packages / relative, ignore_errors=True)
        if any(package.startswith("torch==") for package in step.packages):
            self._require_torch_build(packages / "torch" / "version.py")

    def _require_torch_build(self, version_file: Path) -> None:
        found = version_file.read_text(encoding="utf-8")
        cuda = re.search(r"^cuda\b.*=\s*(.+)$", found, re.MULTILINE)
        if self.lock.torch_build == "cpu" and cuda and cuda.group(1).strip() != "None":
            raise EnvError(
                f"pip chose a CUDA build of torch ({cuda.group(1).strip()}) for the {self.lock.name} "
                "environment, and a CPU build is needed",
                "point pip at PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL=…) or at a directory that "
                "holds the wheel (PIP_FIND_LINKS=/path), then: make env",
            )

    def _stage(self, number: int, total: int, name: str, argv: Sequence[str], step: Step | None = None) -> None:
        label = f"{number}/{total} {name}"
        self.say(label)
        start = time.monotonic()

        def beat(seconds: float, line: str) -> None:
            shown = " ".join(line.split())
            self.say(f"{label} · {seconds:.0f} s" + (f" · {shown[:80]}" if shown else ""))

        env = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        env |= {"PYTHONNOUSERSITE": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        env |= step.env if step else {}
        outcome = self.runner(argv, env=env, log=self.log, beat=beat, keep_fds=(self.descriptor,))
        if outcome.code != 0:
            raise self._failure(label, outcome)
        self.say(f"{label} · done in {time.monotonic() - start:.0f} s")

    def _failure(self, label: str, outcome: Outcome) -> EnvError:
        text = "\n".join(outcome.tail)
        what = f"cannot build the {self.lock.name} environment: step {label} failed"
        if any(sign in text for sign in _FULL_DISK):
            return EnvError(f"{what}: the disk is full ({self.target.path} or the temporary directory)", SPACE_HINT)
        if any(sign in text for sign in _READ_ONLY):
            return EnvError(f"{what}: {self.target.path} or the temporary directory cannot be written", WRITABLE_HINT)
        errors = [line for line in outcome.tail if "error" in line.lower()] or list(outcome.tail)
        reason = errors[-1].strip() if errors else f"exit code {outcome.code}"
        retry = f"{'PYTHON=' + sys.executable + ' ' if os.environ.get('PYTHON') else ''}make env"
        hint = f"the whole output is in {self.log}; try again with: {retry}"
        if any(sign in text for sign in _NO_PACKAGE):
            hint = f"check the network and pip's settings (PIP_INDEX_URL, proxy); {hint}"
        return EnvError(f"{what}: {reason[:300]}", hint)


def environment(name: str) -> Environment:
    """Return the environment ``name`` (``driver``, ``lmdeploy``, ``vllm``) as it is now, built or not."""
    return Builder().environment(name)


def ensure(name: str, progress: Progress | None = None) -> Environment:
    """Return the finished environment ``name``, built first where necessary; see :meth:`Builder.ensure`."""
    return Builder().ensure(name, progress)
