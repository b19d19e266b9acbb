"""The command: warm start, exit codes, launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs import bootstrap
from envs.build import Builder
from envs.errors import EnvError
from envs.home import REPOSITORY
from envs.run import Outcome
from tests.unit.envs.fakes import LOCK, FakePip, write_lock

NAMES = ("driver", "lmdeploy", "vllm")


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    """A builder of three tiny environments with the real names."""
    for name in NAMES:
        write_lock(tmp_path / "locks", LOCK.replace("tiny", name), name)
    return Builder(tmp_path / "home", tmp_path / "locks", FakePip())


@pytest.fixture
def command(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Makes the command use ``builder``."""
    monkeypatch.setattr(bootstrap, "Builder", lambda: builder)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return builder


def test_all_builds_every_environment_and_prints_the_drivers_python(
    command: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bootstrap.main(["all", "--print-python"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{command.environment('driver').python}\n"
    assert all(command.environment(name).ready for name in NAMES)
    assert all(f"[{name}] 1/4 virtual environment" in err for name in NAMES)
    # The driver is finished before an engine starts: it fills the cache that they share.
    assert err.index("[driver] ready") < min(err.index("[lmdeploy] 1/4"), err.index("[vllm] 1/4"))

    assert bootstrap.main(["all"]) == 0
    assert capsys.readouterr() == ("", "")


def test_quiet_prints_nothing(command: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap.main(["vllm", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not command.environment("driver").ready


def test_failure_of_one_engine_is_one_message_and_the_other_is_finished(
    command: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: Sequence[str]) -> Outcome | None:
        broken = any("vllm-" in argument for argument in argv) and "two==2.0" in argv
        return Outcome(1, ("ERROR: broken wheel",)) if broken else None

    assert isinstance(command.runner, FakePip)
    command.runner.before = fail
    assert bootstrap.main(["all"]) == 2
    message = capsys.readouterr().err
    assert "align: cannot build the vllm environment: step 3/4 second: 2 packages failed" in message
    assert "Traceback" not in message
    assert message.rstrip().splitlines()[-1].startswith("→ ")
    assert message.rstrip().endswith("make env")
    assert command.environment("lmdeploy").ready
    assert not command.environment("vllm").ready


def test_debug_raises(command: Builder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command.home = tmp_path / "file" / "home"
    with pytest.raises(EnvError):
        bootstrap.main(["driver", "--debug"])


def _command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "envs.bootstrap", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_unwritable_home_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _command("all", ALIGN_HOME=str(tmp_path / "file"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("→ name a writable directory")


def test_bootstrap_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; import envs.bootstrap; "
        "files = [getattr(module, '__file__', None) or '' for module in sys.modules.values()]; "
        "print([file for file in files if 'site-packages' in file])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_wrong_python_is_told_before_anything_else(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 12, 1, 'final', 0); "
        "runpy.run_module('envs.bootstrap', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("align: Python 3.11 is needed, and ")
    assert "PYTHON=/path/to/python3.11 make env" in done.stderr


def test_warm_start_is_quick(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "Builder", lambda: builder)
    bootstrap.build(builder, NAMES, bootstrap.Screen(quiet=True))
    start = time.perf_counter()
    bootstrap.build(builder, NAMES, bootstrap.Screen(quiet=True))
    assert time.perf_counter() - start < 0.1


def test_launcher_runs_this_checkout_with_exact_arguments(builder: Builder, tmp_path: Path) -> None:
    checkout = tmp_path / "it's a checkout"
    (checkout / "align").mkdir(parents=True)
    (checkout / "align" / "__init__.py").touch()
    code = "import os, sys; print(sys.argv[1:], os.environ['ALIGN_HOME']); sys.exit(1)"
    (checkout / "align" / "__main__.py").write_text(code)
    driver = builder.ensure("driver")
    launcher = bootstrap.write_launcher(builder, driver, checkout)
    # A module of the same name in the current directory must not win.
    (tmp_path / "align.py").write_text("raise SystemExit(99)")
    done = subprocess.run(
        [launcher, "run", "a b", "c'd", "$e"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "ALIGN_HOME"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"{['run', 'a b', chr(99) + chr(39) + 'd', '$e']} {builder.home}\n"


def test_launcher_differs_by_checkout_and_is_written_once(builder: Builder, tmp_path: Path) -> None:
    driver = builder.ensure("driver")
    one = bootstrap.write_launcher(builder, driver, tmp_path / "one")
    two = bootstrap.write_launcher(builder, driver, tmp_path / "two")
    assert one != two
    before = one.stat().st_mtime_ns
    assert bootstrap.write_launcher(builder, driver, tmp_path / "one").stat().st_mtime_ns == before
    shutil.rmtree(one.parent)
    assert bootstrap.write_launcher(builder, driver, tmp_path / "one").is_file()
