"""All examinations together: one that fails never ends the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from align.doctor.examine import EXAMINATIONS, examine
from align.doctor.types import Check, Machine, Needs, gb
from align.errors import UserError
from tests.unit.align.doctor.fakes import machine


def good(machine: Machine, needs: Needs) -> Iterator[Check]:
    yield Check("good", "ok", "fine")


def half(machine: Machine, needs: Needs) -> Iterator[Check]:
    yield Check("first", "ok", "seen")
    raise ValueError("no digits\nin the second line")


def hinted(machine: Machine, needs: Needs) -> Iterator[Check]:
    if machine.pid:
        raise UserError("the lock is damaged", "git checkout -- lock")
    yield Check("hinted", "ok", "never reached")


def silent(machine: Machine, needs: Needs) -> Iterator[Check]:
    if machine.pid:
        raise KeyError
    yield Check("silent", "ok", "never reached")


def test_what_raises_becomes_unknown_with_its_reason(tmp_path: Path) -> None:
    found = list(
        examine(machine(tmp_path), Needs(), [("half", half), ("hinted", hinted), ("silent", silent), ("good", good)])
    )
    assert found == [
        Check("first", "ok", "seen"),
        Check("half", "unknown", "ValueError: no digits"),
        Check("hinted", "unknown", "the lock is damaged", "git checkout -- lock"),
        Check("silent", "unknown", "KeyError: no message"),
        Check("good", "ok", "fine"),
    ]


def test_a_machine_of_which_nothing_can_be_read_is_examined_to_the_end(tmp_path: Path) -> None:
    empty = machine(tmp_path, proc=tmp_path / "no-proc", shm=tmp_path / "no-shm", cgroup=tmp_path / "no-cgroup")
    found = {check.name: check.state for check in examine(empty, Needs())}
    assert found["memory"] == "unknown", "not observable is no pass"
    assert found["earlier runs"] == "unknown"
    assert found["/dev/shm"] == "missing"
    assert found["loopback"] == "ok"
    assert found["vllm environment"] == "missing"


def test_every_examination_has_its_own_name() -> None:
    assert len({name for name, _ in EXAMINATIONS}) == len(EXAMINATIONS)


@pytest.mark.parametrize("state", ["missing", "warning"])
def test_what_is_wrong_says_what_mends_it(state: str) -> None:
    with pytest.raises(AssertionError, match="nothing is said to mend it"):
        Check("disk", state, "full")  # type: ignore[arg-type]


def test_answers_and_thresholds_are_data() -> None:
    text = json.dumps({"check": asdict(Check("disk", "ok", "free")), "needs": asdict(Needs())})
    assert json.loads(text)["check"] == {"name": "disk", "state": "ok", "found": "free", "mend": ""}


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (4096, "4 kB"), (64e6, "64 MB"), (1.5e8, "0.1 GB"), (2.5e9, "2.5 GB")]
)
def test_bytes_for_people(size: float, text: str) -> None:
    assert gb(size) == text
