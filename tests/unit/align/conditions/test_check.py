"""From judged conditions to going on or stopping."""

from __future__ import annotations

from typing import Any

import pytest

from align.conditions import NAMES, TABLE, blocking, judge, refuse, require_names
from align.conditions.types import Condition
from align.errors import EXIT_NOT_COMPARABLE, UserError
from tests.unit.align.conditions.condition_sides import judged, side

EPS = {"norm_eps": 1e-3}


def conditions(**options: Any) -> tuple[Condition, ...]:
    asked = {"hf_overrides": {"rms_norm_eps": 0.001}}
    candidate = side("lmdeploy", {**EPS, "dtype": "float16"}, options=asked)
    return tuple(judged(candidate=candidate, **options).values())


def test_nothing_blocks_a_clean_pair() -> None:
    assert blocking(judged().values()) == ()
    refuse(tuple(judged().values()))


def test_the_error_names_condition_values_side_mend_and_the_way_on() -> None:
    with pytest.raises(UserError) as caught:
        refuse(conditions())
    assert caught.value.exit_code == EXIT_NOT_COMPARABLE
    message, hint = caught.value.message, caught.value.hint
    assert "2 conditions do not hold" in message
    assert "norm_eps is false: requested 1e-06, candidate 0.001; reference 1e-06" in message
    assert "dtype is false" in message and "hf_overrides" in hint
    assert "--allow dtype --allow norm_eps" in hint


def test_what_is_not_observable_is_said_so() -> None:
    with pytest.raises(UserError, match=r"candidate not observable; reference 4 .*heads was not reported"):
        refuse(tuple(judged(candidate=side("lmdeploy", {"heads": ...})).values()))


def test_allowing_them_goes_on() -> None:
    refuse(conditions(allow={"norm_eps", "dtype"}))
    with pytest.raises(UserError, match="a condition does not hold"):
        refuse(conditions(allow={"norm_eps"}))


def test_unknown_names_are_refused_with_the_valid_ones() -> None:
    require_names(set(NAMES))
    with pytest.raises(UserError, match="no condition is called nrom_eps") as caught:
        require_names({"nrom_eps", "dtype"})
    assert all(name in caught.value.hint for name in NAMES)


def test_every_row_says_what_to_do_and_who_demands_it() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for row in TABLE:
        assert row.mend and row.source and row.requested_from
        assert row.facts or row.compare in ("token_ids", "files")


@pytest.mark.parametrize(
    ("version", "name"), [(220, "A2"), (225, "A2"), (226, None), (250, "A3"), (255, "A3"), (203, "310P"), (260, "A5")]
)
def test_generations(version: int, name: str | None) -> None:
    assert judge.soc_generation(version) == name
