"""The hooks inside vllm-ascend's runner and the logits processor, around fakes with the engine's signatures."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from adapters.base import EngineSpec, Observation, Request
from adapters.probe import boot, step_reader, steplog
from adapters.probe.live import OncePerRun, read_facts, read_live
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, write_spec
from adapters.vllm import hooks, observe, plugin
from adapters.vllm.adapter import VllmAdapter, experts_of, group_environment, number_engine
from align.models import qwen3, qwen_moe


class NPUModelRunner:
    """As much of the engine's class as the hooks wrap."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model = "the model"
        parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=64), parallel_config=parallel)
        self.kv_caches = [("keys", "values")]
        #: Order of the batch.
        self.input_batch = SimpleNamespace(req_ids=[], sampling_metadata=SimpleNamespace())

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        self.calls.append("execute")
        if scheduler_output.total_num_scheduled_tokens:
            self._model_forward(scheduler_output.total_num_scheduled_tokens)
        return "output"

    def _model_forward(self, num_tokens: int, positions: Any = None) -> str:
        self.forwards = getattr(self, "forwards", 0) + 1
        return "hidden"

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        assert FakeWorker.made[-1].calls == ["before build"]
        return "loaded"

    def initialize_kv_cache(self, kv_cache_config: Any) -> str:
        return f"cache {kv_cache_config}"

    def _dummy_run(self, num_tokens: int, *, with_prefill: bool = False) -> str:
        self.calls.append(f"dummy {num_tokens} {with_prefill}")
        return "dummy"


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
    """Notes when a step begins and ends, and in which order its rows are."""

    structure = SimpleNamespace(experts=0)

    def __init__(self, runner: Any) -> None:
        self.runner, self.calls = runner, []  # type: tuple[Any, list[str]]

    def begin(self, capture: CaptureSpec, run: int, step: int, phase: str, rows: Any, last: bool) -> None:
        done = getattr(self.runner, "forwards", 0)
        self.calls.append(f"begin {run}.{step} {phase} {[row.request for row in rows]} {last} {done}")

    def reorder(self, requests: list[str]) -> None:
        self.calls.append(f"order {requests}")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.calls.append("watch")
        yield
        self.calls.append("look away")

    def end(self) -> None:
        self.calls.append(f"end {self.runner.forwards}")

    def dummy(self, tokens: int) -> None:
        self.calls.append(f"dummy of {tokens}")


