"""What is recorded next: seed 003's order, and no recording that tells nothing new."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from align.checkpoints.table import Structure, structure_of
from align.findings import Finding
from align.walk.planner import Look, accused_name, first_look_closer, look_after_alone, shown_by, values_for
from tests.unit.align.compare import traces

ALL = ("*",)


def structure(layers: int = 8) -> Structure:
    return structure_of({**traces.CONFIG, "num_hidden_layers": layers})


def finding(checkpoint: str | None = "layers.2.mlp_norm", requests: tuple[str, ...] = (), **fields: Any) -> Finding:
    return Finding("B", "operator", side="candidate", checkpoint=checkpoint, requests=requests, **fields)


def look(requests: tuple[str, ...] = ("r0", "r1"), kept: tuple[str, ...] = ALL, **fields: Any) -> Look | None:
    return first_look_closer([finding(**fields)], None, None, requests, structure(), kept)


def test_the_request_that_shows_it_runs_alone_first() -> None:
    found = look(requests=("r0", "r1", "r2"))
    assert found is not None and (found.kind, found.requests) == ("alone", ("r0",))
    named = first_look_closer([finding(requests=("r2",))], None, None, ("r0", "r1", "r2"), structure(), ALL)
    assert named is not None and named.requests == ("r2",)


def test_a_single_request_is_alone_already() -> None:
    assert first_look_closer([finding()], None, None, ("r0",), structure(), ALL) is None
    found = first_look_closer([finding()], None, None, ("r0",), structure(), ("layers.0.*",))
    assert found is not None and (found.kind, found.requests) == ("together", ())


def test_nothing_wrong_nothing_to_look_at() -> None:
    assert first_look_closer([], None, None, ("r0", "r1"), structure(), ()) is None
    assert first_look_closer([finding(checkpoint=None)], None, None, ("r0", "r1"), structure(), ()) is None


def test_after_one_request_alone() -> None:
    alone = look(kept=("layers.0.*",))
    assert alone is not None
    assert look_after_alone(alone, True, ("layers.0.*",)) is None, "its values are in its own recording"
    assert look_after_alone(alone, False, ALL) is None, "the batch's values are there already"
    together = look_after_alone(alone, False, ("layers.0.*",))
    assert together is not None
    assert (together.kind, together.requests, together.values) == ("together", (), alone.values)


@pytest.mark.parametrize(("layer", "verified"), [(0, (1, 7)), (2, (3, 7)), (5, (6, 7)), (6, (7,)), (7, ())])
def test_layers_that_verify(layer: int, verified: tuple[int, ...]) -> None:
    values, found = values_for(f"layers.{layer}.mlp.down", structure())
    assert found == verified
    for one in (layer, *verified):
        for name in ("mlp.down", "mlp.act"):
            assert any(fnmatchcase(f"layers.{one}.{name}", pattern) for pattern in values)
    untouched = next(one for one in range(8) if one not in (layer, *verified))
    assert not any(fnmatchcase(f"layers.{untouched}.mlp.down", pattern) for pattern in values)


def test_every_input_of_what_is_accused_is_kept() -> None:
    model = structure()
    for name in model.names():
        values, _ = values_for(str(name), model)
        for needed in (name, *model.inputs(name)):
            assert any(fnmatchcase(str(needed), pattern) for pattern in values), f"{needed} of {name}"


def test_the_headline_points_first() -> None:
    findings = [finding(checkpoint=None), finding("layers.3.attn.q"), finding("layers.1.attn.q")]
    assert accused_name(findings, None) == "layers.3.attn.q"
    assert accused_name([finding("by_hand_name")], None) is None


def test_requests_that_the_case_does_not_have_are_not_named() -> None:
    assert shown_by([finding(requests=("other", "r1"))], None, None, ("r0", "r1")) == "r1"
    assert shown_by([finding()], None, None, ("r0", "r1")) == "r0"


ROWS = {"r0": 2, "r1": 40, "r2": 18, "r3": 300}


@pytest.mark.parametrize(
    ("kind", "requests", "request_"),
    [
        ("operator", ("r0", "r1", "r2", "r3"), "r2"),  # the shortest that tells a fault from rounding
        ("weights", ("r0", "r1"), "r1"),
        ("operator", ("r0",), None),
        ("slots", ("r0", "r1", "r2", "r3"), "r3"),  # a fault of one request is not shown by another
    ],
)
def test_a_lean_look_takes_the_shortest_request_and_the_operator_alone(
    kind: str, requests: tuple[str, ...], request_: str | None
) -> None:
    one = Finding("B", kind, side="candidate", checkpoint="layers.2.mlp.down", requests=("r3",))
    found = first_look_closer([one], None, None, requests, structure(), (), ROWS)
    assert found is not None
    assert found.requests == (() if request_ is None else (request_,))
    assert (found.values, found.verified) == (("layers.2.mlp.down", "layers.2.mlp.act"), ())


def test_when_all_requests_are_short_the_longest_is_taken() -> None:
    found = first_look_closer([finding()], None, None, ("r0", "rx"), structure(), (), {"r0": 2, "rx": 9})
    assert found is not None and found.requests == ("rx",)
