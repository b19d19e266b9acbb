"""Real processes in parallel on both engines: data-parallel groups, idle ones, actors of Ray, and workers that die.

``test_collectives`` and ``test_path_c`` have the faults of tensor parallelism.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.support import run_align

pytestmark = pytest.mark.timeout(600)
RAY = ("--set", "candidate.distributed_executor_backend=ray")
#: The first request of a group is served for longer than the second group's.
ONE = {"token_ids": [5, 17, 300, 42, 7, 999, 64], "dp_rank": 0, "max_new_tokens": 9}
OTHER = {"token_ids": [11, 12, 13, 500, 600, 701, 33, 8, 12, 90, 77], "dp_rank": 1, "max_new_tokens": 9}


def prompts(directory: Path, *lines: dict[str, Any]) -> str:
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def patch(directory: Path, text: str) -> str:
    file = directory / "patch.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


def run(directory: Path, *arguments: str, timeout: float = 580.0) -> tuple[int, dict[str, Any], dict[str, Any], str]:
    """Exit code, ``result.json``, ``run.json`` and all output; nothing may be left running."""
    out = directory / "run"
    done = run_align("run", "--model", "qwen3", "--quiet", "--out", str(out), *arguments, timeout=timeout)
    files = [out / "result.json", out / "run.json"]
    result, record = (json.loads(file.read_text()) if file.is_file() else {} for file in files)
    assert left_below(out) == []
    return done.returncode, result, record, done.stdout + done.stderr


def left_below(out: Path, seconds: float = 15.0) -> list[str]:
    """Processes that work in a run's directory, apart from this one."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "environ"]):
            told = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
            if process.pid != os.getpid() and any(str(out) in one for one in told):
                found.append(" ".join(process.info["cmdline"] or ()))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def test_two_groups_agree_and_their_requests_are_compared_once(tmp_path: Path) -> None:
    code, result, record, output = run(tmp_path, "--dp", "2", "--max-new-tokens", "8")
    assert code == 0, output
    assert result["findings"] == []
    layouts = {one["name"]: one for one in record["conditions"] if one["name"] in ("tp", "dp", "ep")}
    assert {name: one["verdict"] for name, one in layouts.items()} == dict.fromkeys(("tp", "dp", "ep"), "ok")
    case = json.loads((tmp_path / "run" / "case.json").read_text())
    assert [one.get("dp_rank", 0) for one in case["requests"]] == [0, 1, 0, 1]
    tensors = result["tensors"]
    assert tensors["counts"].get("beyond", 0) == 0 and sum(tensors["counts"].values()) == 84
    for role in ("candidate", "reference"):
        ranks = {path.name for path in (tmp_path / "run" / role / "trace").glob("rank*")}
        assert ranks == {"rank0", "rank1"}
    together = record["sides"]["candidate"]["together"]["replay"]
    assert together["torn"] == [] and together["split"] == [], "both groups prefill first, and decode from then on"
    assert record["sides"]["reference"]["together"] == {}, "vLLM's groups of a dense model are independent"


def test_an_idle_group_is_skipped_and_named(tmp_path: Path) -> None:
    """N5 of the catalogue."""
    lines = prompts(tmp_path, {**ONE, "max_new_tokens": 5}, {**OTHER, "dp_rank": 0, "max_new_tokens": 5})
    code, result, record, output = run(tmp_path, "--dp", "2", "--prompts", lines)
    assert code == 0, output
    assert result["findings"] == []
    mine, theirs = [one for one in result["remarks"] if "idle" in one]
    assert "data-parallel rank 1 of the candidate" in mine and "dummy forwards of 1 token," in mine
    assert "data-parallel rank 1 of the reference" in theirs and "made no forward" in theirs
    together = record["sides"]["candidate"]["together"]["replay"]
    assert together["lengths"] == [1] and set(together["dummies"]) == {"rank 1"}