def scheduled(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """A scheduler's output: request → (first position, count)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                num_computed_tokens=start,
                sampling_params=SimpleNamespace(extra_args={hooks.KEY: f"k:{name}"}),
            )
            for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens={name: count for name, (_, count) in {**new, **cached}.items()},
        total_num_scheduled_tokens=sum(count for _, count in {**new, **cached}.values()),
        finished_req_ids=set(finished),
    )


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(steplog, "_log", None)
    monkeypatch.setattr(hooks, "_keys", {})
    monkeypatch.setattr(hooks, "_rank", lambda runner: 1)
    monkeypatch.setattr(hooks, "_runs", OncePerRun())
    monkeypatch.setattr(hooks, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "made", [])
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    cls = type("NPUModelRunner", (NPUModelRunner,), {})
    hooks.install(SimpleNamespace(NPUModelRunner=cls))
    return cls()


def spans(directory: Path) -> list[list[tuple[str, int, int, int]]]:
    return [
        [(row.request, row.start, row.count, row.occurrence) for row in step.rows]
        for step in step_reader.read_steps(directory, 1)
    ]


def test_steps_are_recorded_before_they_run(runner: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, ProbeSpec(1, 2, {f"k:{name}": RequestSpec(name, 3, 4) for name in "ab"}))
    assert runner.execute_model(scheduled(new={"a": (0, 3), "b": (0, 3)})) == "output"
    runner.execute_model(scheduled(cached={"b": (3, 1), "a": (3, 1)}))
    runner.execute_model(scheduled(cached={"a": (0, 5)}), None)
    assert spans(tmp_path) == [[("a", 0, 3, 0), ("b", 0, 3, 0)], [("b", 3, 1, 0), ("a", 3, 1, 0)], [("a", 0, 5, 1)]]
    assert {step.rank for step in step_reader.read_steps(tmp_path, 1)} == {1}
    assert runner.calls == ["execute"] * 3


def test_an_empty_schedule_is_no_step(runner: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, ProbeSpec(1, 2, {"k:a": RequestSpec("a", 3, 1)}))
    runner.execute_model(scheduled(new={"a": (0, 3)}))
    runner.execute_model(scheduled(finished=("a",)))
    assert len(spans(tmp_path)) == 1
    assert hooks._keys == {}
    assert runner.calls == ["execute"] * 2


def test_dummy_runs_pass_their_arguments_and_are_no_steps(runner: Any, tmp_path: Path) -> None:
    assert runner._dummy_run(16, with_prefill=True) == "dummy"
    assert runner.calls == ["dummy 16 True"]
    assert '"event": "dummy"' in (tmp_path / "steps-rank1.jsonl").read_text()


# -------------------------------------------------------------------------------------------------------- worker


def test_the_worker_is_told_when_the_model_and_the_cache_are_there(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: SimpleNamespace(rank_in_group=3)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr(observe, "worker_facts", lambda runner: [Observation("a", 1, "there")])
    monkeypatch.setattr(observe, "start_facts", lambda runner, directory, rank: [Observation("b", rank, "there")])
    assert runner.load_model(load_dummy_weights=True) == "loaded"
    assert runner.initialize_kv_cache("config") == "cache config"
    (worker,) = FakeWorker.made
    assert worker.about == ("vllm", 1, 3, 0)
    assert worker.calls == ["before build", "loaded the model", "cached 64, 1 layers, reserved (0,)"]
    assert {fact.name: fact.value for fact in read_live(tmp_path)[1]} == {"a": 1, "b": 1}


def test_a_step_is_recorded_in_the_order_of_the_batch(runner: Any, tmp_path: Path) -> None:
    """Which is not that of the schedule."""
    capture = CaptureSpec(str(tmp_path))
    write_spec(tmp_path, ProbeSpec(1, 2, {f"k:{name}": RequestSpec(name, 3, 2) for name in "ab"}, capture))
    log = steplog.process_log(1)
    assert log is not None
    recorder: Any = FakeRecorder(runner)
    log.recorder = recorder
    runner.input_batch.req_ids = ["a"]
    runner.execute_model(scheduled(new={"a": (0, 3)}))
    runner.input_batch.req_ids = ["a", "b"]
    runner.execute_model(scheduled(new={"b": (0, 3)}, cached={"a": (3, 1)}))
    runner._dummy_run(8)
    assert recorder.calls == [
        "begin 1.0 prefill ['a'] False 0",
        "watch",
        "order ['a']",
        "look away",
        "end 1",
        "begin 1.1 mixed ['b', 'a'] False 1",
        "watch",
        "order ['a', 'b']",
        "look away",
        "end 2",
        "dummy of 8",
    ]


def test_sampling_is_read_at_the_first_step_of_each_run(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def sampling_facts(metadata: Any) -> list[Observation]:
        read.append(metadata)
        return []

    monkeypatch.setattr(observe, "sampling_facts", sampling_facts)
    runner._model_forward(4)
    for generation in (1, 2):
        write_spec(tmp_path, ProbeSpec(generation, 2, {"k:a": RequestSpec("a", 3, 3)}))
        runner.execute_model(scheduled(new={"a": (0, 3)}))
        runner.execute_model(scheduled(cached={"a": (3, 1)}))
        assert list(read_facts(tmp_path, "sampling")) == [1]
    assert read == [runner.input_batch.sampling_metadata] * 2


# ------------------------------------------------------------------------------------------------------- forcing


@pytest.fixture
def processor(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The processor over a stand-in of vLLM's base class; its update keeps ``{row: value}`` as vLLM's own does."""

    def process_dict_updates(entries: dict[int, str], update: Any, new: Any) -> bool:
        for row, params in (update or {}).items():
            value = None if params is None else new(params, None, [])
            if value is None:
                entries.pop(row, None)
            else:
                entries[row] = value
        return True

    base: Any = ModuleType("vllm.v1.sample.logits_processor")
    base.BatchUpdate, base.LogitsProcessor = object, object
    builtin: Any = ModuleType("vllm.v1.sample.logits_processor.builtin")
    builtin.process_dict_updates = process_dict_updates
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, builtin.__name__, builtin)
    module = importlib.import_module("adapters.vllm.forcing")
    yield module.ForcingProcessor(None, torch.device("cpu"), False)
    del sys.modules["adapters.vllm.forcing"]


