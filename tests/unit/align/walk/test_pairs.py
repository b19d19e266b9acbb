"""Whom a request takes to be wrong in a batch: the writer that is accused first, then neighbours; a trial each."""

from __future__ import annotations

from typing import Any

import pytest

from align.findings import Finding
from align.walk.alone import Alone, Pair
from align.walk.pairs import TRIED, find_pair, partners
from align.walk.planner import Look

SLOTS = "layers.0.attn.kv_start_indices"
BATCH = ["r0", "r1", "r2", "r3", "r4", "r5"]


def headline(requests: tuple[str, ...] = (), **evidence: Any) -> Finding:
    return Finding("A", "slots", side="candidate", checkpoint=SLOTS, layer=0, requests=requests, evidence=evidence)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (headline(("r2", "r5"), writer={"request": "r5"}, victim={"request": "r2"}), ("r5", "r1", "r3", "r0")),
        (headline(("r2", "r4"), writer=None, victim={"request": "r2"}), ("r4", "r1", "r3", "r0")),
        (headline(("r2",), writer={"request": "", "kind": "padding"}), ("r1", "r3", "r0", "r4")),
        (headline(("r2", "r0 (run 1)"), writer={"request": "r0 (run 1)"}), ("r1", "r3", "r0", "r4")),
        (None, ("r1", "r3", "r0", "r4")),
    ],
)
def test_the_likeliest_first(found: Finding | None, expected: tuple[str, ...]) -> None:
    assert partners("r2", found, BATCH) == expected and len(expected) == TRIED


def tried(needs: str, requests: list[str], found: Finding | None = None) -> tuple[Pair | None, list[tuple[str, ...]]]:
    """A batch in which the first request is wrong if ``needs`` is there."""
    ran: list[tuple[str, ...]] = []

    def record(look: Look) -> Alone:
        ran.append(look.requests)
        wrong = needs in look.requests
        return Alone(look.requests[0], look.checkpoint, wrong, "it" if wrong else None)

    return find_pair(Look("alone", (requests[0],), SLOTS, ("*",)), found, requests, record), ran


def test_the_pair_is_named_and_nobody_is_tried_after_it() -> None:
    pair, ran = tried("r2", BATCH)
    assert pair == Pair(("r0", "r2"), ("r1", "r2"), "it")
    assert ran == [("r0", "r1"), ("r0", "r2")]


def test_who_is_accused_is_tried_first() -> None:
    pair, ran = tried("r5", BATCH, headline(("r0",), writer={"request": "r5"}))
    assert pair == Pair(("r0", "r5"), ("r5",), "it") and ran == [("r0", "r5")]


def test_a_fault_that_takes_more_than_two_says_so() -> None:
    pair, ran = tried("nobody", BATCH)
    assert pair == Pair((), ("r1", "r2", "r3", "r4")) and len(ran) == TRIED


def test_two_of_two_need_no_trial() -> None:
    assert tried("r1", ["r0", "r1"]) == (Pair(("r0", "r1"), ()), [])


def test_a_request_without_company() -> None:
    assert tried("r1", ["r0"]) == (None, [])
