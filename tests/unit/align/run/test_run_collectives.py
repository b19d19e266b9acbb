"""Which sides have collectives to audit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from align.collectives.record.files import FOLDER
from align.run.collectives import audit_collectives


def side(directory: Path, tp: int, ranks: int) -> Any:
    directory.mkdir()
    return SimpleNamespace(directory=directory, ranks=tuple(range(ranks)), manifest={"layout": {"tp": tp}})


def test_a_side_whose_ranks_need_no_collectives_is_left_out(tmp_path: Path) -> None:
    """vLLM runs groups of a dense model as engines that know nothing of each other."""
    one, alone, split = (
        side(tmp_path / name, tp, ranks) for name, tp, ranks in (("a", 1, 1), ("b", 1, 2), ("c", 2, 2))
    )
    assert audit_collectives({"candidate": one, "reference": alone}) == {}
    assert not audit_collectives({"candidate": split})["candidate"].observable, "it must have some"
    (alone.directory / FOLDER).mkdir()
    assert list(audit_collectives({"reference": alone})) == ["reference"], "what was recorded is looked at"