def params(key: str | None) -> Any:
    return SimpleNamespace(extra_args=None if key is None else {hooks.KEY: key})


def test_forced_rows_leave_one_choice(processor: Any, runner: Any, tmp_path: Path) -> None:
    write_spec(tmp_path, ProbeSpec(1, 2, {"k:a": RequestSpec("a", 3, 1, (4,)), "k:b": RequestSpec("b", 3, 1)}))
    runner.execute_model(scheduled(new={"a": (0, 3), "b": (0, 3)}))
    processor.update_state({0: params("k:b"), 1: params("k:a")})
    logits = torch.eye(6)[[2, 2]].float()
    result = processor.apply(logits)
    assert result.argmax(-1).tolist() == [2, 4]
    assert result[0].tolist() == torch.eye(6)[2].tolist(), "a free row is not touched"
    assert result[1].tolist() == [-math.inf] * 4 + [0.0, -math.inf]
    a, b = step_reader.read_generations(tmp_path, 1, ["a", "b"], rank=1)
    assert (a.token_ids, a.greedy_ids, b.token_ids) == ((4,), (2,), (2,))
    assert not processor.is_argmax_invariant(), "vLLM would skip it for greedy requests"


def test_requests_without_a_key_are_left_alone(processor: Any, tmp_path: Path) -> None:
    logits = torch.randn(2, 5)
    processor.update_state({0: params(None)})
    assert torch.equal(processor.apply(logits.clone()), logits)
    processor.update_state(None)
    assert torch.equal(processor.apply(logits.clone()), logits)


# ------------------------------------------------------------------------------------------------------- adapter


