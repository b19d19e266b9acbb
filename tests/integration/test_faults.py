"""The check can fail: a wrong operator makes the engine that uses it disagree with transformers."""

from __future__ import annotations

from pathlib import Path

from adapters.base import SIDES
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.run.plan import forced_along
from tests.integration.pair import golden_replay
from tests.integration.support import default_case, launched

FAULT = {"ALIGN_SIMNPU_FAULT": "npu_swiglu:scale=1.5"}


def test_wrong_swiglu_on_both_sides_is_seen_by_transformers(tmp_path: Path) -> None:
    info, case = default_case("qwen3")
    policy = NoisePolicy.for_dtype(case.dtype, info.layers)
    with launched(case, info, tmp_path / "run", dict.fromkeys(SIDES, FAULT)) as session:
        session.generate()
        session.replay()
        outcome = session.outcome.sides
    reference = outcome["reference"].free
    assert reference is not None
    golden = golden_replay(info, case, forced_along(case.to_requests(), reference.generations), tmp_path)
    for role in SIDES:
        replay = outcome[role].replay
        assert replay is not None
        compared = compare_tokens(replay.generations, golden.generations, mode="replay", policy=policy)
        assert compared.verdict == "diverged", f"{role} multiplies swiglu by 1.5 and still agrees with transformers"


def test_wrong_swiglu_on_one_side_diverges(tmp_path: Path) -> None:
    info, case = default_case("qwen3")
    with launched(case, info, tmp_path / "run", {"candidate": FAULT}) as session:
        session.generate()
        results = {role: side.free for role, side in session.outcome.sides.items()}
    candidate, reference = results["candidate"], results["reference"]
    assert candidate is not None
    assert reference is not None
    policy = NoisePolicy.for_dtype(case.dtype, info.layers)
    compared = compare_tokens(candidate.generations, reference.generations, mode="free", policy=policy)
    assert compared.verdict == "diverged"
    assert compared.first is not None
    assert compared.first.index == 0, "swiglu is wrong in prefill already, so the first token differs"
