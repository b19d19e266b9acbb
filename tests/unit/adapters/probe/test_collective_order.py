"""Ranks that make the same collectives are never accused, whatever the order in which they run; of two that do not, one
finds out before it makes its call."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.probe.collective_order import Order
from align.collectives.record.files import CollectiveWriter
from align.collectives.record.mismatch import CollectiveMismatch, read_mismatch
from align.collectives.record.types import CollectiveCall, Place

END = "end of forward"


@dataclass(frozen=True)
class Act:
    """A call that a rank makes: which checkpoint's, of which group; ``waits``: it ends when all have made it."""

    where: str
    group: str = "g"
    operation: str = "all_reduce"
    size: int = 4
    waits: bool = True


class Rank:
    """Goes through its acts; a call that waits ends when all others have made as many of its group."""

    def __init__(self, directory: Path, rank: int, acts: list[Act | str], world: int) -> None:
        self.rank, self.acts, self.world = rank, acts, tuple(range(world))
        self.writer = CollectiveWriter(directory, rank)
        self.order = Order(directory, rank, self.writer)
        self.at, self.step = 0, 0
        self.made: dict[str, int] = {}
        self.waiting: str | None = None

    def act(self) -> None:
        """Make the next one.

        Raises:
            CollectiveMismatch: as an engine's rank would.
        """
        act = self.acts.pop(0)
        place = Place(1, self.step)
        if isinstance(act, str):
            self.step += 1
            self.order.forward_ended(place)
            return
        number = self.made.get(act.group, 0)
        inside = (act.where,) if act.where else ()
        call = CollectiveCall(
            rank=self.rank, at=self.at, in_group=number, group=self.world, group_name=act.group, backend="gloo",
            operation=act.operation, function="f", dtype="float32", given=((act.size,),), got=((act.size,),),
            place=replace(place, inside=inside), ended=False,
        )  # fmt: skip
        self.writer.begin(call)
        self.order.check(call)
        self.at += 1
        self.made[act.group] = number + 1
        self.waiting = act.group if act.waits else None


def run(scripts: list[list[Act | str]], turns: list[int]) -> tuple[int, CollectiveMismatch] | str:
    """Let the ranks act in these turns, then in rounds: who finds a mismatch, ``done``, or ``hang``."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Rank(Path(folder), number, list(script), len(scripts)) for number, script in enumerate(scripts)]
        idle = 0
        for turn in [*turns, *list(range(len(ranks))) * 1000]:
            one = ranks[turn % len(ranks)]
            if all(not other.acts and other.waiting is None for other in ranks):
                return "done"
            if one.waiting is not None:
                count = one.made[one.waiting]
                if all(other.made.get(one.waiting, 0) >= count for other in ranks):
                    one.waiting = None
                    idle = 0
                else:
                    idle += 1
            elif one.acts:
                try:
                    one.act()
                except CollectiveMismatch as error:
                    left = read_mismatch(Path(folder))
                    return (one.rank, error) if left == error.mismatch else "not left for the driver"
                idle = 0
            else:
                idle += 1
            if idle > 10 * len(ranks):
                return "hang"
    raise AssertionError("no end")


def forward(layers: int = 2) -> list[Act | str]:
    calls: list[Act | str] = [Act("embed")]
    for layer in range(layers):
        calls += [Act(f"layers.{layer}.attn.o"), Act(f"layers.{layer}.mlp.down")]
    return [*calls, END]


def token() -> Act:
    return Act("", operation="broadcast", size=1, waits=False)


TURNS = st.lists(st.integers(0, 2), max_size=60)
ACTS = st.lists(
    st.one_of(
        st.builds(
            Act,
            where=st.sampled_from(["", "embed", "layers.0.attn.o", "layers.0.mlp.down"]),
            group=st.sampled_from(["g", "h"]),
            operation=st.sampled_from(["all_reduce", "broadcast"]),
            size=st.integers(1, 3),
            waits=st.booleans(),
        ),
        st.just(END),
    ),
    max_size=12,
)


@given(acts=ACTS, turns=TURNS, world=st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_ranks_that_agree_are_never_accused(acts: list[Act | str], turns: list[int], world: int) -> None:
    assert run([acts] * world, turns) == "done"


@given(turns=TURNS, place=st.integers(0, 4), steps=st.integers(1, 3), world=st.integers(2, 3), last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_skipped_call_is_always_found(turns: list[int], place: int, steps: int, world: int, last: bool) -> None:
    wrong = forward()
    del wrong[place]
    tokens = [] if last else [token()]
    before = [*forward(), token()] * (steps - 1)
    scripts: list[list[Act | str]] = [[*before, *forward(), *tokens] for _ in range(world)]
    scripts[-1] = [*before, *wrong, *tokens]
    found = run(scripts, turns)
    assert not isinstance(found, str), found
    mismatch = found[1].mismatch
    skipper = dict(mismatch.calls).get(world - 1)
    assert world - 1 in (mismatch.rank, mismatch.peer)
    other = mismatch.mine if mismatch.rank != world - 1 else mismatch.theirs
    assert other is not None
    skipped = forward()[place]
    assert isinstance(skipped, Act)
    assert other.place.inside == (skipped.where,)
    assert other.place.step == steps - 1
    if skipper is None:
        assert mismatch.differ == ("count",)
        assert mismatch.ended is not None


@given(turns=TURNS, place=st.integers(0, 4), steps=st.integers(1, 3), last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_one_call_more_is_always_found(turns: list[int], place: int, steps: int, last: bool) -> None:
    more = forward()
    more.insert(place, more[place])
    before = [*forward(), token()] * (steps - 1)
    tokens = [] if last else [token()]
    found = run([[*before, *more, *tokens], [*before, *forward(), *tokens]], turns)
    assert not isinstance(found, str), found
    first = dict(found[1].mismatch.calls)[0]
    again = forward()[place]
    assert first is not None
    assert isinstance(again, Act)
    assert first.place.inside == (again.where,)


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        ({"operation": "broadcast"}, ("operation",)),
        ({"size": 5}, ("size",)),
        ({"where": "layers.1.attn.o"}, ("checkpoint",)),
        ({"operation": "broadcast", "where": ""}, ("operation", "checkpoint")),
    ],
)
def test_what_differs_is_named(change: dict[str, object], differ: tuple[str, ...]) -> None:
    act = Act("layers.0.attn.o")
    found = run([[act], [replace(act, **change)]], [0, 1])  # type: ignore[arg-type]
    assert not isinstance(found, str)
    assert found[0] == 1, "who comes second"
    assert found[1].mismatch.differ == differ


def test_a_background_call_may_come_before_or_after_the_end_of_a_forward() -> None:
    back = Act("", group="h", operation="all_reduce", size=1, waits=False)
    assert run([[*forward(), back], [back, *forward()]], []) == "done"


def test_a_dummy_and_a_real_forward_make_the_same_calls() -> None:
    late = forward()[:-1]  # a dummy ends when the next forward begins
    assert run([[*forward(), token(), *forward()], [*late, token(), END, *forward()]], [0] * 9) == "done"