def test_groups_of_a_model_with_experts_find_each_other_by_the_environment(tmp_path: Path) -> None:
    spec = EngineSpec("vllm", "reference", str(tmp_path), "bfloat16", str(tmp_path), dp=2, dp_rank=1, master_port=4711)
    assert group_environment(spec) == {
        "VLLM_DP_SIZE": "2", "VLLM_DP_RANK": "1", "VLLM_DP_RANK_LOCAL": "1", "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": "4711",
    }  # fmt: skip
    for config, count in ((qwen_moe.QWEN3_MOE_CONFIG, 8), (qwen3.CONFIG, 0), ({"architectures": ["Unknown"]}, 0)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert experts_of(str(tmp_path)) == count


class Groups:
    """Two engines' counts of what is unfinished, agreed on by both, as vLLM's data-parallel groups do."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.said: dict[int, bool] = {}

    def any(self, place: int, mine: bool) -> bool:
        self.said[place] = mine
        self.barrier.wait()
        found = any(self.said.values())
        self.barrier.wait()
        return found


class Group:
    """One of them; ``made`` holds what it ran in each step."""

    def __init__(self, groups: Groups, place: int) -> None:
        self.groups, self.place = groups, place
        self.left: dict[str, int] = {}
        self.made: list[frozenset[str]] = []

    def has_unfinished_requests(self) -> bool:
        return self.groups.any(self.place, bool(self.left))

    def step(self) -> list[Any]:
        self.made.append(frozenset(self.left))
        self.left = {key: count - 1 for key, count in self.left.items()}
        ended = [key for key, count in self.left.items() if not count]
        for key in ended:
            del self.left[key]
        output = SimpleNamespace(token_ids=[1])
        return [SimpleNamespace(finished=True, request_id=key, outputs=[output]) for key in ended]


def test_groups_that_step_together_make_as_many_steps() -> None:
    """Requests of unequal length, one that arrives late, and a group that has none until then."""
    requests = [Request("a", (1,), 3), Request("b", (1,), 2, arrival=7, dp_rank=1), Request("c", (1,), 1, arrival=8)]
    groups = Groups()
    engines = [Group(groups, place) for place in (0, 1)]

    def run(place: int) -> None:
        adapter = VllmAdapter()
        adapter._llm = SimpleNamespace(llm_engine=engines[place])
        adapter._arrivals = frozenset(one.arrival for one in requests)
        vars(adapter)["_add"] = lambda engine, key, request: engine.left.update({key: request.max_new_tokens})
        adapter._execute({one.name: one for one in requests if one.dp_rank == place})

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    assert [engine.made for engine in engines] == [
        [frozenset("a")] * 3 + [frozenset(), frozenset("c")],
        [frozenset()] * 3 + [frozenset("b"), frozenset("b")],
    ]


def test_an_engine_is_numbered_as_vllm_numbers_the_groups_of_a_dense_model() -> None:
    class EngineArgs:
        def create_engine_config(self, usage: str) -> Any:
            return SimpleNamespace(usage=usage, parallel_config=SimpleNamespace(data_parallel_size=1))

    number_engine(EngineArgs, 3)
    config = EngineArgs().create_engine_config("offline")
    assert config.usage == "offline"
    assert vars(config.parallel_config) == {
        "data_parallel_size": 1, "data_parallel_index": 3, "data_parallel_rank_local": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "index", "world", "found"),
    [
        (1, 0, (0, 2), (0, 0)),
        (1, 1, (1, 2), (3, 1)),  # a group of its own: its world is the group
        (2, 1, (3, 4), (3, 1)),  # all groups in one world
    ],
)
def test_ranks_are_global(
    size: int, index: int, world: tuple[int, int], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_world_group = lambda: SimpleNamespace(rank=world[0], world_size=world[1])
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    runner = NPUModelRunner()
    runner.vllm_config.parallel_config = SimpleNamespace(data_parallel_size=size, data_parallel_index=index)
    assert (hooks._rank(runner), hooks._dp_rank(runner)) == found


@pytest.mark.parametrize(
    ("config", "per_block"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 64}, 2 * 128),
        ({"num_attention_heads": 4, "hidden_size": 64}, 4 * 16),
        ({"num_attention_heads": 4, "num_key_value_heads": None, "head_dim": None, "hidden_size": 64}, 4 * 16),
    ],
)
def test_cache_bytes(config: dict[str, Any], per_block: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    spec = EngineSpec("vllm", "reference", str(tmp_path), "bfloat16", str(tmp_path), block_size=16, num_blocks=9)
    keys_and_values, two_bytes = 2, 2
    assert VllmAdapter._cache_bytes(spec) >= keys_and_values * two_bytes * 16 * per_block * 3 * 9


def test_runs_have_keys_of_their_own() -> None:
    adapter = VllmAdapter()
    requests = [Request(name, (1,), 1) for name in ("a", "b")]
    keys = {adapter._key(generation, at, one) for generation in (1, 2) for at, one in enumerate(requests)}
    assert len(keys) == 4


def test_closing_twice_is_closing_once() -> None:
    closed = []
    adapter = VllmAdapter()
    core = SimpleNamespace(shutdown=lambda: closed.append(True))
    adapter._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    adapter.close()
    adapter.close()
    assert closed == [True]


def test_the_plugin_arms_the_hooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    plugin.register()
    assert isinstance(sys.meta_path[0], boot._AfterImport)
