"""Batches that move block tables and lengths about: every index is audited, and what is wrong is shown to be wrong.

Prompts are random ids; lengths stand on and beside block boundaries. Most of it is ``make extended``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES, EngineSpec, Request
from adapters.transformers.adapter import TransformersAdapter
from align.models.resolve import resolve_model
from tests.integration.support import run_align

pytestmark = pytest.mark.timeout(600)
BLOCK = 128
CACHING = (*(f"--set={side}.enable_prefix_caching=true" for side in SIDES), "--allow=prefix_caching")


def ids(count: int, seed: int) -> list[int]:
    return [random.Random(1000 * seed + place).randrange(3, 850) for place in range(count)]


def request(name: str, token_ids: Sequence[int], **more: int) -> dict[str, Any]:
    return {"name": name, "token_ids": list(token_ids), **more}


PREFIX = ids(2 * BLOCK, 9)
#: Name → requests, tokens to generate, further options.
BATCHES: dict[str, tuple[list[dict[str, Any]], int, tuple[str, ...]]] = {
    "unequal lengths": ([request(f"r{at}", ids(count, at)) for at, count in enumerate((1, 7, 61, 200))], 12, ()),
    "one finishes early": (
        [request("r0", ids(20, 1), max_new_tokens=2), request("r1", ids(33, 2)), request("r2", ids(90, 3))], 12, ()
    ),
    "one joins late": (
        [request("r0", ids(20, 1)), request("r1", ids(33, 2)), request("r2", ids(50, 3), arrival=4)], 12, ()
    ),
    "block boundaries": (
        [request(f"r{at}", ids(count, at)) for at, count in enumerate((127, 128, 129, 255, 256))], 4, ()
    ),
    # Two blocks each at first, three from the 27th token on: 18 do not fit into 15 or 13.
    "more than memory": (
        [request(f"r{at}", ids(230, at)) for at in range(6)],
        40,
        ("--set=candidate.num_gpu_blocks=16", "--set=reference.num_gpu_blocks_override=14"),
    ),
    "a prefix, one after the other": (
        [request("r0", PREFIX + ids(10, 1)), request("r1", PREFIX + ids(20, 2), arrival=8),
         request("r2", PREFIX, arrival=16)], 6, CACHING
    ),
}  # fmt: skip
#: With a prefix cache the second run of an engine computes the prompts' rest with another kernel: exact ties may flip,
#: so the tokens of the cases are such that none does.
TOGETHER = [request("r0", PREFIX + ids(10, 1)), request("r1", PREFIX + ids(20, 2)), request("r2", PREFIX)]
#: What mends lmdeploy 0.12.2: slots of each request from its own block table.
FIX = '''
"""Slots of a prefill over the paged cache, from each request's own row of the block table.

