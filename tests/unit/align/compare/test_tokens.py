"""Token comparison: hand-computed cases and properties."""

from __future__ import annotations

import json
import random
import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import Generation, TokenStep
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.sentences import text_of

POLICY = NoisePolicy(floor=0.1, cap=0.5)
Top = dict[int, float]


def step(top: Top, chosen: int | None = None) -> TokenStep:
    """A step from ``{id: logprob}``; greedy is the best, chosen is greedy unless forced."""
    ordered = tuple(sorted(top.items(), key=lambda item: -item[1]))
    greedy = ordered[0][0]
    return TokenStep(greedy if chosen is None else chosen, greedy, ordered)


def run(*tops: Top, name: str = "r0", forced: list[int] | None = None) -> Generation:
    ids: list[int | None] = [*forced] if forced else [None] * len(tops)
    return Generation(name, tuple(step(top, chosen) for top, chosen in zip(tops, ids, strict=True)))


SURE: Top = {1: -0.1, 2: -3.0, 3: -4.0}


def test_equal_runs_are_aligned() -> None:
    result = compare_tokens([run(SURE, SURE)], [run(SURE, SURE)], mode="free", policy=POLICY)
    assert result.verdict == "aligned"
    assert result.differences == () and result.first is None
    assert (result.requests[0].outcome, result.requests[0].compared, result.noise) == ("equal", 2, 0.0)


def test_near_tie_by_hand() -> None:
    # Margins 0.04 and 0.06; the third id differs by 0.02, so the floor of 0.1 decides.
    ours, theirs = {1: -0.70, 2: -0.74, 3: -5.00}, {1: -0.75, 2: -0.69, 3: -5.02}
    result = compare_tokens(
        [run(SURE, ours, SURE)],
        [run(SURE, theirs, SURE)],
        mode="free",
        policy=POLICY,
        prompt_lengths={"r0": 7},
    )
    (difference,) = result.differences
    assert result.verdict == "aligned"
    assert result.requests[0].outcome == "near_tie"
    assert (difference.index, difference.position) == (1, 8)
    assert (difference.candidate_id, difference.reference_id) == (1, 2)
    assert difference.candidate_margin == pytest.approx(0.04)
    assert difference.reference_margin == pytest.approx(0.06)
    assert difference.noise == pytest.approx(0.02)
    assert difference.tolerance == 0.1
    assert difference.near_tie and result.near_ties == (difference,)
    # What follows a first difference of a free run has another history.
    assert (result.requests[0].compared, result.requests[0].total) == (2, 3)


def test_noise_of_earlier_steps_and_other_requests_counts() -> None:
    noisy = {1: -0.1, 2: -3.3, 3: -4.0}
    ours, theirs = {1: -0.60, 2: -0.85}, {1: -0.85, 2: -0.60}
    quiet = compare_tokens([run(SURE, ours)], [run(SURE, theirs)], mode="free", policy=POLICY)
    assert quiet.verdict == "diverged" and quiet.differences[0].noise == 0.0
    same_request = compare_tokens([run(noisy, ours)], [run(SURE, theirs)], mode="free", policy=POLICY)
    assert same_request.verdict == "aligned"
    # The largest of few differences is extrapolated, up to the cap.
    assert same_request.differences[0].noise == pytest.approx(0.3)
    assert same_request.differences[0].tolerance == 0.5
    other_request = compare_tokens(
        [run(SURE, ours), run(SURE, noisy, name="r1")],
        [run(SURE, theirs), run(SURE, SURE, name="r1")],
        mode="free",
        policy=POLICY,
    )
    assert other_request.verdict == "aligned"
    later = compare_tokens(
        [run(ours, forced=[1]), run(SURE, noisy, name="r1", forced=[1, 1])],
        [run(theirs, forced=[1]), run(SURE, SURE, name="r1", forced=[1, 1])],
        mode="replay",
        policy=POLICY,
    )
    assert later.verdict == "diverged", "noise of a later step must not excuse an earlier flip"


