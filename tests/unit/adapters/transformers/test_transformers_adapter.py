"""The golden engine against transformers' own generation and a full-sequence forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import EngineSpec, Request, RunResult
from adapters.transformers import TransformersAdapter
from adapters.transformers.adapter import best_ids
from align.models import qwen3

PROMPTS = qwen3.default_prompts()
TOKENS = 6
REQUESTS = tuple(Request(f"r{index}", ids, TOKENS) for index, ids in enumerate(PROMPTS[:3]))


def silent(stage: str, detail: str = "") -> None:
    """Progress goes nowhere."""


def spec(path: Path, dtype: str = "float32", **changes: Any) -> EngineSpec:
    base = EngineSpec("transformers", "reference", str(path), dtype, str(path), options={"threads": 1})
    return replace(base, **changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    qwen3.build(folder, lambda line: None)
    return folder


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> Iterator[TransformersAdapter]:
    engine = TransformersAdapter()
    engine.launch(spec(checkpoint), silent)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def free(adapter: TransformersAdapter) -> RunResult:
    return adapter.generate(REQUESTS, top_k=5)


def test_tokens_are_those_of_generate(checkpoint: Path, free: RunResult) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for request, generation in zip(REQUESTS, free.generations, strict=True):
        prompt = torch.tensor([request.token_ids])
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
        )
        assert generation.request == request.name
        assert generation.token_ids == tuple(whole[0, prompt.shape[1] :].tolist())
        assert generation.greedy_ids == generation.token_ids


def test_logprobs_are_those_of_one_full_forward(checkpoint: Path, free: RunResult) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    for request, generation in zip(REQUESTS, free.generations, strict=True):
        sequence = torch.tensor([request.token_ids + generation.token_ids])
        with torch.inference_mode():
            expected = torch.log_softmax(model(sequence).logits[0], dim=-1)
        for index, step in enumerate(generation.steps):
            row = expected[len(request.token_ids) + index - 1]
            best = torch.topk(row, 5)
            assert [token for token, _ in step.top] == best.indices.tolist()
            assert [logprob for _, logprob in step.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_steps_say_what_was_computed(free: RunResult) -> None:
    assert [record.step for record in free.steps] == list(range(len(REQUESTS) * TOKENS))
    for number, request in enumerate(REQUESTS):
        records = free.steps[number * TOKENS : (number + 1) * TOKENS]
        assert [record.phase for record in records] == ["prefill"] + ["decode"] * (TOKENS - 1)
        length = len(request.token_ids)
        spans = [(row.request, row.start, row.count, row.occurrence) for record in records for row in record.rows]
        decoded = [(request.name, length + index, 1, 0) for index in range(TOKENS - 1)]
        assert spans == [(request.name, 0, length, 0), *decoded]
        assert all(record.forced == {} and not record.dummy for record in records)


def test_replay_along_the_own_tokens_changes_nothing(adapter: TransformersAdapter, free: RunResult) -> None:
    forced = [
        replace(request, forced=generation.token_ids)
        for request, generation in zip(REQUESTS, free.generations, strict=True)
    ]
    before = free.steps[-1].step
    replayed = adapter.replay(forced, top_k=5)
    assert replayed.generations == free.generations
    assert replayed.steps[0].step > before, "steps are counted from launch"
    assert replayed.steps[0].forced == {"r0": free.generations[0].token_ids[0]}


def test_replay_feeds_the_forced_ids(checkpoint: Path, adapter: TransformersAdapter, free: RunResult) -> None:
    forced = (5, 900, 5, 77, 5, 5)
    request = replace(REQUESTS[1], forced=forced)
    (generation,) = adapter.replay([request], top_k=3).generations
    assert generation.token_ids == forced
    assert generation.steps[0].top[:3] == free.generations[1].steps[0].top[:3]
    # Every step sees the forced history: a fresh prefill of prompt + forced ids agrees.
    longer = replace(REQUESTS[1], token_ids=REQUESTS[1].token_ids + forced[:4], max_new_tokens=1)
    (fresh,) = adapter.generate([longer], top_k=3).generations
    assert fresh.steps[0].greedy == generation.steps[4].greedy
    assert fresh.steps[0].top[0][1] == pytest.approx(generation.steps[4].top[0][1], abs=1e-4)


def test_stop_ids_end_a_request(adapter: TransformersAdapter, free: RunResult) -> None:
    third = free.generations[2].token_ids[2]
    (generation,) = adapter.generate([replace(REQUESTS[2], stop_ids=(third,))], top_k=1).generations
    assert generation.token_ids == free.generations[2].token_ids[:3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_default_prompts_agree_with_float32(checkpoint: Path, free: RunResult, dtype: str) -> None:
    """The seed was chosen so: the smallest margin on the default prompts exceeds both dtypes' rounding."""
    engine = TransformersAdapter()
    engine.launch(spec(checkpoint, dtype), silent)
    observed = {item.name: item.value for item in engine.observe()}
    result = engine.generate(REQUESTS, top_k=5)
    engine.close()
    assert observed["dtype"] == dtype and observed["attention"] == "eager"
    assert [entry.token_ids for entry in result.generations] == [entry.token_ids for entry in free.generations]


