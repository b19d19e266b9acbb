"""``align doctor``: what it prints, for people and for programs, and its exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from align.cli import doctor
from align.doctor.types import Check
from align.errors import UserError
from envs.home import REPOSITORY

OK = Check("memory", "ok", "22 GB")
WARNING = Check("older environments", "warning", "2 GB", "align env clean --old")
MISSING = Check("vllm environment", "missing", "not built", "align env build vllm")
UNKNOWN = Check("loopback", "unknown", "ValueError: what")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts answers in place of the examination's."""

    def put(*checks: Check) -> None:
        monkeypatch.setattr(doctor, "examine", lambda machine, needs: iter(checks))

    return put


@pytest.mark.parametrize(
    ("checks", "code"),
    [((OK,), 0), ((OK, WARNING, UNKNOWN), 0), ((OK, MISSING), 2), ((WARNING, MISSING, UNKNOWN), 2)],
)
def test_exit_code(found: Callable[..., None], checks: tuple[Check, ...], code: int) -> None:
    found(*checks)
    assert doctor.execute("simnpu", json=False) == code
    assert doctor.execute("simnpu", json=True) == code


def test_a_file_gets_one_row_a_line(found: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found(OK, MISSING)
    doctor.execute("simnpu", json=False)
    assert capsys.readouterr().out.splitlines() == [
        "check             state    found      mend",
        "memory            ok       22 GB",
        "vllm environment  missing  not built  align env build vllm",
    ]


def test_an_object(found: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    found(OK, WARNING, MISSING, UNKNOWN)
    doctor.execute("ascend", json=True)
    record = json.loads(capsys.readouterr().out)
    assert (record["device"], record["missing"], record["warning"], record["unknown"]) == ("ascend", 1, 1, 1)
    assert record["checks"][2] == {
        "name": "vllm environment",
        "state": "missing",
        "found": "not built",
        "mend": "align env build vllm",
    }
    assert record["needs"]["memory"] > record["needs"]["memory_least"] > 0


def on_terminal(*checks: Check) -> list[str]:
    text = io.StringIO()
    doctor.show(Console(file=text, force_terminal=True, color_system=None, width=80, emoji=False), iter(checks))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_terminal_of_80_columns_shows_commands_whole() -> None:
    long = Check("earlier runs", "warning", "3 processes :x: [red]of a run " * 3, f"kill -9 {' '.join(['12345'] * 30)}")
    lines = on_terminal(OK, long, MISSING)
    assert "  → " + long.mend in lines, "a command that is broken into lines cannot be copied"
    assert max(len(line) for line in lines if "→" not in line) <= 80
    assert "memory                ok       22 GB" in lines
    assert any(":x: [red]of a run" in line for line in lines), "shown as it is"
    assert lines.index("  → align env build vllm") == lines.index("vllm environment      missing  not built") + 1


@pytest.mark.parametrize(
    ("checks", "sentence"),
    [
        ((OK,), "nothing is missing; next: make align MODEL=qwen3"),
        ((OK, WARNING, UNKNOWN), "nothing is missing; 1 warning, 1 unknown; next: make align MODEL=qwen3"),
        ((MISSING, MISSING, WARNING), "2 missing, 1 warning: run the commands above"),
    ],
)
def test_the_last_sentence(checks: tuple[Check, ...], sentence: str) -> None:
    assert doctor.summary(checks) == sentence
    assert sentence in on_terminal(*checks)


@pytest.mark.parametrize("device", ["camb", "npu", ""])
def test_a_device_that_is_not_supported(device: str) -> None:
    with pytest.raises(UserError, match="not known or not supported") as caught:
        doctor.execute(device, json=False)
    assert caught.value.hint == "use one of: simnpu, ascend"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "align", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_empty_home_lacks_its_environments_and_stays_empty(tmp_path: Path) -> None:
    done = run("--json", ALIGN_HOME=str(tmp_path / "home"))
    assert (done.returncode, done.stderr) == (2, "")
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert [states[f"{name} environment"] for name in ("driver", "lmdeploy", "vllm")] == ["missing"] * 3
    assert (states["ALIGN_HOME"], states["loopback"], states["model qwen3"]) == ("ok", "ok", "ok")
    assert not (tmp_path / "home").exists()


def test_a_reader_that_has_seen_enough_changes_nothing(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -P -m align doctor; echo $? >&2"
    reader = subprocess.run(
        ["bash", "-c", f"{{ {command}; }} | true"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "ALIGN_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert reader.stderr == "2\n"


def test_help_teaches_and_imports_nothing_heavy() -> None:
    text = " ".join(run("--help").stdout.split())
    assert "align doctor --device ascend" in text
    assert "Exit code 0" in text
    code = "import sys; sys.argv = ['align', 'doctor', '--help']; from align.cli import main\n"
    code += "try: main()\nfinally: print([n for n in ('torch', 'ray', 'pydantic', 'align.doctor') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