File: lmdeploy/pytorch/backends/dlinfer/ascend/op_backend.py
Change: kv_start_indices of request i from row i of the table as it was before it is repeated once per token
Reason: the repeated table's row i belongs to the first request
"""

import torch


def apply(ctx):
    from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

    original = AscendOpsBackend.update_step_context.__func__

    def update(cls, context):
        tables = context.block_offsets
        result = original(cls, context)
        if not context.is_decoding and not context.attn_metadata.is_unpaged_prefill:
            size, slots = context.kv_caches[0][0].shape[1], []
            for row, kv, q in zip(tables, context.kv_seqlens.tolist(), context.q_seqlens.tolist()):
                positions = torch.arange(kv - q, kv, device=row.device)
                slots.append(row[positions // size] * size + positions % size)
            context.attn_metadata.kv_start_indices = torch.cat(slots).to(torch.int32)
        return result

    ctx.replace(AscendOpsBackend, "update_step_context", classmethod(update))
'''


def ran(directory: Path, requests: list[dict[str, Any]], tokens: int, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The command over a case of these requests: its answer, and the result."""
    case = directory / "case.json"
    case.write_text(json.dumps({"model": "qwen3", "requests": requests, "decoding": {"max_new_tokens": tokens}}))
    out = directory / "run"
    done = run_align("run", "--case", str(case), "--quiet", "--out", str(out), *arguments, timeout=580)
    assert (out / "result.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((out / "result.json").read_text())


def events(run: Path, side: str, generation: int) -> list[dict[str, Any]]:
    lines = (run / side / "steps-rank0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["generation"] == generation]


def spans(run: Path, side: str) -> list[tuple[str, int, int, int]]:
    """Of the first run's steps."""
    return [tuple(row) for event in events(run, side, 1) if event["event"] == "step" for row in event["rows"]]


def audited(result: dict[str, Any], side: str) -> int:
    """Faults that the audit of a side found; everything was observed."""
    one = result["ledger"][side]
    assert one["observable"] and not one["unseen"] and one["records"] > 0, one
    return int(one["faults"])


@pytest.mark.extended
@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_addressed_rightly(tmp_path: Path, name: str) -> None:
    requests, tokens, more = BATCHES[name]
    code, result = ran(tmp_path, requests, tokens, *more)
    assert code == 0, result["sentence"] if "sentence" in result else result["reason"]
    assert all(audited(result, side) == 0 for side in SIDES)
    for side in SIDES:  # the batch was what it is called
        seen = spans(tmp_path / "run", side)
        if name == "more than memory":
            assert any(occurrence for *_, occurrence in seen), f"the {side} preempts nobody"
        if name.startswith("a prefix"):
            assert min(start for one, start, *_ in seen if one != "r0") > 0, f"the {side} has no prefix hit"


def off_by(run: Path, side: str, requests: list[dict[str, Any]], directory: Path) -> dict[str, float]:
    """Largest difference of each request's first-run logprobs from transformers' along the same tokens."""
    said: dict[str, dict[int, dict[str, Any]]] = {}
    for event in events(run, side, 1):
        for name, token in event.get("tokens", {}).items():
            said.setdefault(name, {})[token["index"]] = token
    forced = tuple(
        Request(one["name"], tuple(one["token_ids"]), len(said[one["name"]]),
                forced=tuple(said[one["name"]][at]["chosen"] for at in range(len(said[one["name"]]))))
        for one in requests
    )  # fmt: skip
    adapter = TransformersAdapter()
    adapter.launch(
        EngineSpec("transformers", "reference", str(resolve_model("qwen3").path), "bfloat16", str(directory)),
        lambda stage, detail="": None,
    )
    try:
        right = adapter.replay(forced, 20)
    finally:
        adapter.close()
    worst = {}
    for generation in right.generations:
        mine, gaps = said[generation.request], []
        for at, step in enumerate(generation.steps):
            theirs = dict(step.top)
            gaps += [abs(value - theirs[token]) for token, value in mine[at]["top"] if token in theirs]
        worst[generation.request] = max(gaps)
    return worst


def test_prefixes_that_arrive_together_are_written_into_the_first_requests_blocks(tmp_path: Path) -> None:
    """A fault of lmdeploy 0.12.2 itself, checked against transformers: whom it touches is wrong, and nobody else."""
    code, result = ran(tmp_path, TOGETHER, 6, *CACHING)
    first = result["findings"][0]
    assert code == 1 and (first["path"], first["kind"], first["side"]) == ("A", "slots", "candidate")
    evidence = first["evidence"]
    assert (evidence["fault"], first["step"], first["layer"]) == ("wrong_slot", 0, 0)
    assert (evidence["writer"]["request"], evidence["writer"]["position"]) == ("r1", 2 * BLOCK)
    assert (evidence["victim"]["request"], evidence["victim"]["position"]) == ("r0", 2 * BLOCK)
    assert "slot = block_table[256 // 128] * 128 + 256 % 128" in evidence["computed"]
    assert evidence["call"].startswith("lmdeploy/pytorch/kernels/dlinfer/fill_kv_cache.py:")
    assert audited(result, "candidate") > 0
    (tmp_path / "golden").mkdir()
    wrong = off_by(tmp_path / "run", "candidate", TOGETHER, tmp_path / "golden")
    right = off_by(tmp_path / "run", "reference", TOGETHER, tmp_path / "golden")
    noise = max(right.values())
    assert min(wrong["r0"], wrong["r1"]) > 4 * noise, (wrong, right)


@pytest.mark.extended
def test_prefixes_that_arrive_together_are_right_once_that_is_mended(tmp_path: Path) -> None:
    fix = tmp_path / "fix.py"
    fix.write_text(FIX)
    code, result = ran(tmp_path, TOGETHER, 6, *CACHING, f"--patch=candidate={fix}")
    assert code == 0, result["findings"]
    assert all(audited(result, side) == 0 for side in SIDES)