def test_threads_are_given_back(checkpoint: Path) -> None:
    before = torch.get_num_threads()
    engine = TransformersAdapter()
    engine.launch(spec(checkpoint, options={"threads": before + 1}), silent)
    assert torch.get_num_threads() == before + 1
    engine.close()
    engine.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "valid: bfloat16, float16, float32"),
        ({"tp": 2}, "one rank"),
        ({"options": {"treads": 1}}, "no option treads"),
        ({"options": {"threads": 0}}, "positive integer"),
    ],
)
def test_specifications_it_cannot_honour(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformersAdapter().launch(spec(tmp_path, **changes), silent)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", (), 1), "at least one prompt id"),
        (Request("a", (5,), 0), "at least one prompt id"),
        (Request("a", (1024,), 1), "id 1024 is outside 0 … 1023"),
        (Request("a", (-1,), 1), "id -1 is outside"),
        (Request("a", (5,) * 4090, 16), "exceed the model's 4096 positions"),
        (Request("a", (5,), 1, forced=(5,)), "use replay"),
    ],
)
def test_requests_it_cannot_run(adapter: TransformersAdapter, request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter.generate([request_], top_k=1)


@pytest.mark.parametrize("forced", [None, (5,), (5, 5, 5)])
def test_replay_needs_one_id_per_token(adapter: TransformersAdapter, forced: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="needs 2 forced ids"):
        adapter.replay([Request("a", (5,), 2, forced=forced)], top_k=1)


def test_top_k_within_the_vocabulary(adapter: TransformersAdapter) -> None:
    for top_k in (0, 1025):
        with pytest.raises(ValueError, match="top_k"):
            adapter.generate([REQUESTS[0]], top_k=top_k)


def test_nothing_runs_before_launch() -> None:
    with pytest.raises(ValueError, match="call launch first"):
        TransformersAdapter().generate([REQUESTS[0]], top_k=1)


def test_best_ids_by_hand() -> None:
    greedy, top = best_ids(torch.tensor([0.0, math.log(3.0), math.log(3.0), math.log(1.0)], dtype=torch.float32), 3)
    assert greedy == 1
    assert [token for token, _ in top] == [1, 2, 0]
    assert [logprob for _, logprob in top] == pytest.approx([math.log(3 / 8), math.log(3 / 8), math.log(1 / 8)])


def test_best_ids_shows_nan() -> None:
    greedy, top = best_ids(torch.tensor([0.0, float("nan"), 1.0]), 2)
    assert greedy == 1 and all(math.isnan(logprob) for _, logprob in top)
