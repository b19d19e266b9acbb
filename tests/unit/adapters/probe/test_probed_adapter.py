"""A run of a probed adapter over a fake engine whose workers keep the step log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from adapters.base import EngineSpec, Observation, Progress, Request
from adapters.mistakes import Mistake
from adapters.probe.adapter import ProbedAdapter
from adapters.probe.launch import read_launch
from adapters.probe.spec import CaptureSpec, SpecReader
from adapters.probe.steplog import StepLog

VOCABULARY = 16


class FakeEngine(ProbedAdapter):
    """Prefers ``position % VOCABULARY``, makes one surplus step, and returns what ``lie`` makes of its tokens."""

    name = "fake"

    def __init__(self, directory: Path, lie: int = 0) -> None:
        super().__init__()
        self._log = StepLog(directory, 0)
        self._lie = lie

    def _build(self, spec: EngineSpec, progress: Progress) -> None:
        progress("build", read_launch().model_path)

    def observe(self) -> Sequence[Observation]:
        return ()

    def close(self) -> None:
        """Nothing to end."""

    def _key(self, generation: int, index: int, request: Request) -> str:
        return f"{generation}/{index}"

    def _execute(self, requests: Mapping[str, Request]) -> dict[str, list[int]]:
        returned: dict[str, list[int]] = {}
        for key, request in requests.items():
            tokens: list[int] = []
            start, count = 0, len(request.token_ids)
            for _ in range(request.max_new_tokens + 1):
                self._log.step([(key, start, count)])
                position = start + count
                logits = torch.zeros(1, VOCABULARY)
                logits[0, position % VOCABULARY] = 5.0
                (forced,) = self._log.choose(logits, [key])
                tokens.append(position % VOCABULARY if forced is None else forced)
                start, count = position, 1
            stop = next((i for i, token in enumerate(tokens) if token in request.stop_ids), request.max_new_tokens)
            returned[request.name] = [token + self._lie for token in tokens[:stop]]
        return returned


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    return tmp_path


def test_generate_and_replay_are_read_back(directory: Path) -> None:
    engine = FakeEngine(directory)
    free = engine.generate((Request("a", (1, 2), 3), Request("b", (1,), 2)), top_k=2)
    assert [(g.request, g.token_ids) for g in free.generations] == [("a", (2, 3, 4)), ("b", (1, 2))]
    assert all(step.forced == {} for step in free.steps)
    replay = engine.replay((Request("a", (1, 2), 3, forced=(9, 8, 7)),), top_k=2)
    (generation,) = replay.generations
    assert generation.token_ids == (9, 8, 7)
    assert generation.greedy_ids == (2, 3, 4)
    assert [step.forced for step in replay.steps] == [{"a": 9}, {"a": 8}, {"a": 7}, {}]


def test_what_follows_a_stop_id_is_no_part_of_the_generation(directory: Path) -> None:
    result = FakeEngine(directory).generate((Request("a", (1, 2), 6, stop_ids=(4,)),), top_k=1)
    assert result.generations[0].token_ids == (2, 3, 4)


def test_an_engine_that_returns_other_tokens_is_caught(directory: Path) -> None:
    words = "request a: the engine returned id 3 as generated token 0, and its workers chose id 2"
    with pytest.raises(Mistake, match=words) as caught:
        FakeEngine(directory, lie=1).generate((Request("a", (1, 2), 3),), top_k=1)
    assert "--set" in caught.value.hint and "patch" in caught.value.hint


def test_a_token_more_than_the_workers_chose_is_caught(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = FakeEngine._execute
    monkeypatch.setattr(FakeEngine, "_execute", lambda self, keys: {"a": [*execute(self, keys)["a"], 5]})
    with pytest.raises(Mistake, match="returned id 5 as generated token 3, and its workers chose nothing"):
        FakeEngine(directory).generate((Request("a", (1, 2), 3),), top_k=1)


def test_free_and_forced_requests_are_not_mixed(directory: Path) -> None:
    engine = FakeEngine(directory)
    with pytest.raises(AssertionError):
        engine.generate((Request("a", (1,), 1, forced=(2,)),), top_k=1)
    with pytest.raises(AssertionError):
        engine.replay((Request("a", (1,), 1),), top_k=1)


def launched(directory: Path, lie: int = 0, **options: object) -> FakeEngine:
    engine = FakeEngine(directory, lie)
    spec = EngineSpec("fake", "candidate", "/m", "bfloat16", str(directory), options=dict(options))
    engine.launch(spec, lambda stage, detail="": None)
    assert read_launch() == spec
    return engine


def test_workers_know_their_launch_before_the_engine_is_built(directory: Path) -> None:
    said = []
    spec = EngineSpec("fake", "reference", "/model", "float16", str(directory), tp=2, patches=("p.py",))
    FakeEngine(directory).launch(spec, lambda stage, detail="": said.append((stage, detail)))
    assert said == [("build", "/model")]
    assert read_launch() == spec


def test_what_to_record_is_said_per_run(directory: Path) -> None:
    engine = launched(directory)
    first = CaptureSpec(str(directory / "one"), values=("embed",))
    second = CaptureSpec(str(directory / "two"), digest=False, seed=3)
    reader = SpecReader(directory)
    engine.generate((Request("a", (1, 2), 1),), top_k=1, capture=first)
    seen = reader.read()
    assert seen is not None and (seen.generation, seen.capture) == (1, first)
    engine.replay((Request("a", (1, 2), 1, forced=(3,)),), top_k=1, capture=second)
    seen = reader.read()
    assert seen is not None and (seen.generation, seen.capture) == (2, second)
    engine.generate((Request("a", (1, 2), 1),), top_k=1)
    seen = reader.read()
    assert seen is not None and seen.capture is None


def test_an_engine_that_draws_its_tokens_may_return_others(directory: Path) -> None:
    result = launched(directory, 1, **{"sampling.temperature": 1.0}).generate((Request("a", (1, 2), 3),), top_k=1)
    assert result.generations[0].greedy_ids == (2, 3, 4)


def test_other_options_change_nothing_about_that(directory: Path) -> None:
    with pytest.raises(Mistake, match="returned id"):
        launched(directory, 1, block_size=64).generate((Request("a", (1, 2), 3),), top_k=1)
