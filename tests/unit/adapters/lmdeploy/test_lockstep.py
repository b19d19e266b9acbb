"""Groups that step together, over real collectives between two processes, and where a group waits for its requests."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.base import EngineSpec
from adapters.lmdeploy.defaults import engine_defaults
from adapters.lmdeploy.gate import Gate
from adapters.lmdeploy.lockstep import Lockstep, next_cycle, of_agent, read_due
from adapters.probe.spec import ProbeSpec, RequestSpec, write_spec
from adapters.probe.steplog import StepLog
from envs.home import REPOSITORY

SCRIPT = Path(__file__).with_name("lockstep_rank.py")


def groups(directory: Path, script: list[list[int]], requests: dict[str, RequestSpec]) -> list[list[Any]]:
    """What each of two ranks computed in each cycle of a run."""
    (directory / "launch.json").write_text("{}")
    write_spec(directory, ProbeSpec(1, 1, requests))
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        port = probed.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ALIGN_PROBE_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(port), json.dumps(script[rank])],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        return [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_groups_whose_engines_are_not_equally_fast_begin_and_end_together(tmp_path: Path) -> None:
    """Group 1 gets each input 30 ms late; it is waited for, and has nothing only when its request has its tokens."""
    requests = {"1": RequestSpec("r0", 3, 4), "2": RequestSpec("r1", 2, 2, dp_rank=1)}
    first, second = groups(tmp_path, [[0, 0, 0, 0], [30, 30]], requests)
    assert first == ["r0 0+3", "r0 3+1", "r0 4+1", "r0 5+1"]
    assert second == ["r1 0+2", "r1 2+1", "idle", "idle"]


def test_a_step_behind_the_last_token_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """Both look ahead, group 1 slowly: without waiting it would compute a dummy, and begin the next run with it."""
    requests = {"1": RequestSpec("r0", 3, 2), "2": RequestSpec("r1", 2, 2, dp_rank=1)}
    first, second = groups(tmp_path, [[0, 0, 0], [0, 0, 100]], requests)
    assert first == ["r0 0+3", "r0 3+1", "r0 4+1"]
    assert second == ["r1 0+2", "r1 2+1", "r1 3+1"]


def test_a_late_arrival_meets_the_cycle_that_the_case_names(tmp_path: Path) -> None:
    requests = {"1": RequestSpec("r0", 3, 4), "2": RequestSpec("r1", 2, 2, arrival=2, dp_rank=1)}
    first, second = groups(tmp_path, [[0, 0, 0, 0], [40, 0]], requests)
    assert first == ["r0 0+3", "r0 3+1", "r0 4+1", "r0 5+1"]
    assert second == ["idle", "idle", "r1 0+2", "r1 2+1"]
    assert read_due(tmp_path, 1, run=1) == 3, "the last cycle for which it waited"
    assert read_due(tmp_path, 1, run=2) == -1, "of another run it says nothing"
    assert read_due(tmp_path, 0, run=1) == 0, "it began the run"


def test_an_arrival_after_all_have_ended_comes_at_once(tmp_path: Path) -> None:
    requests = {"1": RequestSpec("r0", 3, 2), "2": RequestSpec("r1", 2, 1, arrival=9, dp_rank=1)}
    first, second = groups(tmp_path, [[0, 0], [20]], requests)
    assert first == ["r0 0+3", "r0 3+1", "idle"]
    assert second == ["idle", "idle", "r1 0+2"]


def test_a_request_that_ended_early_is_not_waited_for(tmp_path: Path) -> None:
    """Token 1 is what the ranks of this test prefer, and ends the request of group 1 after its first token."""
    requests = {"1": RequestSpec("r0", 3, 3), "2": RequestSpec("r1", 2, 3, dp_rank=1, stop_ids=(1,))}
    first, second = groups(tmp_path, [[0, 0, 0], [0]], requests)
    assert first == ["r0 0+3", "r0 3+1", "r0 4+1"]
    assert second == ["r1 0+2", "idle", "idle"]


def test_the_next_cycle_of_a_run_in_which_nobody_has_anything() -> None:
    requests = [RequestSpec("a", 1, 1), RequestSpec("b", 1, 1, arrival=4), RequestSpec("c", 1, 1, arrival=7)]
    assert [next_cycle(requests, cycle) for cycle in (0, 3, 4, 6, 7, 9)] == [4, 4, 7, 7, 7, 9]


@pytest.mark.parametrize(("dp", "held"), [(1, True), (2, False)])
def test_one_group_and_requests_that_are_not_held_have_no_lockstep(
    dp: int, held: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    monkeypatch.setattr("adapters.probe.steplog._log", None)
    monkeypatch.setattr("adapters.lmdeploy.lockstep.read_launch", lambda: SimpleNamespace(hold_arrivals=held))
    agent = SimpleNamespace(
        rank=0, dist_config=SimpleNamespace(dp=dp, dp_rank=0, world_size=dp), dist_ctx=SimpleNamespace(cpu_group=None)
    )
    assert of_agent(agent) is None


@pytest.mark.parametrize("first", [0, 3])
def test_the_gate_waits_until_the_other_groups_have_come_as_far(first: int) -> None:
    gate, submitted = Gate(), list[str]()
    cycle = -1
    gate.due = lambda: cycle
    gate.arm([(first, "first"), (5, "later")], submitted.append, lambda key: True)

    async def nothing() -> tuple[None, None]:
        return None, None

    async def run() -> None:
        nonlocal cycle
        waiting = asyncio.ensure_future(gate.next_arrival())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await gate.wrap(nothing)()
        assert submitted == [], "no rank has said that the run has begun"
        cycle = first
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())
    assert submitted == ["first"]


def test_a_run_that_is_announced_behind_the_agreement_is_left_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One rank hears of it and the other does not: waiting for its requests would begin it on one rank alone."""
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    log = StepLog(tmp_path, 0)
    write_spec(tmp_path, ProbeSpec(1, 1, {"1": RequestSpec("r0", 3, 2)}))

    def gathered(theirs: torch.Tensor, mine: torch.Tensor, **_: Any) -> Any:
        theirs.view(2, 2).copy_(mine)
        write_spec(tmp_path, ProbeSpec(2, 1, {"2": RequestSpec("r0", 3, 2)}))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr("adapters.lmdeploy.lockstep.dist.all_gather_into_tensor", gathered)
    lockstep = Lockstep(log, None, 2)
    log.step([("1", 0, 3)])
    log.step([("1", 3, 1)])
    log.step([("1", 4, 1)])
    assert log.served(RequestSpec("r0", 3, 2)) and log.overran(RequestSpec("r0", 3, 2))

    async def twice() -> bool:
        await asyncio.wait_for(lockstep.wait(asyncio.Queue()), 5)  # of run 1 all is served: nothing to wait for
        first = log.generation
        waiting = asyncio.ensure_future(lockstep.wait(asyncio.Queue()))
        await asyncio.sleep(0.05)
        waits = not waiting.done()
        waiting.cancel()
        return first == 1 and log.generation == 2 and waits

    assert asyncio.run(twice())
    assert read_due(tmp_path, 0, run=2) == 0


def test_a_dense_model_splits_its_mlp_inside_each_group_alone() -> None:
    def of(tp: int, dp: int, dp_rank: int = 0) -> dict[str, Any]:
        spec = EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w", tp=tp, dp=dp, dp_rank=dp_rank)
        names = ("tp", "dp", "dp_rank", "mlp_tp_size", "moe_tp_size", "distributed_executor_backend")
        return {name: value for name, value in engine_defaults(spec).items() if name in names}

    assert of(1, 1) == {"tp": 1, "distributed_executor_backend": "uni"}
    assert of(2, 1) == {"tp": 2, "distributed_executor_backend": "mp"}
    ray = {"distributed_executor_backend": "ray"}
    assert of(1, 2, 1) == {"tp": 2, "dp": 2, "dp_rank": 1, "mlp_tp_size": 1, "moe_tp_size": 2, **ray}
    assert of(2, 2) == {"tp": 4, "dp": 2, "dp_rank": 0, "mlp_tp_size": 2, "moe_tp_size": 4, **ray}