def test_a_flip_does_not_excuse_itself() -> None:
    # Both ids moved by 0.3, which is just what makes the flip: it is no measure of noise.
    ours, theirs = {1: -0.5, 2: -0.8, 3: -4.0}, {1: -0.8, 2: -0.5, 3: -4.0}
    result = compare_tokens([run(ours)], [run(theirs)], mode="free", policy=POLICY)
    assert result.verdict == "diverged"
    assert result.differences[0].noise == 0.0


def test_noise_above_the_cap_excuses_nothing() -> None:
    wild = {1: -0.1, 2: -4.0, 3: -4.0}
    ours, theirs = {1: -0.60, 2: -0.85}, {1: -0.85, 2: -0.60}
    result = compare_tokens([run(wild, ours)], [run(SURE, theirs)], mode="free", policy=POLICY)
    assert result.verdict == "diverged"
    assert result.noise_above_cap and "is no rounding" in result.differences[0].why


def test_equal_tokens_with_wild_logprobs_say_so() -> None:
    wild = {1: -0.1, 2: -4.0, 3: -4.0}
    result = compare_tokens([run(wild)], [run(SURE)], mode="free", policy=POLICY)
    assert result.verdict == "aligned" and result.noise == pytest.approx(1.0) and result.noise_above_cap


@pytest.mark.parametrize("missing", ["candidate", "reference", "both"])
def test_unknown_margin_is_never_a_near_tie(missing: str) -> None:
    ours = {1: -0.70, 2: -0.71, 3: -0.72} if missing == "reference" else {1: -0.70, 3: -0.72}
    theirs = {2: -0.70, 1: -0.71, 3: -0.72} if missing == "candidate" else {2: -0.70, 3: -0.72}
    result = compare_tokens([run(ours)], [run(theirs)], mode="free", policy=POLICY)
    (difference,) = result.differences
    assert result.verdict == "diverged" and "does not list both ids" in difference.why
    if missing in ("candidate", "both"):
        assert difference.candidate_margin is None
        assert difference.candidate_margin_at_least == pytest.approx(0.02)
    if missing in ("reference", "both"):
        assert difference.reference_margin is None
        assert difference.reference_margin_at_least == pytest.approx(0.02)


def test_one_large_margin_is_enough_to_diverge() -> None:
    ours, theirs = {1: -0.70, 2: -0.71}, {1: -3.0, 2: -0.1}
    result = compare_tokens([run(ours)], [run(theirs)], mode="free", policy=POLICY)
    assert result.verdict == "diverged" and "exceed" in result.differences[0].why


def test_replay_lists_every_flip() -> None:
    near_ours, near_theirs = {1: -0.70, 2: -0.74}, {1: -0.74, 2: -0.70}
    far = {2: -0.1, 1: -4.0}
    forced = [1, 1, 1, 1]
    result = compare_tokens(
        [run(near_ours, SURE, far, near_ours, forced=forced)],
        [run(near_theirs, SURE, SURE, near_theirs, forced=forced)],
        mode="replay",
        policy=POLICY,
    )
    assert [(difference.index, difference.near_tie) for difference in result.differences] == [
        (0, True),
        (2, False),
        (3, True),
    ]
    assert result.requests[0].compared == 4 and result.requests[0].outcome == "diverged"
    assert result.first is not None and result.first.index == 2


def test_first_is_the_earliest_real_difference() -> None:
    far = {2: -0.1, 1: -4.0}
    result = compare_tokens(
        [run(SURE, far), run(far, SURE, name="r1")],
        [run(SURE, SURE), run(SURE, SURE, name="r1")],
        mode="free",
        policy=POLICY,
    )
    assert result.first is not None and (result.first.request, result.first.index) == ("r1", 0)


