"""Tokens behind near-ties of routers are near-ties; of no other row, and no other kind of difference."""

from __future__ import annotations

from math import nan

from align.compare.excused import behind_routers
from align.compare.tokens import Mode, TokenComparison, compare_tokens
from tests.unit.align.compare.test_tokens import POLICY, SURE, Top, run

#: Prefers another id, by far.
OTHER: Top = {2: -0.1, 1: -3.0, 3: -4.0}
#: r0 has seven ids of a prompt, so that its token 1 has position 8 and is sampled from row 7.
LENGTHS = {"r0": 7}
ROW = ("r0", 7)


def replay(ours: Top = OTHER) -> TokenComparison:
    """Token 1 of r0 differs."""
    forced = [1, 1, 1]
    return compare_tokens(
        [run(SURE, ours, SURE, forced=forced)],
        [run(SURE, SURE, SURE, forced=forced)],
        mode="replay",
        policy=POLICY,
        prompt_lengths=LENGTHS,
    )


def test_the_token_of_a_hidden_row_is_a_near_tie() -> None:
    (found,) = behind_routers({"replay": replay()}, {"replay": {ROW}}).values()
    assert (found.verdict, found.requests[0].outcome) == ("aligned", "near_tie")
    (difference,) = found.differences
    assert difference.near_tie and "position 7 lies behind a near-tie of a router" in difference.why
    assert (difference.candidate_id, difference.reference_id) == (2, 1), "what they are stays"


def test_tokens_of_other_rows_and_modes_stay() -> None:
    given = {"replay": replay()}
    none: dict[Mode, set[tuple[str, int]]] = {}
    for flipped in (none, {**none, "replay": {("r0", 8), ("r0", 6), ("r1", 7)}}, {**none, "free": {ROW}}):
        assert behind_routers(given, flipped) == given
    assert given["replay"].verdict == "diverged"


def test_a_nan_stays() -> None:
    given = {"replay": replay({1: nan, 2: -1.0, 3: -4.0})}
    assert behind_routers(given, {"replay": {ROW}}) == given


def test_a_free_run_is_excused_by_its_own_rows() -> None:
    free = compare_tokens([run(SURE, OTHER)], [run(SURE, SURE)], mode="free", policy=POLICY, prompt_lengths=LENGTHS)
    found = behind_routers({"free": free, "replay": replay()}, {"free": {ROW}, "replay": set()})
    assert {mode: one.verdict for mode, one in found.items()} == {"free": "aligned", "replay": "diverged"}
