"""Everything that one launch of a pair is asked for, so that the tests of it only look."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from adapters.base import SIDES, EngineSpec, Request, RunResult
from adapters.transformers.adapter import TransformersAdapter
from align.case.schema import Case
from align.compare.noise import NoisePolicy
from align.models.info import ModelInfo
from align.run.plan import forced_along
from align.run.session import Session
from tests.integration.support import default_case, launched

CAPITAL = "The capital of France is"
_FOREIGN_STEPS = 5


@dataclass
class PairRun:
    """Results of one launch, by role."""

    info: ModelInfo
    case: Case
    policy: NoisePolicy
    free: dict[str, RunResult]
    replay: dict[str, RunResult]
    #: batch size → role → (result, ids that were to be forced)
    foreign: dict[int, dict[str, tuple[RunResult, dict[str, tuple[int, ...]]]]]
    golden: RunResult
    text: dict[str, str] | None


def _foreign_requests(case: Case, vocabulary: int, batch: int) -> tuple[Request, ...]:
    prompts = [*case.requests][-batch:]
    return tuple(
        Request(
            name=request.name,
            token_ids=request.token_ids,
            max_new_tokens=_FOREIGN_STEPS,
            forced=tuple((31 * row + 7 * step + 3) % vocabulary for step in range(_FOREIGN_STEPS)),
        )
        for row, request in enumerate(prompts)
    )


def golden_replay(info: ModelInfo, case: Case, requests: tuple[Request, ...], work_dir: Path) -> RunResult:
    """transformers, in the case's dtype, along the same ids."""
    adapter = TransformersAdapter()
    spec = EngineSpec("transformers", "reference", str(info.path), case.dtype, str(work_dir))
    adapter.launch(spec, lambda stage, detail="": None)
    try:
        return adapter.replay(requests, case.decoding.top_logprobs)
    finally:
        adapter.close()


def _continue(info: ModelInfo, session: Session, text: str) -> dict[str, str]:
    tokenizer = Tokenizer.from_file(str(info.path / "tokenizer.json"))
    request = Request("capital", tuple(tokenizer.encode(text).ids), max_new_tokens=6)
    answers = {}
    for role in SIDES:
        result = session.side(role).generate((request,), 5)
        answers[role] = tokenizer.decode(list(result.generations[0].token_ids))
    return answers


def run_pair(model: str, dtype: str, directory: Path) -> PairRun:
    info, case = default_case(model, dtype)
    with launched(case, info, directory) as session:
        session.generate()
        session.replay()
        free = {role: side.free for role, side in session.outcome.sides.items() if side.free is not None}
        replay = {role: side.replay for role, side in session.outcome.sides.items() if side.replay is not None}
        foreign: dict[int, dict[str, tuple[RunResult, dict[str, tuple[int, ...]]]]] = {}
        for batch in (1, 4):
            requests = _foreign_requests(case, info.vocab_size, batch)
            wanted = {request.name: request.forced or () for request in requests}
            foreign[batch] = {role: (session.side(role).replay(requests, 5), wanted) for role in SIDES}
        text = _continue(info, session, CAPITAL) if model == "smollm2" else None
    forced = forced_along(case.to_requests(info.eos_ids), free["reference"].generations)
    golden = golden_replay(info, case, forced, directory)
    peak = max(step.peak for result in replay.values() for g in result.generations for step in g.steps)
    policy = NoisePolicy.for_dtype(dtype, info.layers).at(peak, dtype)
    return PairRun(info, case, policy, free, replay, foreign, golden, text)
