"""What a run asked for."""

from __future__ import annotations

from align.compare.histories import NAMED, asked_ids, input_differences
from align.compare.rows import Place, RowKey, SideRows
from align.trace.format import POSITIONS, TOKEN_IDS


def run(*chosen: int) -> list[dict[str, object]]:
    return [{"request": "r0", "steps": [{"chosen": one} for one in chosen]}]


def test_prompt_and_generated_ids() -> None:
    requests = [{"name": "r0", "token_ids": [1, 2]}, {"name": "r1"}]
    assert asked_ids({"requests": requests}) == {"r0": (2, (1, 2))}
    assert asked_ids({"requests": requests, "generations": {"free": run(3)}}) == {"r0": (2, (1, 2, 3))}


def test_the_replay_decides_what_was_fed() -> None:
    manifest = {"requests": [{"name": "r0", "token_ids": [1]}], "generations": {"free": run(3), "replay": run(4, 5)}}
    assert asked_ids(manifest) == {"r0": (1, (1, 4, 5))}


def test_only_the_first_differences_are_named() -> None:
    keys = [RowKey("r0", position, 0) for position in range(50)]
    places = {key: Place(0, index, None) for index, key in enumerate(keys)}
    sides = {
        side: SideRows(
            places,
            dict.fromkeys(keys, "prefill"),
            {TOKEN_IDS: {}, POSITIONS: {key: key.position + shift for key in keys}},
            frozenset(),
        )
        for side, shift in (("candidate", 7), ("reference", 0))
    }
    found = input_differences(sides, {"candidate": {}, "reference": {}}, {})
    assert [(one.position, one.candidate, one.expected) for one in found] == [(at, at + 7, at) for at in range(NAMED)]
    assert {one.side for one in found} == {"candidate"}
