"""Scores against what must be said, and intervals against published ones."""

from __future__ import annotations

import pytest

from align.drill.score import Rate, Score, rates, score
from align.drill.trials import Expected
from align.findings import Finding

EXPECTED = Expected("B", ("operator",), "candidate", "layers.1.mlp.down", 1, "decode", 2, 1, None)
NAMES = ("a", "b", "c")


def finding(**changed: object) -> Finding:
    given: dict[str, object] = {
        "path": "B", "kind": "operator", "side": "candidate", "checkpoint": "layers.1.mlp.down", "layer": 1,
        "phase": "decode", "step": 2, "requests": ("b",),
    }  # fmt: skip
    return Finding(**{**given, **changed})  # type: ignore[arg-type]


def test_everything_right() -> None:
    found = score(EXPECTED, [finding(), finding(path="A")], NAMES)
    assert found.right and found.why == ""
    assert (found.path, found.side, found.kind, found.checkpoint, found.place) == (True,) * 5


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"path": "A"}, "path"),
        ({"side": "reference"}, "side"),
        ({"kind": "weights"}, "kind"),
        ({"checkpoint": "layers.2.mlp.down"}, "checkpoint"),
        ({"step": 3}, "place"),
        ({"phase": None}, "place"),
        ({"requests": ("a",)}, "place"),
        ({"layer": 2}, "place"),
    ],
)
def test_each_part_can_be_wrong_alone(changed: dict[str, object], part: str) -> None:
    found = score(EXPECTED, [finding(**changed)], NAMES)
    assert found.found and not found.right and found.why
    assert {name for name in ("path", "side", "kind", "checkpoint", "place") if getattr(found, name) is False} == {part}


def test_what_is_not_asked_is_no_hit() -> None:
    found = score(Expected("A", ("slot",), "candidate"), [finding(path="A", kind="slot")], NAMES)
    assert found.right and found.checkpoint is None and found.place is None
    assert rates([found])["checkpoint"].count == 0


def test_an_argument_is_looked_for_behind_the_numbers_that_it_ruins() -> None:
    expected = Expected("FA", ("arguments",), "candidate")
    first, told = finding(evidence={"likely_rules": ["fa.scale.model"]}), finding(path="FA", kind="arguments")
    assert score(expected, [first, told], NAMES).right
    assert not score(expected, [finding(), told], NAMES).right
    assert not score(expected, [first], NAMES).right


def test_what_was_missed_counts_against_path_and_checkpoint_and_not_against_the_side() -> None:
    right, missed = score(EXPECTED, [finding()], NAMES), score(EXPECTED, [], NAMES)
    assert missed == Score(False, why="nothing was found")
    found = rates([right, right, right, missed])
    assert {name: (one.hits, one.count) for name, one in found.items()} == {
        "found": (3, 4), "path": (3, 4), "checkpoint": (3, 4), "side": (3, 3), "kind": (3, 3), "place": (3, 3),
        "right": (3, 4),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (Wilson's score without correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_are_those_of_the_literature(hits: int, count: int, low: float, high: float) -> None:
    assert Rate(hits, count).interval == pytest.approx((low, high), abs=5e-5)


def test_of_nothing_nothing_is_known() -> None:
    assert Rate(0, 0).share is None and Rate(0, 0).interval == (0.0, 1.0)
