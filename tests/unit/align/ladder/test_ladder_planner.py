"""The ladder's plan: rungs that grow, one dimension at a time, and a conclusion that follows from the verdicts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.ladder.planner import accused_sides, between, changed, ladder_to, next_move, ordered, starts_by_itself
from align.ladder.types import Conclusion, Headline, Ran, Step, Verdict
from align.layout import Layout
from align.sentences import LANGUAGES, text_of

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, dp = draw(SIZES), draw(SIZES)
    return Layout(tp, dp, draw(st.sampled_from([1, tp * dp])))


def ran(layout: Layout, verdict: Verdict, path: str = "B", side: str | None = "candidate", at: str = "x") -> Ran:
    found = Headline(path, "operator", side, at, f"{path} at {at}") if verdict == "diverged" else None
    return Ran(layout, verdict, found, "it cannot" if verdict == "not comparable" else "")


def walked(planned: tuple[Layout, ...], verdict_of: dict[Layout, Verdict]) -> tuple[list[Layout], Conclusion]:
    """What is run in which order; a layout without a verdict is aligned."""
    known: dict[Layout, Ran] = {}
    order: list[Layout] = []
    for _ in range(20):
        move = next_move(planned, known)
        if isinstance(move, Conclusion):
            return order, move
        order.append(move.layout)
        assert move.layout not in known
        known[move.layout] = ran(move.layout, verdict_of.get(move.layout, "aligned"))
    raise AssertionError("it never ends")


@pytest.mark.parametrize(
    ("target", "first", "rungs"),
    [
        (Layout(), 1, [Layout()]),
        (Layout(2), 1, [Layout(), Layout(2)]),
        (Layout(2), 2, [Layout(2)]),
        (Layout(2), 8, [Layout(2)]),
        (Layout(1, 2), 1, [Layout(), Layout(1, 2)]),
        (Layout(2, 2), 1, [Layout(), Layout(2), Layout(2, 2)]),
        (Layout(4, 2, 8), 2, [Layout(2), Layout(4), Layout(4, 2), Layout(4, 2, 8)]),
        (Layout(2, 1, 2), 1, [Layout(), Layout(2), Layout(2, 1, 2)]),
    ],
)
def test_the_table(target: Layout, first: int, rungs: list[Layout]) -> None:
    assert ladder_to(target, first) == tuple(rungs)


@given(layouts(), SIZES)
def test_rungs_grow_by_one_dimension_and_none_is_there_twice(target: Layout, first: int) -> None:
    rungs = ladder_to(target, first)
    assert rungs[-1] == target and len(set(rungs)) == len(rungs)
    assert rungs == ordered(rungs)
    for simpler, other in itertools.pairwise(rungs):
        assert simpler.within(other)
        assert len(changed(simpler, other)) == 1


@given(layouts(), SIZES, SIZES, st.booleans())
def test_between_two_layouts_one_dimension_is_added_at_a_time(simpler: Layout, tp: int, dp: int, experts: bool) -> None:
    world = simpler.tp * tp * simpler.dp * dp
    other = Layout(simpler.tp * tp, simpler.dp * dp, world if experts or simpler.ep > 1 else 1)
    steps = [simpler, *between(simpler, other), other]
    names = [changed(one, two) for one, two in itertools.pairwise(steps)]
    assert tuple(itertools.chain.from_iterable(names)) == changed(simpler, other)
    assert all(len(one) == 1 for one in names) or simpler == other


def test_tp_is_fixed_before_dp_before_ep() -> None:
    assert between(Layout(), Layout(2, 2, 4)) == (Layout(2), Layout(2, 2))
    assert between(Layout(2), Layout(2, 2, 4)) == (Layout(2, 2),)
    assert between(Layout(2), Layout(4)) == ()


@given(layouts(), SIZES, st.data())
def test_the_first_rung_that_diverges_ends_the_walk(target: Layout, first: int, data: st.DataObject) -> None:
    rungs = ladder_to(target, first)
    verdicts: dict[Layout, Verdict] = {one: data.draw(st.sampled_from(["aligned", "diverged"])) for one in rungs}
    order, found = walked(rungs, verdicts)
    bad = [one for one in rungs if verdicts[one] == "diverged"]
    if not bad:
        assert (tuple(order), found.state, found.introduced_at) == (rungs, "nothing", None)
        return
    at = rungs.index(bad[0])
    assert tuple(order) == rungs[: at + 1]
    assert found.introduced_at == bad[0]
    if at == 0:
        assert (found.state, found.dimension, found.clean_at) == ("everywhere", None, None)
    else:
        assert (found.state, found.clean_at) == ("introduced", rungs[at - 1])
        assert (found.dimension,) == changed(rungs[at - 1], rungs[at])


@given(st.lists(layouts(), min_size=1, max_size=6), st.data())
def test_any_list_and_any_verdicts_come_to_an_end(listed: list[Layout], data: st.DataObject) -> None:
    verdicts: dict[Layout, Verdict] = {}
    known: dict[Layout, Ran] = {}
    for _ in range(40):
        move = next_move(listed, known)
        if isinstance(move, Conclusion):
            break
        verdicts[move.layout] = data.draw(st.sampled_from(["aligned", "diverged", "not comparable"]))
        known[move.layout] = ran(move.layout, verdicts[move.layout])
    assert isinstance(move, Conclusion)
    if move.state == "introduced":
        assert move.clean_at is not None and move.introduced_at is not None
        assert verdicts[move.clean_at] == "aligned" and verdicts[move.introduced_at] == "diverged"
        assert changed(move.clean_at, move.introduced_at) == (move.dimension,)
    for language in LANGUAGES:
        assert text_of(move.said, language)


def test_dimensions_that_change_at_once_are_taken_apart() -> None:
    target = Layout(2, 2)
    order, found = walked((Layout(), target), {target: "diverged", Layout(2): "diverged"})
    assert order == [Layout(), target, Layout(2)]
    assert (found.dimension, found.introduced_at, found.clean_at) == ("tp", Layout(2), Layout())
    order, found = walked((Layout(), target), {target: "diverged"})
    assert order == [Layout(), target, Layout(2)]
    assert (found.dimension, found.introduced_at, found.clean_at) == ("dp", target, Layout(2))


def test_what_cannot_be_taken_apart_is_not_clear() -> None:
    target = Layout(2, 2)
    _, found = walked((Layout(), target), {target: "diverged", Layout(2): "not comparable"})
    assert (found.state, found.dimension, found.changed) == ("unclear", None, ("tp", "dp"))
    assert "not clear which dimension" in found.sentence and "tp2 dp1 ep1" in found.sentence


def test_a_list_takes_the_nearest_clean_layout() -> None:
    """DP alone diverges: measured against one rank, and not against TP, which is no part of it."""
    rungs = (Layout(), Layout(2), Layout(1, 2))
    _, found = walked(rungs, {Layout(1, 2): "diverged"})
    assert (found.dimension, found.clean_at) == ("dp", Layout())


def test_a_rung_that_cannot_be_run_is_said_and_passed_over() -> None:
    rungs = ladder_to(Layout(2, 2))
    order, found = walked(rungs, {Layout(2): "not comparable"})
    assert order == list(rungs) and found.state == "nothing" and "not comparable: tp2 dp1 ep1" in found.sentence
    order, found = walked(rungs, {Layout(2, 2): "not comparable"})
    assert found.state == "unknown" and "nothing is known of it" in found.sentence
    _, found = walked(rungs, dict.fromkeys(rungs, "not comparable"))
    assert found.state == "unknown" and found.introduced_at is None
    _, found = walked(rungs, {Layout(): "not comparable", Layout(2): "diverged"})
    assert (found.state, found.introduced_at, found.clean_at) == ("unknown", Layout(2), None)


def test_a_target_that_ran_already_is_not_run_again() -> None:
    known = {Layout(2): ran(Layout(2), "diverged")}
    assert next_move((Layout(), Layout(2)), known) == Step(Layout(), "listed")
    known[Layout()] = ran(Layout(), "aligned")
    found = next_move((Layout(), Layout(2)), known)
    assert isinstance(found, Conclusion) and found.sentence.startswith("introduced by TP")


def test_a_fault_of_one_rank_is_no_matter_of_parallelism() -> None:
    """The target calls it path C; alone it is path B at the same place."""
    target = Layout(2)
    norm = "layers.2.mlp_norm"
    known = {target: ran(target, "diverged", "C", at=norm), Layout(): ran(Layout(), "diverged", "B", at=norm)}
    found = next_move((Layout(), target), known)
    assert isinstance(found, Conclusion)
    assert found.sentence.startswith("not introduced by parallelism: it exists at tp1 dp1 ep1 too, as path B")
    known[Layout()] = ran(Layout(), "diverged", "B", at="layers.0.attn.q")
    found = next_move((Layout(), target), known)
    assert isinstance(found, Conclusion) and found.state == "everywhere"
    assert "not introduced by parallelism alone" in found.sentence and "as path C" in found.sentence


def test_the_simplest_that_fits_leaves_tp_open() -> None:
    _, found = walked(ladder_to(Layout(4), 2), {Layout(2): "diverged"})
    assert found.state == "everywhere" and "whether TP introduces it is not known" in found.sentence


def test_a_partial_sum_and_its_reduce_are_one_origin() -> None:
    places = ("layers.1.mlp.down_partial", "layers.1.mlp.down")
    one, other = (Headline("B", "operator", "candidate", at, "") for at in places)
    assert one.like(other)
    assert not one.like(Headline("B", "operator", "reference", "layers.1.mlp.down", ""))
    assert Headline("A", "slots", None, None, "").like(Headline("A", "slots", None, "x", ""))


@pytest.mark.parametrize(("side", "sides"), [("candidate", ("candidate",)), (None, ("candidate", "reference"))])
def test_the_accused_engine_is_compared_with_itself(side: str | None, sides: tuple[str, ...]) -> None:
    known = {Layout(): ran(Layout(), "aligned"), Layout(2): ran(Layout(2), "diverged", "C", side)}
    found = next_move((Layout(), Layout(2)), known)
    assert isinstance(found, Conclusion) and accused_sides(found, known) == sides
    clean = {Layout(): ran(Layout(), "diverged")}
    at_one = next_move((Layout(), Layout(2)), clean)
    assert isinstance(at_one, Conclusion) and accused_sides(at_one, clean) == ()


@pytest.mark.parametrize(
    ("world", "verdict", "path", "starts"),
    [
        (2, "diverged", "C", True),
        (2, "diverged", "B", True),
        (2, "diverged", None, True),
        (1, "diverged", "B", False),
        (2, "aligned", None, False),
        (2, "not comparable", None, False),
        (2, "diverged", "INPUT", False),
        (2, "diverged", "ENV", False),
    ],
)
def test_when_it_starts_by_itself(world: int, verdict: str, path: str | None, starts: bool) -> None:
    assert starts_by_itself(world, verdict, path) == starts
