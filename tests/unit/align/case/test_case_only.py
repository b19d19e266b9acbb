"""Some requests of a case."""

from __future__ import annotations

import pytest

from align.case.schema import Case, CaseRequest
from align.errors import UserError


def case() -> Case:
    requests = [CaseRequest(name=name, token_ids=(1,), arrival=at) for name, at in (("a", 0), ("b", 3), ("c", 5))]
    return Case(model="qwen3", requests=tuple(requests))


@pytest.mark.parametrize(
    ("names", "arrivals"), [(("a",), {"a": 0}), (("c",), {"c": 0}), (("c", "b"), {"b": 0, "c": 2})]
)
def test_the_first_of_them_arrives_at_once(names: tuple[str, ...], arrivals: dict[str, int]) -> None:
    found = case().only(names)
    assert {request.name: request.arrival for request in found.requests} == arrivals
    assert found.model == "qwen3"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(UserError, match="no request x") as caught:
        case().only(("a", "x"))
    assert "a, b, c" in caught.value.hint
