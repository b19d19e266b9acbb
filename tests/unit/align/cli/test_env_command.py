"""``align env``: list, build, clean, on tiny environments that a fake pip builds."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from align.cli import env
from align.errors import UserError
from envs import bootstrap, survey
from envs.build import NAMES, Builder
from envs.home import REPOSITORY
from tests.unit.envs.fakes import LOCK, FakePip, write_lock
from tests.unit.envs.test_installed import install


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """A builder of three tiny environments with the real names; the commands use it."""
    for name in NAMES:
        write_lock(tmp_path / "locks", LOCK.replace("tiny", name).replace("three==3.0", "torch-x==1"), name)
    made = Builder(tmp_path / "home", tmp_path / "locks", FakePip())
    monkeypatch.setattr(env, "Builder", lambda: made)
    return made


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> dict[Path, tuple[int, ...]]:
    """Processes by the directory that they run from; empty at first."""
    found: dict[Path, tuple[int, ...]] = {}
    monkeypatch.setattr(survey, "users", lambda paths, proc=None: {path: found.get(path, ()) for path in paths})
    return found


def old(builder: Builder, name: str = "vllm-0123456789ab", size: int = 2_000_000) -> Path:
    path = builder.home / "envs" / name
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * size)
    return path


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# -------------------------------------------------------------------------------------------------------------- list


def test_list(builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    built = builder.ensure("driver")
    install(built.site_packages, "ray", "2.60.0", {"ray/a.py": "a"})
    other = old(builder)
    assert env.list_all(json=True) == 0
    found = {Path(row["path"]): row for row in answer(capsys)["environments"]}
    assert {path.name.partition("-")[0]: row["state"] for path, row in found.items() if row["current"]} == {
        "driver": "built",
        "lmdeploy": "absent",
        "vllm": "absent",
    }
    assert found[built.path]["versions"] == {"ray": "2.60.0"}
    assert found[built.path]["key"] == built.key[:12]
    assert (found[other]["state"], found[other]["current"]) == ("unfinished", False)
    assert 2_000_000 <= found[other]["size"] < 2_010_000


def test_list_for_a_file(builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    old(builder)
    env.list_all(json=False)
    out = capsys.readouterr().out
    assert "\t" not in out
    *lines, build, clean = [re.split(" {2,}", line) for line in out.splitlines()]
    assert lines[0] == ["name", "key", "state", "size", "packages", "path"]
    assert lines[4][3] == "2 MB"
    assert build == ["next: align env build"]
    assert " ".join(clean).startswith("next: align env clean --old # frees 2 MB")
    assert [(line[0], line[2]) for line in lines[1:]] == [
        ("driver", "absent"),
        ("lmdeploy", "absent"),
        ("vllm", "absent"),
        ("vllm", "unfinished, old lock"),
    ]


def test_list_on_a_terminal(builder: Builder) -> None:
    def shown() -> str:
        text = io.StringIO()
        env.show(Console(file=text, force_terminal=True, color_system=None, width=80), env.rows(builder))
        return text.getvalue()

    assert shown().rstrip().endswith("next: align env build")
    for name in NAMES:
        builder.ensure(name)
    assert "next:" not in shown()
    old(builder)
    assert "next: align env clean --old" in shown()
    assert max(map(len, shown().splitlines())) <= max(80, len(str(builder.home)) + 40)


# ------------------------------------------------------------------------------------------------------------- build


def test_build_one_and_all(builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    assert env.build("vllm", rebuild=False, json=True) == 0
    assert [row["name"] for row in answer(capsys)["environments"]] == ["vllm"]
    assert [builder.environment(name).ready for name in NAMES] == [False, False, True]
    assert env.build("all", rebuild=False, json=False) == 0
    assert all(builder.environment(name).ready for name in NAMES)
    captured = capsys.readouterr()
    assert captured.out == "ready: driver, lmdeploy, vllm\n"
    assert "[driver] ready after" in captured.err


def test_a_new_driver_gets_the_command_of_this_checkout(builder: Builder) -> None:
    env.build("driver", rebuild=False, json=False)
    (launcher,) = builder.home.glob("bin/*/align")
    assert str(builder.environment("driver").python) in launcher.read_text()


def test_rebuild(builder: Builder, users: dict[Path, tuple[int, ...]]) -> None:
    built = builder.ensure("vllm")
    (built.path / "mine").touch()
    env.build("vllm", rebuild=False, json=False)
    assert (built.path / "mine").exists()
    env.build("vllm", rebuild=True, json=False)
    assert builder.environment("vllm").ready
    assert not (built.path / "mine").exists()


def test_what_processes_run_from_is_not_built_anew(builder: Builder, users: dict[Path, tuple[int, ...]]) -> None:
    built = builder.ensure("vllm")
    users[built.path] = (os.getpid(), 4321)
    with pytest.raises(UserError, match=r"in use by process 4321\n") as caught:
        env.build("vllm", rebuild=True, json=False)
    assert caught.value.hint == "wait until it has ended, or: kill 4321"
    assert builder.environment("vllm").ready


def test_the_own_environment_is_rebuilt_by_the_interpreter_below_it(
    builder: Builder, users: dict[Path, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = builder.ensure("driver")
    monkeypatch.setattr(sys, "prefix", str(built.path))
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/base-python")
    calls: list[list[str]] = []
    code = 0

    def run(argv: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert env["PYTHONPATH"] == str(REPOSITORY)
        calls.append(argv)
        return subprocess.CompletedProcess(argv, code)

    monkeypatch.setattr(subprocess, "run", run)
    env.build("all", rebuild=True, json=False)
    assert calls == [["/usr/bin/base-python", "-P", "-m", "envs.bootstrap", "driver", "--rebuild"]]
    assert built.python.exists(), "not removed by the process that runs from it"
    assert builder.environment("vllm").ready
    code = 2
    with pytest.raises(UserError, match="was not built again"):
        env.build("driver", rebuild=True, json=False)


def test_a_failed_build_is_the_builders_message(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise UserError("no space", "free some")

    monkeypatch.setattr(bootstrap, "build", fail)
    with pytest.raises(UserError, match="no space"):
        env.build("vllm", rebuild=False, json=False)


# ------------------------------------------------------------------------------------------------------------- clean


def test_clean_old(builder: Builder, users: dict[Path, tuple[int, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    current = builder.ensure("vllm")
    other = old(builder)
    assert env.clean((), old=True, json=True) == 0
    found = answer(capsys)
    assert (found["removed"], found["kept"]) == ([str(other)], {})
    assert 2_000_000 <= found["bytes"] < 2_010_000
    assert builder.environment("vllm").ready
    assert current.path.exists()
    assert env.clean((), old=True, json=False) == 0
    assert capsys.readouterr().out == "nothing to remove: there is no environment of another lock\n"


def test_clean_old_keeps_what_is_used_or_being_built(
    builder: Builder, users: dict[Path, tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    used, building, free = (old(builder, f"vllm-{digit * 12}") for digit in "abc")
    users[used] = (77, 78)
    with open(f"{building}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert env.clean((), old=True, json=False) == 0
    assert (used.exists(), building.exists(), free.exists()) == (True, True, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"removed {free}: 2 MB")
    assert lines[1:] == [
        f"kept {used.name}: it is in use by process 77 78",
        f"kept {building.name}: it is being built",
    ]


def test_clean_by_name(builder: Builder, users: dict[Path, tuple[int, ...]]) -> None:
    lmdeploy, vllm, other = builder.ensure("lmdeploy").path, builder.ensure("vllm").path, old(builder)
    assert env.clean((other.name,), old=False, json=False) == 0
    assert (other.exists(), vllm.exists()) == (False, True)
    old(builder)
    assert env.clean(("vllm",), old=False, json=False) == 0
    assert (other.exists(), vllm.exists(), lmdeploy.exists()) == (False, False, True)


def test_a_named_one_that_stays_is_a_failure(
    builder: Builder, users: dict[Path, tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = builder.ensure("driver").path
    users[path] = (os.getpid(),)
    assert env.clean(("driver",), old=False, json=True) == 2
    assert answer(capsys)["kept"] == {path.name: f"is in use by process {os.getpid()} (this command)"}
    assert builder.environment("driver").ready


@pytest.mark.parametrize(
    ("names", "old_too", "words"),
    [((), False, "nothing was named"), (("vllm",), True, "both names and --old"), (("nope",), False, "'nope'")],
)
def test_clean_that_cannot_be_understood(builder: Builder, names: tuple[str, ...], old_too: bool, words: str) -> None:
    builder.ensure("vllm")
    with pytest.raises(UserError, match=words):
        env.clean(names, old_too, json=False)
    assert builder.environment("vllm").ready


# ------------------------------------------------------------------------------------------------- the command itself


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "align", "env", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", "ALIGN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_env_alone_lists(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--json", home=tmp_path / "home")
    assert done.returncode == 0
    assert [row["state"] for row in json.loads(done.stdout)["environments"]] == ["absent"] * 3
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build", "nope"), "there is no environment called 'nope'"),
        (("clean",), "nothing was named"),
        (("nope",), "No such command 'nope'"),
        (("--json", "clean", "--old"), "write it after clean"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments, home=tmp_path / "home")
    assert done.returncode == 2
    assert words in done.stderr
    assert "next: " in done.stderr
    assert "defect" not in done.stderr


@pytest.mark.parametrize("command", [(), ("list",), ("build",), ("clean",)])
def test_help_teaches(tmp_path: Path, command: tuple[str, ...]) -> None:
    text = " ".join(run(*command, "--help", home=tmp_path).stdout.split())
    assert "Example" in text
    assert " ".join(("align env", *command)) in text
