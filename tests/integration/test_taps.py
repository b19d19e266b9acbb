"""The tap tables, and that of what makes indices, against the installed packages: every function exists and has the
arguments that are picked."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.probe.index_makers import index_makers
from adapters.probe.taps import ENGINES, Tap, load_taps
from envs.profiles import resolve

SCRIPT = Path(__file__).with_name("taps_session.py")
#: What a worker imports first: the engine's modules import each other in circles.
FIRST = {
    "lmdeploy": "lmdeploy.pytorch.engine.model_agent.agent",
    "vllm": "vllm_ascend.worker.worker",
}
MODELS = {
    "lmdeploy": [
        "lmdeploy.pytorch.models.llama:LlamaForCausalLM",
        "lmdeploy.pytorch.models.gemma:GemmaForCausalLM",
        "lmdeploy.pytorch.models.qwen2:Qwen2ForCausalLM",
        "lmdeploy.pytorch.models.qwen3:Qwen3ForCausalLM",
    ],
    "vllm": [
        "vllm.model_executor.models.llama:LlamaForCausalLM",
        "vllm.model_executor.models.gemma2:Gemma2ForCausalLM",
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM",
        "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    ],
}


def invented(table: tuple[Tap, ...]) -> tuple[Tap, ...]:
    """Rows that no installed package has, each wrong in one way."""
    by_name = {tap.checkpoint: tap for tap in table}
    norm, states, ids = by_name["attn_norm"], by_name["attn.key_states"], by_name["token_ids"]
    return (
        replace(norm, checkpoint="wrong method", where=f"{norm.where}_invented"),
        replace(norm, checkpoint="wrong class", where=norm.where.replace("RMSNorm", "RMSNorms")),
        replace(norm, checkpoint="wrong module", where="vllm_invented.norm:Norm.forward"),
        replace(states, checkpoint="wrong argument", pick="in.key_invented"),
        replace(states, checkpoint="wrong second choice", pick=f"{states.pick}|in.key_invented"),
        replace(states, checkpoint="wrong function inside", attribute=f"forward>{norm.where}_invented"),
        replace(ids, checkpoint="wrong method of the model", where="*:forward_invented"),
    )


@pytest.fixture(scope="module", params=ENGINES)
def looked_up(request: pytest.FixtureRequest) -> tuple[tuple[Tap, ...], dict[str, list[str]]]:
    """An engine's table, and what is wrong with each row, those of :func:`invented` as well."""
    engine: str = request.param
    table = load_taps(engine)
    interpreter = resolve("simnpu", engine)
    made = [[where, "", where, ""] for name, _, where in index_makers() if name == engine]
    assert made
    rows = [*made, *([tap.checkpoint, tap.attribute, tap.where, tap.pick] for tap in (*table, *invented(table)))]
    done = subprocess.run(
        [str(interpreter.python), str(SCRIPT)],
        input=json.dumps({"first": FIRST[engine], "models": MODELS[engine], "rows": rows}),
        env={**os.environ, **interpreter.env, "PYTHONPATH": os.pathsep.join(interpreter.pythonpath)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return table, json.loads(done.stdout.rpartition("\nALIGN")[2])


def test_every_row_is_in_the_installed_packages(looked_up: tuple[tuple[Tap, ...], dict[str, list[str]]]) -> None:
    table, wrong = looked_up
    bad = {tap.checkpoint for tap in invented(table)}
    assert {name: said for name, said in wrong.items() if said and name not in bad} == {}


def test_a_row_that_is_invented_is_found(looked_up: tuple[tuple[Tap, ...], dict[str, list[str]]]) -> None:
    table, wrong = looked_up
    for tap in invented(table):
        assert any("invented" in said or "RMSNorms" in said for said in wrong[tap.checkpoint]), tap.checkpoint