def test_replay_along_other_ids_is_an_error() -> None:
    with pytest.raises(ValueError, match="different ids: step 1 has 1 and 2"):
        compare_tokens([run(SURE, SURE, forced=[1, 1])], [run(SURE, SURE, forced=[1, 2])], mode="replay", policy=POLICY)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("length", [0, 1])
def test_a_side_that_stops_early_differs(swap: bool, length: int) -> None:
    short, long = run(*[SURE] * length), run(SURE, SURE)
    sides = ([long], [short]) if swap else ([short], [long])
    result = compare_tokens(*sides, mode="free", policy=POLICY, prompt_lengths={"r0": 3})
    (difference,) = result.differences
    assert result.verdict == "diverged"
    assert (difference.kind, difference.index, difference.position) == ("length", length, 3 + length)
    assert ("reference" if swap else "candidate") in difference.why


def test_length_after_a_near_tie_is_not_comparable() -> None:
    ours, theirs = {1: -0.70, 2: -0.74}, {1: -0.74, 2: -0.70}
    result = compare_tokens([run(ours)], [run(theirs, SURE)], mode="free", policy=POLICY)
    assert result.verdict == "aligned" and len(result.differences) == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_nan_is_a_difference_even_if_the_ids_agree(value: float) -> None:
    broken = Generation("r0", (TokenStep(1, 1, ((1, value), (2, -3.0))),))
    for sides in (([broken], [run(SURE)]), ([run(SURE)], [broken]), ([broken], [broken])):
        result = compare_tokens(*sides, mode="free", policy=POLICY)
        (difference,) = result.differences
        assert result.verdict == "diverged" and difference.kind == "nonfinite" and not difference.near_tie
        json.dumps(result.to_dict(), allow_nan=False)


def test_golden_says_who_is_right() -> None:
    ours, theirs = {1: -0.70, 2: -0.74}, {1: -0.74, 2: -0.70}
    golden = {2: -0.60, 1: -0.90}
    result = compare_tokens(
        [run(SURE, ours)], [run(SURE, theirs)], mode="free", policy=POLICY, golden=[run(SURE, golden)]
    )
    assert result.differences[0].golden_id == 2
    assert result.differences[0].golden_margin == pytest.approx(0.3)
    elsewhere = compare_tokens(
        [run(SURE, ours)],
        [run(SURE, theirs)],
        mode="free",
        policy=POLICY,
        golden=[run({3: -0.1, 1: -3.0}, golden)],
    )
    assert elsewhere.differences[0].golden_id is None and elsewhere.differences[0].golden_margin is None


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="only one side has r1"):
        compare_tokens([run(SURE)], [run(SURE), run(SURE, name="r1")], mode="free", policy=POLICY)
    with pytest.raises(ValueError, match="two generations of one request"):
        compare_tokens([run(SURE), run(SURE)], [run(SURE)], mode="free", policy=POLICY)
    for empty in ([], [Generation("r0", ())]):
        with pytest.raises(ValueError, match="nothing to compare"):
            compare_tokens(empty, empty, mode="free", policy=POLICY)


def test_result_is_serialisable() -> None:
    far = {2: -0.1, 1: -4.0}
    result = compare_tokens([run(far)], [run(SURE)], mode="free", policy=POLICY)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["verdict"] == "diverged"
    assert plain["requests"][0]["differences"][0]["candidate_top"] == [[2, -0.1], [1, -4.0]]


# ------------------------------------------------------------------------------------------------- properties

_TOP = st.dictionaries(st.integers(0, 5), st.floats(-6.0, 0.0), min_size=2, max_size=4)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Generation], list[Generation], Literal["free", "replay"]]:
    """Two sides of 1 to 3 requests; in a replay both are forced along the same ids."""
    mode: Literal["free", "replay"] = draw(st.sampled_from(["free", "replay"]))
    ours, theirs = [], []
    for index in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 4))
        forced = draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)) if mode == "replay" else None
        tops = draw(st.lists(st.tuples(_TOP, _TOP), min_size=length, max_size=length))
        near = draw(st.booleans())
        ours.append(run(*(top for top, _ in tops), name=f"r{index}", forced=forced))
        theirs.append(run(*(top if near else other for top, other in tops), name=f"r{index}", forced=forced))
    return ours, theirs, mode


