"""What each engine was fed: where two histories part, and which inputs are not those that were asked for.

A free run feeds back what it generated, so that histories part behind the first different token; that is a
consequence, not an input that is wrong. An input is wrong if a side was fed another id or position than its own run
asked for, or if the two sides were asked for different prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from align.compare.rows import CANDIDATE, REFERENCE, RowKey, SideRows
from align.trace.format import POSITIONS, TOKEN_IDS

#: Request → (prompt length, prompt ids and then generated ids).
Asked = Mapping[str, tuple[int, tuple[int, ...]]]
#: How many differing inputs are kept for each key, request and side.
NAMED = 4


@dataclass(frozen=True)
class InputDifference:
    """A token id or position that an engine was fed and should not have been.

    Attributes:
        key: ``token_ids`` or ``positions``.
        request, position: where.
        candidate, reference: what each side was fed; ``None`` if it has no such row or did not record it.
        side: whose input differs from what was asked for; ``None`` if the two sides were asked for different things.
        expected: what was asked for, if known.
    """

    key: str
    request: str
    position: int
    candidate: int | None
    reference: int | None
    side: str | None
    expected: int | None


def asked_ids(manifest: Mapping[str, Any]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """What a run asked for, from its manifest: :data:`Asked`.

    Generated ids are those of the replay, in which each side is forced along them, or else of the free run. A request
    whose prompt is not listed is absent.
    """
    runs = manifest.get("generations") or {}
    generated = {
        one["request"]: [step["chosen"] for step in one["steps"]]
        for one in runs.get("replay") or runs.get("free") or ()
    }
    return {
        request["name"]: (
            len(request["token_ids"]),
            (*request["token_ids"], *generated.get(request["name"], ())),
        )
        for request in manifest.get("requests", ())
        if "token_ids" in request
    }


def _asked_for(asked: Asked, key: RowKey) -> int | None:
    ids = asked.get(key.request, (0, ()))[1]
    return ids[key.position] if key.position < len(ids) else None


def _fed(rows: SideRows, asked: Asked, key: RowKey) -> int | None:
    """The token id of a row: as fed, or else as asked for."""
    fed = rows.fed[TOKEN_IDS].get(key)
    return _asked_for(asked, key) if fed is None else fed


def parted_at(sides: Mapping[str, SideRows], asked: Mapping[str, Asked]) -> dict[str, int]:
    """Request → first position at which the token ids of the sides differ, as far as they are known."""
    parted: dict[str, int] = {}
    for key in sides[CANDIDATE].places.keys() & sides[REFERENCE].places.keys():
        left, right = (_fed(sides[side], asked[side], key) for side in (CANDIDATE, REFERENCE))
        if left is not None and right is not None and left != right:
            parted[key.request] = min(key.position, parted.get(key.request, key.position))
    # Positions that were not recorded still belong to the history; what was asked for tells about them.
    for request in asked[CANDIDATE].keys() & asked[REFERENCE].keys():
        pairs = zip(asked[CANDIDATE][request][1], asked[REFERENCE][request][1], strict=False)
        first = next((position for position, (left, right) in enumerate(pairs) if left != right), None)
        if first is not None:
            parted[request] = min(first, parted.get(request, first))
    return parted


def input_differences(
    sides: Mapping[str, SideRows], asked: Mapping[str, Asked], parted: Mapping[str, int]
) -> tuple[InputDifference, ...]:
    """Wrong inputs, token ids first; at most :data:`NAMED` for each key, request and side."""
    found = []
    for side, rows in sides.items():
        for key, fed in rows.fed[TOKEN_IDS].items():
            expected = _asked_for(asked[side], key)
            if expected is not None and fed != expected:
                found.append(_difference(TOKEN_IDS, key, sides, side, expected))
        for key, fed in rows.fed[POSITIONS].items():
            if fed != key.position:
                found.append(_difference(POSITIONS, key, sides, side, key.position))
    blamed = {difference.request for difference in found if difference.key == TOKEN_IDS}
    for request, position in parted.items():
        if request not in blamed and not _was_generated(request, position, asked):
            key = RowKey(request, position, 0)
            left, right = (_fed(sides[side], asked[side], key) for side in (CANDIDATE, REFERENCE))
            found.append(InputDifference(TOKEN_IDS, request, position, left, right, None, None))
    found.sort(key=lambda difference: (difference.key == POSITIONS, difference.request, difference.position))
    kept: Counter[tuple[str, str, str | None]] = Counter()
    named = []
    for difference in found:
        group = (difference.key, difference.request, difference.side)
        kept[group] += 1
        if kept[group] <= NAMED:
            named.append(difference)
    return tuple(named)


def _difference(
    key: str, row: RowKey, sides: Mapping[str, SideRows], side: str, expected: int | None
) -> InputDifference:
    left, right = (sides[name].fed[key].get(row) for name in (CANDIDATE, REFERENCE))
    return InputDifference(key, row.request, row.position, left, right, side, expected)


def _was_generated(request: str, position: int, asked: Mapping[str, Asked]) -> bool:
    """Whether a position lies behind the prompt on both sides; unknown prompts count as no."""
    return all(request in about and position >= about[request][0] for about in asked.values())
