"""Which smaller cases are proposed, and that the walk ends at one of which nothing can be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.case.schema import Batch, Case, CaseLayout, CaseRequest, Decoding
from align.findings import Finding
from align.reduce.executor import reduce
from align.reduce.planner import Limits, label, proposals
from align.reduce.types import Ended, Fault, Proposal, State, Tried

FOUR_LAYERS = Limits(layers=4)


def case(lengths: tuple[int, ...] = (13, 7, 21, 33), new: int = 16, tp: int = 1, late: int = 0) -> Case:
    rows = tuple(
        CaseRequest(name=f"r{place}", token_ids=tuple(range(3, 3 + length)), arrival=late if place == 1 else 0)
        for place, length in enumerate(lengths)
    )
    return Case(model="qwen3", decoding=Decoding(max_new_tokens=new), requests=rows, layout=CaseLayout(tp=tp))


def finding(requests: tuple[str, ...] = ("r1",), step: int | None = 2, **more: object) -> Finding:
    evidence = {"fault": "wrong_slot", **more}
    return Finding("A", "slots", "candidate", "layers.0.attn.slots", 0, None, step, requests, evidence=evidence)


def first(state: State, found: Finding, limits: Limits = FOUR_LAYERS) -> Proposal:
    return next(proposals(state, found, limits))


def names(state: State) -> list[str]:
    return [one.name for one in state.case.requests]


@dataclass
class Engines:
    """Shows the finding where ``shows`` says so; counts what it is asked."""

    shows: Callable[[State], Finding | None]
    asked: list[State] = field(default_factory=list)

    def run(self, proposal: Proposal) -> tuple[Ended, str]:
        self.asked.append(proposal.state)
        found = self.shows(proposal.state)
        return Ended(found, "aligned" if found is None else "diverged"), ""


def walk(start: State, found: Finding, engines: Engines, limits: Limits = FOUR_LAYERS, most: int = 1000) -> State:
    told: list[Tried] = []
    smallest, reduction = reduce(start, found, limits, engines, lambda state, tried: told.append(tried), most)
    assert list(reduction.tries) == told
    assert (reduction.before, reduction.after) == (start.size, smallest.size)
    assert len({(state.layers, state.case.to_text()) for state in engines.asked}) == len(engines.asked), "once each"
    return smallest


def test_the_finding_says_where_to_begin() -> None:
    """Its requests alone, and no token after its step: step 2 is that of the third token."""
    proposal = first(State(case()), finding(("r1", "r2"), step=2))
    assert names(proposal.state) == ["r1", "r2"]
    assert proposal.state.size.new_tokens == 3
    assert proposal.how == "only r1, r2, and 3 new tokens"


def test_writer_victim_and_reader_take_part() -> None:
    """The reader of a spoilt slot comes a step later than the writer."""
    found = finding((), 1, writer={"request": "r0"}, victim={"request": "r2"}, first_read={"request": "r2", "step": 4})
    proposal = first(State(case()), found)
    assert names(proposal.state) == ["r0", "r2"]
    assert proposal.state.size.new_tokens == 5


def test_a_dummy_is_no_request() -> None:
    proposal = first(State(case()), finding(("r1",), 1, writer={"request": ""}))
    assert names(proposal.state) == ["r1"]


def test_a_late_request_alone_is_not_late() -> None:
    proposal = first(State(case(late=3)), finding(("r1",)))
    assert [one.arrival for one in proposal.state.case.requests] == [0]


def test_own_limits_of_requests_stay_where_they_are_smaller() -> None:
    rows = tuple(
        one.model_copy(update={"max_new_tokens": own}) for one, own in zip(case().requests, (2, 9, 5, 1), strict=True)
    )
    state = State(case().model_copy(update={"requests": rows}))
    tokens = next(one for one in proposals(state, finding((), 4), FOUR_LAYERS) if one.what == "tokens")
    shrunk = tokens.state.case
    assert [shrunk.new_tokens(one) for one in shrunk.requests] == [2, 5, 5, 1]


def test_groups_share_the_numbers_of_steps() -> None:
    """Step s of group g has the number s * dp + g."""
    rows = tuple(one.model_copy(update={"dp_rank": place % 2}) for place, one in enumerate(case().requests))
    state = State(case().model_copy(update={"layout": CaseLayout(dp=2), "requests": rows}))
    assert first(state, finding(("r0", "r1"), step=5)).state.size.new_tokens == 3


def test_a_batch_limit_leaves_room_when_nobody_waits() -> None:
    start = case(late=3).model_copy(update={"batch": Batch(max_batch=3)})
    together = next(one for one in proposals(State(start), finding((), None), FOUR_LAYERS) if one.what == "arrivals")
    again = Case.model_validate_json(together.state.case.to_text())
    assert again.batch.max_batch == 4


@pytest.mark.parametrize(("layer", "layers", "expected"), [(0, None, 1), (2, None, 3), (3, None, None), (1, 2, None)])
def test_layers_behind_the_finding_are_left_out(layer: int, layers: int | None, expected: int | None) -> None:
    found = Finding("B", "operator", "candidate", f"layers.{layer}.mlp_norm", layer)
    cut = [one for one in proposals(State(case(), layers), found, FOUR_LAYERS) if one.what == "layers"]
    assert [one.state.layers for one in cut] == ([] if expected is None else [expected])


def test_no_layers_are_cut_of_what_has_none_or_is_too_large() -> None:
    found = Finding("B", "operator", "candidate", "embed")
    assert not [one for one in proposals(State(case()), found, FOUR_LAYERS) if one.what == "layers"]
    limits = Limits(layers=4, cuttable=False)
    assert not [one for one in proposals(State(case()), finding(), limits) if one.what == "layers"]


def test_simpler_layouts_come_from_the_ladder() -> None:
    layouts = [
        one.state.case.layout.to_layout().world
        for one in proposals(State(case(tp=4)), finding(), Limits(4, min_tp=2))
        if one.what == "layout"
    ]
    assert layouts == [2]
    assert not [one for one in proposals(State(case()), finding(), FOUR_LAYERS) if one.what == "layout"]


def test_every_proposal_can_be_run_and_is_smaller() -> None:
    start = State(case(late=3, tp=2))
    for proposal in proposals(start, finding(), FOUR_LAYERS):
        again = Case.model_validate_json(proposal.state.case.to_text())
        assert again == proposal.state.case
        assert proposal.state != start
        assert label(proposal.how)


# ----------------------------------------------------------------------------------------------------------- the walk


def test_eight_requests_become_the_two_that_matter() -> None:
    """Row 1 of a batch of at least two, in the second decode."""

    def shows(state: State) -> Finding | None:
        rows = names(state)
        wanted = len(rows) > 1 and state.size.new_tokens >= 3
        return finding((rows[1],), step=2) if wanted else None

    start = State(case((13, 7, 150, 21, 33, 5, 64, 100), new=64))
    smallest = walk(start, finding(("r1",), step=2), Engines(shows))
    assert (len(names(smallest)), smallest.size.new_tokens) == (2, 3)


def test_another_finding_is_not_the_same() -> None:
    def shows(state: State) -> Finding | None:
        other = finding().__class__("B", "operator", "candidate", "layers.1.attn.q", 1)
        return finding() if len(state.case.requests) == 4 and state.size.prompt_tokens == 74 else other

    engines = Engines(shows)
    smallest = walk(State(case()), finding(), engines)
    assert smallest.size.requests == 4
    _, reduction = reduce(State(case()), finding(), FOUR_LAYERS, Engines(shows), lambda state, tried: None, 3)
    assert reduction.tries[0].instead == "path B, operator of the candidate at layers.1.attn.q"
    assert not reduction.shown or reduction.after != reduction.before


def test_the_number_of_tries_is_a_limit() -> None:
    engines = Engines(lambda state: None)
    _, reduction = reduce(State(case()), finding(), FOUR_LAYERS, engines, lambda state, tried: None, 3)
    assert (len(reduction.tries), reduction.complete, reduction.shown) == (3, False, False)
    _, reduction = reduce(State(case()), finding(), FOUR_LAYERS, engines, lambda state, tried: None, 1000)
    assert (reduction.complete, reduction.after) == (True, reduction.before)


def test_a_fault_has_the_name_that_its_evidence_gives_it() -> None:
    assert Fault.of(finding()) != Fault.of(finding(fault="not_written"))
    assert Fault.of(finding(("r1",), 2)) == Fault.of(finding(("r3",), 7)), "place and time may change"
    assert str(Fault.of(finding())) == "path A, slots (wrong_slot) of the candidate at layers.0.attn.slots"


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    needed=st.sets(st.integers(0, 7), min_size=1, max_size=3),
    tokens=st.integers(1, 20),
)
def test_nothing_more_can_be_left_out(lengths: list[int], needed: set[int], tokens: int) -> None:
    """Whatever is needed, and though the finding names no request: what is left is needed, each by itself."""
    wanted = {f"r{place}" for place in needed if place < len(lengths)} or {"r0"}

    def shows(state: State) -> Finding | None:
        enough = wanted <= set(names(state)) and state.size.new_tokens >= tokens
        return finding((), None) if enough else None

    smallest = walk(State(case(tuple(lengths), new=20)), finding((), None), Engines(shows))
    assert set(names(smallest)) == wanted
    assert smallest.size.new_tokens == tokens
    assert smallest.size.prompt_tokens == sum(min(8, lengths[int(name[1:])]) for name in wanted)
    assert smallest.layers == 1