@given(sides())
def test_swapping_the_sides_mirrors_the_result(
    given_sides: tuple[list[Generation], list[Generation], Literal["free", "replay"]],
) -> None:
    ours, theirs, mode = given_sides
    forward = compare_tokens(ours, theirs, mode=mode, policy=POLICY)
    backward = compare_tokens(theirs, ours, mode=mode, policy=POLICY)
    assert forward.verdict == backward.verdict and forward.noise == backward.noise
    for one, two in zip(forward.differences, backward.differences, strict=True):
        assert (one.request, one.index, one.kind, one.near_tie) == (
            two.request,
            two.index,
            two.kind,
            two.near_tie,
        )
        assert (one.candidate_id, one.reference_id) == (two.reference_id, two.candidate_id)
        assert (one.candidate_margin, one.reference_margin) == (two.reference_margin, two.candidate_margin)


@given(sides(), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(
    given_sides: tuple[list[Generation], list[Generation], Literal["free", "replay"]], shuffler: random.Random
) -> None:
    ours, theirs, mode = given_sides
    before = compare_tokens(ours, theirs, mode=mode, policy=POLICY)
    shuffled_ours, shuffled_theirs = list(ours), list(theirs)
    shuffler.shuffle(shuffled_ours)
    shuffler.shuffle(shuffled_theirs)
    after = compare_tokens(shuffled_ours, shuffled_theirs, mode=mode, policy=POLICY)
    assert {entry.request: entry for entry in before.requests} == {entry.request: entry for entry in after.requests}
    assert (before.verdict, before.noise) == (after.verdict, after.noise)


@given(sides())
def test_a_margin_above_the_cap_is_never_a_near_tie(
    given_sides: tuple[list[Generation], list[Generation], Literal["free", "replay"]],
) -> None:
    ours, theirs, mode = given_sides
    result = compare_tokens(ours, theirs, mode=mode, policy=POLICY)
    for difference in result.near_ties:
        assert difference.candidate_margin is not None and difference.reference_margin is not None
        assert max(difference.candidate_margin, difference.reference_margin) <= POLICY.cap
    assert (result.verdict == "diverged") == any(not difference.near_tie for difference in result.differences)


@given(sides())
def test_a_side_agrees_with_itself(
    given_sides: tuple[list[Generation], list[Generation], Literal["free", "replay"]],
) -> None:
    ours, _, mode = given_sides
    result = compare_tokens(ours, ours, mode=mode, policy=POLICY)
    assert result.verdict == "aligned" and result.differences == () and result.noise == 0.0


def test_every_reason_is_kept_as_data() -> None:
    """The Chinese report reads it from there."""
    near = ([run({1: -0.7, 2: -0.74})], [run({1: -0.75, 2: -0.69})])
    far = ([run({1: -0.1, 2: -3.0})], [run({2: -0.1, 1: -3.0})])
    unlisted = ([run({1: -0.1, 3: -3.0})], [run({2: -0.1, 4: -3.0})])
    shorter = ([run(SURE)], [run(SURE, SURE)])
    broken = ([run({1: -0.1, 2: float("nan")})], [run({1: -0.1, 2: -3.0})])
    keys = []
    for candidate, reference in (near, far, unlisted, shorter, broken):
        (found,) = compare_tokens(candidate, reference, mode="free", policy=POLICY).differences
        assert text_of(found.told) == found.why
        assert re.search("[\u4e00-\u9fff]", text_of(found.told, "zh"))
        keys.append(found.told["say"])
    assert keys == ["tokens.near", "tokens.beyond", "tokens.unlisted_bound", "tokens.length", "tokens.broken"]
