"""The driver's interpreter and the kind of machine."""

from __future__ import annotations

from pathlib import Path

from align.doctor.python import examine, python, system
from align.doctor.types import Needs
from tests.unit.align.doctor.fakes import machine
from tests.unit.envs.fakes import LOCK, write_lock


def test_python() -> None:
    assert python((3, 11, 7), "/p", []).state == "ok"
    old = python((3, 10, 2), "/p", [])
    assert (old.state, "3.10.2 at /p" in old.found, "PYTHON=" in old.mend) == ("missing", True, True)
    assert python((3, 12, 0), "/p", []).state == "missing"
    bare = python((3, 11, 7), "/p", ["ensurepip"])
    assert (bare.state, "ensurepip" in bare.found, "python3.11-venv" in bare.mend) == ("warning", True, True)


def test_system() -> None:
    assert system("Linux", "x86_64", {"x86_64", "aarch64"}).state == "ok"
    assert system("Linux", "riscv64", None).state == "ok"
    assert system("Linux", "riscv64", {"x86_64"}).state == "missing"
    assert system("Darwin", "x86_64", {"x86_64"}).state == "missing"


def test_processors_are_those_of_the_locks(tmp_path: Path) -> None:
    here = machine(tmp_path)
    write_lock(here.builder.locks, LOCK.replace("tiny", "vllm") + "platforms = { z80 = ['any'] }\n", "vllm")
    states = {check.name: check for check in examine(here, Needs())}
    assert states["Python"].state == "ok"
    assert (states["system"].state, "z80" in states["system"].found) == ("missing", True)
    ascend = machine(tmp_path / "ascend", device="ascend")
    assert [check.state for check in examine(ascend, Needs())] == ["ok", "ok"]