@pytest.mark.extended
def test_an_idle_forward_that_writes_a_live_slot_is_path_a_with_the_group(tmp_path: Path) -> None:
    """F04 of the catalogue: between two steps of a request its rank makes one forward without it."""
    idle = patch(
        tmp_path,
        """
        import functools

        def apply(ctx):
            if ctx.dp_rank != 1:
                return
            from lmdeploy.pytorch.engine.model_agent.inputs_maker import DPForwardInputsMaker
            from lmdeploy.pytorch.strategies.ar.model_inputs import ARModelInputsStrategy

            get, make = DPForwardInputsMaker.get, ARModelInputsStrategy.make_dummy
            seen = {"real": 0}

            @functools.wraps(get)
            async def late_get(self):
                inputs = await get(self)
                prefill = inputs.get("inputs")
                if prefill is not None and prefill.is_dummy:
                    return inputs
                seen["real"] = 0 if prefill is not None else seen["real"] + 1
                if seen["real"] != 4:
                    return inputs
                seen["real"] += 1
                self._in_que._queue.appendleft(inputs)  # it is taken in the next forward
                return self._make_dummy_forward_inputs()

            def live_dummy(self, *args, **kwargs):
                inputs = make(self, *args, **{**kwargs, "dummy_block_id": 1})
                inputs.input_ids.zero_()  # drawn at random otherwise, and the side would not repeat itself
                return inputs

            ctx.replace(DPForwardInputsMaker, "get", late_get)
            ctx.replace(ARModelInputsStrategy, "make_dummy", live_dummy)
        """,
    )
    given = ("--dp", "2", "--no-ladder", "--prompts", prompts(tmp_path, ONE, OTHER), "--patch", f"candidate={idle}")
    code, result, _, output = run(tmp_path, *given)
    assert code == 1, output
    first = result["findings"][0]
    evidence = first["evidence"]
    assert (first["path"], first["side"], evidence["fault"], first["ranks"]) == ("A", "candidate", "dummy_write", [1])
    assert evidence["scope"]["dp_ranks"] == [1] and "on data-parallel rank 1" in evidence["what"]
    assert (evidence["writer"]["kind"], evidence["victim"]["request"], evidence["victim"]["position"]) == (
        "idle", "r1", 0,
    )  # fmt: skip
    assert {one["evidence"]["fault"] for one in result["findings"] if one["path"] == "A"} == {"dummy_write"}


@pytest.mark.extended
def test_a_request_that_joins_later_on_the_other_group(tmp_path: Path) -> None:
    late = {**OTHER, "arrival": 3, "max_new_tokens": 4}
    code, result, record, output = run(tmp_path, "--dp", "2", "--prompts", prompts(tmp_path, ONE, late))
    assert code == 0, output
    assert result["findings"] == []
    together = record["sides"]["candidate"]["together"]["replay"]
    assert together["split"] == [3], "its prompt makes the fourth common forward a prefill for all"
    assert together["torn"] == []


@pytest.mark.extended
def test_ranks_of_tensor_parallelism_as_actors(tmp_path: Path) -> None:
    code, result, record, output = run(tmp_path, "--tp", "2", *RAY, "--max-new-tokens", "6")
    assert code == 0, output
    assert result["findings"] == []
    seen = {one["name"]: one["value"] for one in record["sides"]["candidate"]["observed"]}
    assert seen["executor"] == "RayExecutor"


@pytest.mark.extended
@pytest.mark.parametrize("executor", [(), RAY], ids=["mp", "ray"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise MemoryError('no room for the weights')", "rank 1 failed to build its model: MemoryError: no room"),
        ("os._exit(9)", "rank 1"),
    ],
    ids=["raises", "ends"],
)
def test_a_worker_that_dies_while_its_model_is_built_ends_the_run(
    executor: tuple[str, ...], how: str, words: str, tmp_path: Path
) -> None:
    """lmdeploy's executor of several processes would wait for it for ever."""
    fault = patch(
        tmp_path,
        f"""
        import os

        def apply(ctx):
            if ctx.rank == 1:
                from lmdeploy.pytorch.engine.model_agent import agent

                def broken(*args, **kwargs):
                    {how}

                ctx.replace(agent, "build_patched_model", broken)
        """,
    )
    started = time.monotonic()
    given = ("--tp", "2", *executor, "--patch", f"candidate={fault}", "--launch-timeout", "300")
    code, _, _, output = run(tmp_path, *given)
    assert code == 2, output
    assert words in output
    assert time.monotonic() - started < 300, "it was not the watch that ended it"


@pytest.mark.extended
def test_upstreams_own_layout_of_dense_groups_does_not_run(tmp_path: Path) -> None:
    """Why the adapter asks for another: dlinfer's linear layer does not scatter what it adds up over the groups."""
    given = ("--dp", "2", "--set", "candidate.mlp_tp_size=2", "--prompts", prompts(tmp_path, ONE, OTHER))
    code, _, _, output = run(tmp_path, *given)
    assert code == 2, output
    assert "failed in a step" in output and "RuntimeError" in output
