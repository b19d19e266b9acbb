"""Two calls that do not belong together: what differs, in words, and as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from align.collectives.record.mismatch import Mismatch, differences, leave_mismatch, read_mismatch, said
from align.collectives.record.types import Place
from tests.unit.align.collectives.parted import SHORT, SKIPPED, call


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        ({}, ()),
        ({"site": ("other.py:1 f",), "function": "torch.distributed.reduce"}, ()),
        ({"place": Place(2, 9, dummy=True, inside=("layers.1.attn.o",))}, ()),
        ({"given": ((2, 128),)}, ()),
        ({"given": ((4, 32),)}, ("size",)),
        ({"dtype": "float32"}, ("dtype",)),
        ({"reduce": "max"}, ("reduce",)),
        ({"root": 1}, ("root",)),
        ({"operation": "broadcast", "reduce": ""}, ("operation", "reduce")),
        ({"place": Place(1, 3, inside=("layers.1.mlp.down",))}, ("checkpoint",)),
    ],
)
def test_what_two_ranks_must_agree_in(changed: dict[str, Any], differ: tuple[str, ...]) -> None:
    mine, theirs = call(0, "layers.1.attn.o"), call(1, "layers.1.attn.o", **changed)
    assert differences(mine, theirs) == differ
    assert differences(theirs, mine) == differ


@pytest.mark.parametrize(
    ("operation", "given", "got", "equal"),
    [
        ("all_gather", ((2, 4),), ((3, 4), (2, 4)), True),
        ("all_gather", ((3, 4),), ((3, 4),), False),
        ("reduce_scatter", ((3, 4), (2, 4)), ((2, 4),), True),
        ("reduce_scatter", ((3, 4), (3, 4)), ((3, 4),), False),
        ("all_to_all", ((7,),), ((1,),), True),
        ("gather", ((3, 4),), (), True),
        ("gather", ((2, 4),), (), False),
    ],
)
def test_ranks_may_hold_parts_of_different_lengths(operation: str, given: Any, got: Any, equal: bool) -> None:
    mine = call(0, "a", operation=operation, given=((3, 4), (2, 4)) if operation == "reduce_scatter" else ((3, 4),),
                got=((3, 4), (2, 4)))  # fmt: skip
    theirs = call(1, "a", operation=operation, given=given, got=got)
    assert differences(mine, theirs) == (() if equal else ("size",))


@pytest.mark.parametrize(
    ("sent", "received", "meet"),
    [
        ((4, 7), (5, 7), True),  # rank 0 keeps 3 and sends 5 to rank 1, which sends it 4 and keeps 7
        ((4, 7), (7, 5), False),
        ((7, 4), (5, 7), False),
        ((), (), True),  # nobody knows
    ],
)
def test_a_rank_must_expect_what_the_other_sends(sent: tuple[int, ...], received: tuple[int, ...], meet: bool) -> None:
    """What ranks keep for themselves is no matter of both."""
    mine = call(0, "a", operation="all_to_all", sent=(3, 5), received=(3, 4))
    theirs = call(1, "a", operation="all_to_all", sent=sent, received=received)
    assert differences(mine, theirs) == differences(theirs, mine) == (() if meet else ("rows",))
    if not meet:
        words = said(Mismatch(1, 0, ("rows",), theirs, mine))
        assert ", sends [3, 5] rows and expects [3, 4]" in words
        assert f", sends {list(theirs.sent)} rows and expects {list(theirs.received)}" in words


def test_both_ranks_next_calls_in_words() -> None:
    assert said(SKIPPED) == (
        "the ranks 0, 1 do not make the same collective as number 12 of group 3: rank 0 calls all_reduce of bfloat16 "
        "[4, 64] for layers.1.attn.o (run 1, step 3) at engine/linear.py:30 forward; rank 1 calls all_reduce of "
        "bfloat16 [4, 64] for layers.1.mlp.down (run 1, step 3) at engine/linear.py:31 forward"
    )
    assert said(SHORT).endswith("; rank 1 has ended its forward (run 1, step 3) without another call")


@pytest.mark.parametrize("mismatch", [SKIPPED, SHORT])
def test_it_is_left_as_a_file(tmp_path: Path, mismatch: Mismatch) -> None:
    assert read_mismatch(tmp_path / "new") is None
    leave_mismatch(tmp_path / "new", mismatch)
    assert read_mismatch(tmp_path / "new") == mismatch
    assert Mismatch.from_dict(json.loads(json.dumps(mismatch.to_dict()))) == mismatch


def test_the_first_that_was_found_stays(tmp_path: Path) -> None:
    leave_mismatch(tmp_path, SKIPPED)
    leave_mismatch(tmp_path, SHORT)
    assert read_mismatch(tmp_path) == SKIPPED
    assert [path.name for path in tmp_path.iterdir()] == ["mismatch.json"]
