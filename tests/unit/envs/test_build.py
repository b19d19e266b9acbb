"""The builder: finished means finished, one build at a time, and errors that say what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from envs.build import MARKER, Builder
from envs.errors import EnvError
from envs.home import REPOSITORY
from envs.run import Outcome
from tests.unit.envs.fakes import LOCK, FakePip, write_lock


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    """A builder of the tiny lock with a fake pip."""
    return Builder(tmp_path / "home", write_lock(tmp_path / "locks"), FakePip())


def _pip(builder: Builder) -> FakePip:
    assert isinstance(builder.runner, FakePip)
    return builder.runner


def test_build_runs_the_steps_in_order_and_is_reused(builder: Builder) -> None:
    lines: list[str] = []
    assert not builder.environment("tiny").ready
    built = builder.ensure("tiny", lines.append)
    calls = _pip(builder).calls
    assert [("venv" in argv, "pip" in " ".join(argv)) for argv, _ in calls[:3]] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "one==1.0" in calls[1][0]
    assert "two==2.0" in calls[2][0]
    assert "COLOUR" not in calls[1][1]
    assert calls[2][1]["COLOUR"] == "blue"
    assert built.ready
    assert built.versions == {"one": "1.0", "two": "2.0", "three": "3.0"}
    assert not (built.site_packages / "two" / "lib").exists()
    assert (built.site_packages / "two").exists()
    assert lines[0] == "1/4 virtual environment"
    assert lines[-1].startswith("ready after")

    assert builder.ensure("tiny") == built
    assert len(calls) == 4


def test_builds_see_neither_the_users_path_nor_settings_that_redirect_pip(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///mirror")
    builder.ensure("tiny")
    for _, env in _pip(builder).calls:
        assert "PYTHONPATH" not in env
        assert "PIP_TARGET" not in env
        assert env["PIP_INDEX_URL"] == "file:///mirror"


def test_rebuild_starts_anew(builder: Builder) -> None:
    built = builder.ensure("tiny")
    (built.path / "old").touch()
    lines: list[str] = []
    assert builder.ensure("tiny", lines.append, rebuild=True).ready
    assert not (built.path / "old").exists()
    assert "rebuild asked for" in lines[0]


def test_removed_base_interpreter_makes_it_unready(builder: Builder) -> None:
    built = builder.ensure("tiny")
    built.python.unlink()
    built.python.symlink_to(builder.home / "no-such-python")
    assert not builder.environment("tiny").ready
    lines: list[str] = []
    assert builder.ensure("tiny", lines.append).ready
    assert "its interpreter is gone" in lines[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "other"}'])
def test_damaged_marker_is_not_finished(builder: Builder, content: str) -> None:
    built = builder.ensure("tiny")
    (built.path / MARKER).write_text(content)
    assert not builder.environment("tiny").ready
    assert builder.ensure("tiny").ready


def test_marker_records_what_was_built(builder: Builder) -> None:
    built = builder.ensure("tiny")
    marker = json.loads((built.path / MARKER).read_text())
    assert marker["key"] == built.key
    assert marker["packages"] == built.versions
    assert built.path.name == f"tiny-{built.key[:12]}"


class _Script(NamedTuple):
    argv: list[str]
    journal: Path


@pytest.fixture
def script(builder: Builder, tmp_path: Path) -> _Script:
    """The same build in a process of its own, with steps of 0.4 s."""
    journal = tmp_path / "journal"
    code = f"""
        import sys
        from pathlib import Path
        from envs.build import Builder
        from tests.unit.envs.fakes import FakePip
        pip = FakePip(seconds=0.4, journal=Path({str(journal)!r}))
        builder = Builder(Path({str(builder.home)!r}), Path({str(builder.locks)!r}), pip)
        print("ready", builder.ensure("tiny", lambda line: print(line, flush=True)).ready)
        """
    return _Script([sys.executable, "-c", textwrap.dedent(code)], journal)


def _start(script: _Script) -> subprocess.Popen[str]:
    return subprocess.Popen(
        script.argv,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_killed_build_is_not_finished_and_is_built_anew(builder: Builder, script: _Script) -> None:
    process = _start(script)
    half = builder.environment("tiny")
    deadline = time.monotonic() + 30
    while not half.python.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert half.python.exists()
    assert not builder.environment("tiny").ready
    (half.path / "debris").touch()

    lines: list[str] = []
    assert builder.ensure("tiny", lines.append).ready
    assert "left unfinished" in lines[0]
    assert not (half.path / "debris").exists()


def test_two_builders_at_once_build_once(builder: Builder, script: _Script) -> None:
    processes = [_start(script), _start(script)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert script.journal.read_text() == "built\n"
    assert all(output.endswith("ready True\n") for output in outputs)
    (waited,) = (output for output in outputs if "another build is under way" in output)
    assert "1/4" not in waited
    pids = {str(process.pid) for process in processes}
    assert any(f"(process {pid})" in waited for pid in pids)


def test_unwritable_home_says_what_to_do(builder: Builder, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    builder.home = file / "align"
    with pytest.raises(EnvError, match="Not a directory") as caught:
        builder.ensure("tiny")
    assert "ALIGN_HOME=/path" in caught.value.hint
    assert caught.value.exit_code == 2


def test_home_without_write_permission_says_what_to_do(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    # The superuser may write everywhere, so that mode bits would not do here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(EnvError, match="permission denied") as caught:
        builder.ensure("tiny")
    assert "ALIGN_HOME=/path" in caught.value.hint


def test_read_only_home_serves_what_is_built(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builder.ensure("tiny")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert builder.ensure("tiny") == built


def test_full_disk_before_the_build(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(builder.locks)._replace(free=900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EnvError, match=r"building tiny needs 0\.0 GB") as caught:
        builder.ensure("tiny")
    assert "free some space" in caught.value.hint
    assert _pip(builder).calls == []


def _full_disk(argv: Sequence[str]) -> Outcome | None:
    if "two==2.0" in argv:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _pip_on_a_full_disk(argv: Sequence[str]) -> Outcome | None:
    line = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    return Outcome(1, ("Collecting two", line)) if "two==2.0" in argv else None


@pytest.mark.parametrize("before", [_full_disk, _pip_on_a_full_disk])
def test_full_disk_during_the_build_leaves_nothing(
    builder: Builder, before: Callable[[Sequence[str]], Outcome | None]
) -> None:
    _pip(builder).before = before
    with pytest.raises(EnvError, match="full") as caught:
        builder.ensure("tiny")
    assert "free some space" in caught.value.hint
    assert not builder.environment("tiny").path.exists()


def test_failing_step_names_the_reason_the_log_and_the_retry(builder: Builder) -> None:
    tail = ("Collecting two", "ERROR: No matching distribution found for two==2.0", "trailing chatter")
    _pip(builder).before = lambda argv: Outcome(1, tail) if "two==2.0" in argv else None
    with pytest.raises(EnvError, match="step 3/4 second: 2 packages failed: ERROR: No matching dist") as caught:
        builder.ensure("tiny")
    assert str(builder.home / "logs") in caught.value.hint
    assert "check the network" in caught.value.hint
    assert caught.value.hint.endswith("make env")
    assert not builder.environment("tiny").path.exists()


def test_cuda_build_of_torch_is_refused(builder: Builder) -> None:
    write_lock(builder.locks, LOCK.replace("one==1.0", "torch==2.13.0"))
    site = builder.environment("tiny").site_packages

    def install(argv: Sequence[str]) -> Outcome | None:
        if "torch==2.13.0" in argv:
            (site / "torch").mkdir()
            (site / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
        return None

    _pip(builder).before = install
    with pytest.raises(EnvError, match=r"a CUDA build of torch \('13.0'\)") as caught:
        builder.ensure("tiny")
    assert "PIP_EXTRA_INDEX_URL" in caught.value.hint
    assert not builder.environment("tiny").ready


def test_missing_venv_module_names_the_package(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.build.find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(EnvError, match="no module ensurepip") as caught:
        builder.ensure("tiny")
    assert "apt-get install python3.11-venv" in caught.value.hint


def test_clean_removes_environments_and_nothing_else(builder: Builder) -> None:
    built = builder.ensure("tiny")
    other = builder.home / "envs" / "my-notes"
    other.mkdir()
    assert builder.clean() == 1
    assert not built.path.exists()
    assert other.exists()
    assert builder.clean() == 0


def test_clean_keeps_what_it_is_told_to(builder: Builder) -> None:
    built = builder.ensure("tiny")
    other = builder.home / "envs" / "tiny-0123456789ab"
    other.mkdir()
    assert builder.directories() == sorted([built.path, other])
    lines: list[str] = []
    assert builder.clean(lines.append, lambda path: "is wanted" if path == built.path else "") == 1
    assert sorted(lines) == sorted([f"{built.path.name} is wanted: kept", f"{other.name} removed"])
    assert builder.environment("tiny").ready
    assert not other.exists()


def test_clean_that_cannot_remove_says_so_and_leaves_nothing_that_looks_finished(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.ensure("tiny")

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(EnvError, match=r"cannot remove the environment: .*Read-only file system"):
        builder.clean()
    assert not builder.environment("tiny").ready


def test_clean_keeps_what_is_being_built(builder: Builder, script: _Script) -> None:
    process = _start(script)
    half = builder.environment("tiny")
    deadline = time.monotonic() + 30
    while not half.python.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    lines: list[str] = []
    assert builder.clean(lines.append) == 0
    assert lines == [f"{half.path.name} is being built: kept"]
    assert process.communicate(timeout=30)[0].endswith("ready True\n")
