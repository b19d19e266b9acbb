"""Faults are read as data, and a file that is none says which part is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.base import SIDES
from align.checkpoints.table import kinds
from align.drill.library import FOLDER, read_fault, read_faults
from align.drill.settings import batches
from align.drill.trials import expected_of
from align.errors import UserError
from align.knowledge import knowledge
from align.ledger.table import checks

RIGHT = '''"""A title."""

FAULT = {
    "path": "B",
    "kind": "operator",
    "source": "somewhere",
    "checkpoint": "layers.{layer}.mlp.down",
    "draws": {"layer": [0, 1]},
}
DRAWN = {"layer": 1}


def apply(ctx):
    raise RuntimeError("it is read and not run")
'''


def test_a_fault_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    fault = read_fault(path)
    assert (fault.name, fault.title, fault.said.kinds, fault.drawn) == ("mine", "A title.", ("operator",), {"layer": 1})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"""A title."""', "", "no docstring"),
        ("FAULT =", "OTHER =", "has no FAULT"),
        ('"path": "B"', '"path": "D"', "FAULT path: .*none of A, B"),
        ('"kind": "operator",', "", "FAULT kind: Field required"),
        ('"draws": {"layer": [0, 1]}', '"draws": {"layer": []}', "no value for layer"),
        ('"draws": {"layer": [0, 1]}', '"draws": {"row": [0]}', "DRAWN must have a value for each of draws: row"),
        ("layers.{layer}", "layers.{row}", "asks for 'row', which is not drawn"),
        ('"source": "somewhere"', '"source": str(1)', "must be written out"),
        ("def apply(ctx)", "def other(ctx)", "has no apply"),
        ("FAULT = {", "FAULT = {{", "no Python"),
        ('"kind": "operator"', '"kind": "operator", "colour": 1', "colour"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    assert RIGHT.count(old) == 1
    path.write_text(RIGHT.replace(old, new))
    with pytest.raises(UserError, match=said) as caught:
        read_fault(path)
    assert "align drill --new" in caught.value.hint


def test_folders_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RIGHT)
    assert "mine" in {fault.name for fault in read_faults((FOLDER, tmp_path))}
    with pytest.raises(UserError, match="two faults are called mine"):
        read_faults((tmp_path, tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no faults"):
        read_faults((tmp_path / "empty",))


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_what_a_fault_of_ours_says_exists(fault: object) -> None:
    from align.drill.library import Fault

    assert isinstance(fault, Fault)
    compile(fault.text, fault.name, "exec")
    known = {*knowledge().entries, *checks()}
    assert set(fault.said.kinds) <= known, fault.said.kinds
    assert fault.said.batch in batches()
    assert set(fault.said.options) <= set(fault.said.engines)
    expected = expected_of(fault, SIDES[0], fault.drawn)
    if expected.checkpoint is not None:
        assert (
            expected.checkpoint.rpartition("layers.")[2].partition(".")[2] in kinds() or expected.checkpoint in kinds()
        )
    for name, values in fault.said.draws.items():
        assert fault.drawn[name] in values, name
