"""Both engines against each other and against transformers: the one reference that shares no code with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.fixtures import SubRequest

from adapters.base import SIDES
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from tests.integration.pair import PairRun, run_pair

CONFIGURATIONS = [
    ("qwen3", "bfloat16"),
    ("qwen3", "float16"),
    ("smollm2", "bfloat16"),
    ("smollm2", "float16"),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda pair: "-".join(pair))
def pair(request: SubRequest, tmp_path_factory: pytest.TempPathFactory) -> PairRun:
    model, dtype = request.param
    directory: Path = tmp_path_factory.mktemp(f"{model}-{dtype}")
    return run_pair(model, dtype, directory)


def test_both_engines_agree(pair: PairRun) -> None:
    free = compare_tokens(
        pair.free["candidate"].generations,
        pair.free["reference"].generations,
        mode="free",
        policy=pair.policy,
    )
    assert free.verdict == "aligned", free.first
    replayed = compare_tokens(
        pair.replay["candidate"].generations,
        pair.replay["reference"].generations,
        mode="replay",
        policy=pair.policy,
    )
    assert replayed.verdict == "aligned", replayed.first


@pytest.mark.parametrize("role", SIDES)
def test_tokens_equal_transformers_but_for_near_ties(pair: PairRun, role: str) -> None:
    """Forced along the same ids, the engine prefers what transformers prefers in the same dtype."""
    compared = compare_tokens(pair.replay[role].generations, pair.golden.generations, mode="replay", policy=pair.policy)
    assert compared.verdict == "aligned", compared.first
    flips = len(compared.near_ties)
    total = sum(request.total for request in compared.requests)
    assert flips <= total // 8, f"{flips} of {total} tokens are near-ties: too many for this to mean anything"


@pytest.mark.parametrize("role", SIDES)
def test_replay_forces_every_token(pair: PairRun, role: str) -> None:
    wanted = {g.request: g.token_ids for g in pair.free["reference"].generations}
    assert {g.request: g.token_ids for g in pair.replay[role].generations} == wanted
    forced: dict[str, list[int]] = {name: [] for name in wanted}
    for step in pair.replay[role].steps:
        for name, token in step.forced.items():
            forced[name].append(token)
    assert {name: tuple(ids) for name, ids in forced.items()} == wanted


@pytest.mark.parametrize("role", SIDES)
@pytest.mark.parametrize("batch", [1, 4])
def test_foreign_ids_are_forced_in_any_batch(pair: PairRun, role: str, batch: int) -> None:
    """Ids that the model would never choose are appended all the same, in batches of 1 and 4."""
    result, wanted = pair.foreign[batch][role]
    assert {g.request: g.token_ids for g in result.generations} == wanted
    greedy = {g.request: g.greedy_ids for g in result.generations}
    assert greedy != wanted
    assert len(wanted) == batch


@pytest.mark.parametrize("role", SIDES)
def test_rows_cover_each_position_once(pair: PairRun, role: str) -> None:
    """Prefill of whole prompts in one step, then one position per request and step."""
    steps = [step for step in pair.free[role].steps if step.rank == 0]
    first = steps[0]
    assert first.phase == "prefill"
    assert {row.request: (row.start, row.count) for row in first.rows} == {
        request.name: (0, len(request.token_ids)) for request in pair.case.requests
    }
    for request in pair.case.requests:
        spans = [row for step in steps for row in step.rows if row.request == request.name]
        assert all(row.occurrence == 0 for row in spans)
        covered = [position for row in spans for position in range(row.start, row.start + row.count)]
        needed = len(request.token_ids) + pair.case.new_tokens(request) - 1
        assert covered[:needed] == list(range(needed))
        assert all(row.count == 1 for row in spans[1:])


def test_smollm2_speaks_english(pair: PairRun) -> None:
    if pair.info.name != "smollm2":
        assert pair.text is None
        return
    assert pair.text is not None
    for role, text in pair.text.items():
        assert "Paris" in text, f"{role} continues the sentence about the capital of France with {text!r}"


def test_greedy_is_varied(pair: PairRun) -> None:
    for generation in pair.free["reference"].generations:
        assert len(set(generation.token_ids)) > 4, generation


def test_the_peak_of_the_logits_is_recorded(pair: PairRun) -> None:
    """The floor of the noise follows from it."""
    for result in pair.free.values():
        assert all(step.peak > 0 for generation in result.generations for step in generation.steps)
    plain = NoisePolicy.for_dtype(pair.case.dtype, pair.info.layers)
    assert plain.floor <= pair.policy.floor <= plain.cap == pair.policy.cap
