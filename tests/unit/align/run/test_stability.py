"""Two runs of one side: tokens must repeat, and the noise of the logprobs is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import Generation, TokenStep
from align.errors import UserError
from align.run.stability import Unstable, refuse_unstable, stability

ids = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def run(name: str, tokens: list[int], logprob: float = -0.5) -> Generation:
    return Generation(name, tuple(TokenStep(token, token, ((token, logprob), (99, -3.0))) for token in tokens))


@given(ids, ids, ids, ids)
def test_the_earliest_token_that_differs(a: list[int], b: list[int], c: list[int], d: list[int]) -> None:
    found = stability("candidate", [run("a", a), run("b", b)], [run("b", d), run("a", c)])
    wrong = []
    for name, first, second in (("a", a, c), ("b", b, d)):
        for index in range(max(len(first), len(second))):
            if first[index : index + 1] != second[index : index + 1]:
                wrong.append((index, name))
                break
    assert found.stable is not bool(wrong)
    if wrong:
        assert found.unstable is not None
        assert (found.unstable.index, found.unstable.request) == min(wrong)
    assert found.tokens == max(len(a), len(c)) + max(len(b), len(d))


def test_noise_of_runs_with_equal_tokens() -> None:
    found = stability("reference", [run("a", [1, 2], -0.5)], [run("a", [1, 2], -0.625)])
    assert found.stable
    assert found.noise == 0.125
    assert stability("reference", [run("a", [1])], [run("a", [1])]).noise == 0.0


def test_noise_behind_the_first_difference_means_nothing() -> None:
    first, second = run("a", [1, 5], -0.5), run("a", [2, 5], -0.5)
    last = TokenStep(5, 5, ((5, -9.0), (99, -9.0)))
    found = stability("candidate", [first], [replace(second, steps=(second.steps[0], last))])
    assert found.unstable == Unstable("a", 0, 1, 2)
    assert found.noise == 0.0


def test_nothing_measured() -> None:
    step = TokenStep(1, 1, ((1, float("nan")),))
    found = stability("candidate", [Generation("a", (step,))], [Generation("a", (step,))])
    assert found.noise is None
    assert found.to_dict()["stable"] is True


def test_different_requests_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="different requests"):
        stability("candidate", [run("a", [1])], [run("b", [1])])


def test_a_side_that_does_not_repeat_itself_stops_the_comparison() -> None:
    good = stability("reference", [run("a", [1])], [run("a", [1])])
    refuse_unstable([good])
    bad = stability("candidate", [run("a", [1, 2, 3])], [run("a", [1, 2])])
    with pytest.raises(UserError, match="not comparable: the candidate does not repeat itself") as caught:
        refuse_unstable([good, bad])
    assert "request a, token 2 was 3, then no token" in caught.value.message
    assert "reference" not in caught.value.message
    assert "top_k 1" in caught.value.hint
    assert caught.value.exit_code == 2
