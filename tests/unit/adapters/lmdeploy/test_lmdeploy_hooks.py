"""The hooks inside lmdeploy's model agent, around fake methods with the engine's signatures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from adapters.base import EngineSpec, Request
from adapters.lmdeploy import hooks, receiver
from adapters.lmdeploy.adapter import LmdeployAdapter
from adapters.lmdeploy.defaults import engine_defaults
from adapters.probe import step_reader, steplog
from adapters.probe.live import OncePerRun, read_facts, read_live
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, write_spec


class BaseModelAgent:
    """As much of the engine's class as the hooks wrap."""

    rank = 0

    def __init__(self, strategy: Any, group: Any = None) -> None:
        self.agent_strategy = strategy
        self.forwards = 0
        self.dist_ctx = SimpleNamespace(attn_tp_group=group)
        self.dist_config = SimpleNamespace(dp=1, dp_rank=0)
        self.cache_config = SimpleNamespace(block_size=32, num_reserved_gpu_blocks=1)
        self.cache_engine = SimpleNamespace(gpu_cache=[("keys", "values")])
        self.inside = False
        self.patched_model: Any = None

    @contextlib.contextmanager
    def all_context(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def build_model(self) -> str:
        assert FakeWorker.made[-1].calls == ["before build"]
        self.patched_model = "the model"
        return "built"

    def build_cache_engine(self) -> str:
        return "cached"

    def warmup(self) -> str:
        for _ in range(2):
            self._forward_impl(None)
        return "warm"

    def _forward_impl(self, inputs: Any) -> str:
        self.forwards += 1
        return "output"

    def get_logits(self, hidden_states: Any) -> str:
        return f"logits of {hidden_states}"

    async def _async_step(self, inputs: Any, sampling_inputs: Any = None) -> Any:
        logits = await self._async_model_forward(inputs, return_logits=False)
        if inputs.broken:
            raise LookupError("inside the step")
        return await self._step_postprocess_with_output(logits, inputs)

    async def _prepare_dp_v1(self, inputs: Any) -> Any:
        raise AssertionError("one group prepares nothing")

    async def _async_model_forward(self, inputs: Any, return_logits: bool) -> torch.Tensor:
        self.forwards += 1
        rows = torch.zeros(inputs.seq_length.shape[0], 10)
        rows[:, 1] = 1.0
        return rows

    async def _step_postprocess_with_output(self, last_logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        sampled = last_logits.argmax(-1)
        _, tokens = self.agent_strategy.post_sampling(inputs, last_logits, sampled, None)
        return torch.as_tensor(tokens)


class FakeWorker:
    """Notes what it is told."""

    made: ClassVar[list[FakeWorker]] = []

    def __init__(self, engine: str, rank: int, tp_rank: int, dp_rank: int) -> None:
        self.about = (engine, rank, tp_rank, dp_rank)
        self.calls: list[str] = []
        self.made.append(self)

    def before_build(self) -> None:
        self.calls.append("before build")

    def after_load(self, model: Any) -> None:
        self.calls.append(f"loaded {model}")

    def after_cache(self, block_size: int, caches: list[tuple[Any, Any]], reserved: tuple[int, ...]) -> None:
        assert steplog.process_log() is not None
        self.calls.append(f"cached {block_size}, {len(caches)} layers, reserved {reserved}")


class FakeRecorder:
    """Notes when a step begins and ends."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.calls = agent, []  # type: tuple[Any, list[str]]

    def begin(self, capture: CaptureSpec, run: int, step: int, phase: str, rows: Any, last: bool) -> None:
        self.calls.append(f"begin {run}.{step} {phase} {[row.request for row in rows]} {last} {self.agent.forwards}")

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end(self) -> None:
        self.calls.append(f"end {self.agent.forwards}")

    def dummy(self, tokens: int) -> None:
        self.calls.append(f"dummy of {tokens}")


class ARModelAgentStrategy:
    def post_sampling(self, inputs: Any, logits: Any, next_token_ids: torch.Tensor, extra_inputs: Any) -> Any:
        return inputs, next_token_ids


def batch(history: list[int], lengths: list[int], is_dummy: bool = False, broken: bool = False) -> Any:
    return SimpleNamespace(
        history_lengths=torch.tensor(history), seq_length=torch.tensor(lengths), is_dummy=is_dummy, broken=broken,
        input_ids=torch.zeros(1, sum(lengths), dtype=torch.long),
    )  # fmt: skip


def sessions(*numbers: int) -> Any:
    return SimpleNamespace(session_ctx=[{"session_id": number} for number in numbers])


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent whose classes are wrapped, as in a worker."""
    monkeypatch.setattr(steplog, "_log", None)
    monkeypatch.setattr(hooks, "_state", hooks._State())
    monkeypatch.setattr(hooks._State, "runs", OncePerRun())
    monkeypatch.setattr(hooks, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "made", [])
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    fake: Any = ModuleType("lmdeploy.pytorch.strategies.ar.model_agent")
    fake.ARModelAgentStrategy = type("ARModelAgentStrategy", (ARModelAgentStrategy,), {})
    maker: Any = ModuleType("lmdeploy.pytorch.engine.model_agent.inputs_maker")
    maker.DPForwardInputsMaker = type("DPForwardInputsMaker", (), {"get": lambda self: None})
    monkeypatch.setitem(sys.modules, maker.__name__, maker)
    packages = ("strategies", "strategies.ar", "engine", "engine.model_agent")
    for name in ("lmdeploy", "lmdeploy.pytorch", *(f"lmdeploy.pytorch.{one}" for one in packages)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    cls = type("BaseModelAgent", (BaseModelAgent,), {})
    hooks.install(SimpleNamespace(BaseModelAgent=cls))
    return cls(fake.ARModelAgentStrategy())


def step(agent: Any, inputs: Any, sampling_inputs: Any = None) -> list[int]:
    return [int(token) for token in asyncio.run(agent._async_step(inputs, sampling_inputs=sampling_inputs))]


def test_rows_are_known_by_session_and_position_and_tokens_are_forced(agent: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, ProbeSpec(1, 2, {"7": RequestSpec("a", 3, 2, (5, 6)), "9": RequestSpec("b", 2, 2)}))
    assert step(agent, batch([0, 0], [3, 2]), sessions(7, 9)) == [5, 1]
    assert step(agent, batch([2, 3], [1, 1]), sessions(9, 7)) == [1, 6]
    first, second = step_reader.read_steps(tmp_path, 1)
    assert [(row.request, row.start, row.count) for row in first.rows] == [("a", 0, 3), ("b", 0, 2)]
    assert [(row.request, row.start, row.count) for row in second.rows] == [("b", 2, 1), ("a", 3, 1)]
    assert (first.phase, second.phase) == ("prefill", "decode")
    a, b = step_reader.read_generations(tmp_path, 1, ["a", "b"])
    assert (a.token_ids, a.greedy_ids, b.token_ids) == ((5, 6), (1, 1), (1, 1))


def test_forcing_leaves_the_sampled_tensor_alone(agent: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, ProbeSpec(1, 2, {"7": RequestSpec("a", 3, 1, (5,))}))
    hooks._state.forced = [None, 5]
    sampled = torch.tensor([1, 1])
    _, tokens = agent.agent_strategy.post_sampling(None, None, sampled, None)
    assert tokens.tolist() == [1, 5]
    assert tokens.dtype == sampled.dtype
    assert sampled.tolist() == [1, 1]
    hooks._state.forced = [None, None]
    assert agent.agent_strategy.post_sampling(None, None, sampled, None)[1] is sampled


def test_warm_up_and_dummy_inputs_are_dummy(agent: Any, tmp_path: Path) -> None:
    assert step(agent, batch([0], [4])) == [1]
    write_spec(tmp_path, ProbeSpec(1, 2, {"7": RequestSpec("a", 3, 1, (5,))}))
    assert step(agent, batch([0], [1], is_dummy=True), sessions(7)) == [1], "a dummy forward is never forced"
    assert step(agent, batch([0], [3]), sessions(7)) == [5]
    lines = (tmp_path / "steps-rank0.jsonl").read_text().splitlines()
    assert [line.split('"')[3] for line in lines] == ["dummy", "dummy", "step", "end", "tokens"]
    assert agent.forwards == 3


def test_an_error_of_the_step_is_printed_and_passes(
    agent: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LookupError):
        step(agent, batch([0], [1], broken=True))
    assert "LookupError: inside the step" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- worker


@pytest.mark.parametrize(("device", "unblocked"), [("simnpu", 1), ("ascend", 0)])
def test_the_receiver_is_unblocked_over_the_simulated_device_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, unblocked: int
) -> None:
    executor = ModuleType("mp_executor")
    packages = "lmdeploy.pytorch.engine.executor"
    for depth in range(1, packages.count(".") + 2):
        name = ".".join(packages.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[packages], "mp_executor", executor, raising=False)
    given: list[Any] = []
    monkeypatch.setattr(hooks, "read_launch", lambda: SimpleNamespace(device=device))
    monkeypatch.setattr(receiver, "unblock", given.append)
    hooks._unblock_receiver()
    assert given == [executor] * unblocked


@pytest.mark.parametrize("rank", [None, 1])
def test_the_worker_is_told_when_the_model_and_the_cache_are_there(
    agent: Any, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "read_launch", lambda: SimpleNamespace(device="ascend"))
    agent.dist_ctx.attn_tp_group = None if rank is None else SimpleNamespace(rank=rank)
    assert (agent.build_model(), agent.build_cache_engine()) == ("built", "cached")
    (worker,) = FakeWorker.made
    assert worker.about == ("lmdeploy", 0, rank or 0, 0)
    assert worker.calls == ["before build", "loaded the model", "cached 32, 1 layers, reserved (0,)"]


def test_a_step_begins_before_its_forward_and_ends_behind_it(agent: Any, tmp_path: Path) -> None:
    capture = CaptureSpec(str(tmp_path))
    write_spec(tmp_path, ProbeSpec(1, 2, {"7": RequestSpec("a", 3, 2), "9": RequestSpec("b", 2, 2)}, capture))
    step(agent, batch([0], [4]))
    recorder: Any = FakeRecorder(agent)
    log = steplog.process_log()
    assert log is not None
    log.recorder = recorder
    step(agent, batch([0, 0], [3, 2]), sessions(7, 9))
    step(agent, batch([0], [1], is_dummy=True), sessions(7))
    step(agent, batch([2, 3], [1, 1]), sessions(9, 7))
    assert recorder.calls == [
        "begin 1.0 prefill ['a', 'b'] False 1",
        "end 2",
        "dummy of 1",
        "end 3",
        "begin 1.1 decode ['b', 'a'] True 3",
        "end 4",
    ]


def test_sampling_is_read_at_the_first_step_of_each_run(agent: Any, tmp_path: Path) -> None:
    for generation, top_k in ((1, 1), (2, 5)):
        write_spec(tmp_path, ProbeSpec(generation, 2, {"7": RequestSpec("a", 3, 3)}))
        for start, count, now in ((0, 3, top_k), (3, 1, 99)):
            named = sessions(7)
            named.max_top_k, named.top_k = now, torch.tensor([now])
            step(agent, batch([start], [count]), named)
        facts = {fact.name: fact.value for fact in read_facts(tmp_path, "sampling")[0]}
        assert (facts["greedy"], facts["top_k"]) == (top_k == 1, top_k)


def test_forwards_of_the_warm_up_are_counted_and_the_worker_says_what_it_runs(agent: Any, tmp_path: Path) -> None:
    agent.patched_model = torch.nn.Module()
    assert agent._forward_impl(None) == "output"
    assert steplog.process_log(0) is not None  # as of the cache
    assert agent.warmup() == "warm"
    assert agent._forward_impl(None) == "output"
    lines = (tmp_path / "steps-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["dummy", "dummy"], "two inside, none before or after"
    facts = {fact.name: fact for fact in read_live(tmp_path)[0]}
    assert facts["dummy_forwards"].value == 2
    assert facts["worker_tp"].value is None, "this agent does not know it"


@pytest.mark.parametrize(
    ("layout", "asked"),
    [
        ((2, 1, 1), {"tp": 2, "distributed_executor_backend": "mp"}),
        ((2, 1, 2), {"tp": 2, "ep": 2, "distributed_executor_backend": "mp"}),
        ((1, 2, 2), {"tp": 1, "dp": 2, "ep": 2, "dp_rank": 0, "distributed_executor_backend": "ray"}),
        ((2, 2, 4), {"tp": 2, "dp": 2, "ep": 4, "dp_rank": 0, "distributed_executor_backend": "ray"}),
    ],
)
def test_layouts_in_the_engines_own_words(layout: tuple[int, int, int], asked: dict[str, Any]) -> None:
    """With experts spread over the ranks ``tp`` is that of one group; else it counts all ranks."""
    tp, dp, ep = layout
    given = engine_defaults(EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w", tp=tp, dp=dp, ep=ep))
    names = ("tp", "dp", "ep", "dp_rank", "mlp_tp_size", "moe_tp_size", "distributed_executor_backend")
    assert {name: given[name] for name in names if name in given} == asked


def test_runs_have_sessions_of_their_own() -> None:
    adapter = LmdeployAdapter()
    request = Request("a", (1,), 1)
    keys = {adapter._key(generation, index, request) for generation in range(1, 5) for index in range(100)}
    assert len(keys) == 400
    assert all(key.isdecimal() for key in keys), "a session is a number"


def test_the_forward_and_the_head_of_a_step_are_watched(agent: Any) -> None:
    seen: list[str] = []

    class Watching(FakeRecorder):
        @contextlib.contextmanager
        def watching(self) -> Iterator[None]:
            seen.append("watch")
            yield
            seen.append("look away")

    log = steplog.process_log(0)
    assert log is not None
    recorder: Any = Watching(agent)
    log.recorder = recorder
    assert agent._forward_impl(None) == "output"
    assert seen == ["watch", "look away"]
    assert agent.get_logits("x") == "logits of x"
    assert seen == ["watch", "look away"] * 2
