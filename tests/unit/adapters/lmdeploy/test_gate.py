"""Arrivals at lmdeploy: a fake scheduler on a real event loop, and the same case through vLLM's stepped engine."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.base import Request
from adapters.lmdeploy.adapter import LmdeployAdapter
from adapters.lmdeploy.gate import Gate
from adapters.vllm.adapter import VllmAdapter


class FakeLmdeploy:
    """Admits each request a moment after it was submitted; every step serves all that are admitted.

    As in the engine, nothing is scheduled while nothing is admitted.
    """

    def __init__(
        self, adapter: LmdeployAdapter, delays: dict[str, float], refused: frozenset[str] = frozenset()
    ) -> None:
        self.scheduler = SimpleNamespace(sessions={})
        self.batches: list[frozenset[str]] = []
        self._adapter, self._delays, self._refused = adapter, delays, refused
        self._left: dict[str, int] = {}
        self._done: dict[str, asyncio.Event] = {}
        self._schedule = adapter._gate.wrap(self._schedule_all)

    async def stream(self, session: int, request: Request) -> list[int]:
        """What the adapter's own ``_stream`` does against a real engine."""
        await asyncio.sleep(self._delays.get(request.name, 0.0))
        if request.name in self._refused:
            raise RuntimeError(f"refused {request.name}")
        self._done[request.name] = asyncio.Event()
        self._left[request.name] = request.max_new_tokens
        self.scheduler.sessions[session] = SimpleNamespace(sequences={0: request.name})
        await self._done[request.name].wait()
        return [session] * request.max_new_tokens

    async def _schedule_all(self) -> tuple[Any, Any]:
        """The inputs of one step, or None."""
        return (frozenset(self._left) or None), None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            if not self._left:
                continue
            batch, _ = await self._schedule()
            assert batch is not None
            self.batches.append(batch)
            for name in batch:
                self._left[name] -= 1
                if not self._left[name]:
                    del self._left[name]
                    self._done[name].set()
            for _ in range(4):
                await asyncio.sleep(0)  # the finished request's task and whoever waits for it


def run_lmdeploy(
    requests: list[Request],
    delays: dict[str, float] | None = None,
    hold: bool = True,
    refused: frozenset[str] = frozenset(),
) -> list[frozenset[str]]:
    """The batch of every step."""
    adapter = LmdeployAdapter()
    adapter._gate.hold = hold
    engine = FakeLmdeploy(adapter, delays or {}, refused)
    adapter._engine = engine
    vars(adapter)["_stream"] = engine.stream

    async def main() -> dict[str, list[int]]:
        loop = asyncio.get_running_loop().create_task(engine.run())
        try:
            return await asyncio.wait_for(
                adapter._stream_all({str(100 + at): request for at, request in enumerate(requests)}), 20
            )
        finally:
            loop.cancel()

    returned = asyncio.run(main())
    assert {name: len(tokens) for name, tokens in returned.items()} == {r.name: r.max_new_tokens for r in requests}
    return engine.batches


class FakeVllm:
    """The same engine, stepped from outside."""

    def __init__(self) -> None:
        self.batches: list[frozenset[str]] = []
        self._left: dict[str, tuple[Request, int]] = {}

    def add(self, key: str, request: Request) -> None:
        self._left[key] = request, request.max_new_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        assert self._left, "an engine that runs dry is not stepped"
        self.batches.append(frozenset(request.name for request, _ in self._left.values()))
        finished = []
        for key, (request, left) in list(self._left.items()):
            if left == 1:
                del self._left[key]
                outputs = [SimpleNamespace(token_ids=[1] * request.max_new_tokens)]
                finished.append(SimpleNamespace(finished=True, request_id=key, outputs=outputs))
            else:
                self._left[key] = request, left - 1
        return finished


def run_vllm(requests: list[Request]) -> list[frozenset[str]]:
    adapter = VllmAdapter()
    engine = FakeVllm()
    adapter._llm = SimpleNamespace(llm_engine=engine)
    vars(adapter)["_add"] = lambda engine, key, request: engine.add(key, request)
    returned = adapter._execute({f"1:{request.name}": request for request in requests})
    assert {name: len(tokens) for name, tokens in returned.items()} == {r.name: r.max_new_tokens for r in requests}
    return engine.batches


def request(name: str, arrival: int = 0, tokens: int = 3) -> Request:
    return Request(name, (1, 2), tokens, arrival=arrival)


def sets(*names: str) -> list[frozenset[str]]:
    return [frozenset(group) for group in names]


def test_a_group_is_held_until_all_are_known() -> None:
    delays = {"a": 0.0, "b": 0.03, "c": 0.01}
    batches = run_lmdeploy([request(name, tokens=2) for name in "abc"], delays)
    assert batches == sets("abc", "abc")


def test_without_holding_the_engine_admits_as_it_pleases() -> None:
    delays = {"a": 0.0, "b": 0.05}
    batches = run_lmdeploy([request("a", tokens=2), request("b", tokens=2)], delays, hold=False)
    assert batches == sets("a", "a", "b", "b")


@pytest.mark.parametrize("run", [run_lmdeploy, run_vllm])
def test_late_arrivals_come_before_their_step(run: Any) -> None:
    requests = [request("a", tokens=6), request("b", 2, tokens=3), request("c", 3, tokens=1)]
    assert run(requests) == sets("a", "a", "ab", "abc", "ab", "a")


@pytest.mark.parametrize("run", [run_lmdeploy, run_vllm])
def test_a_dry_engine_takes_the_next_arrival_at_once(run: Any) -> None:
    requests = [request("a", tokens=2), request("b", 10, tokens=2), request("c", 10, tokens=1)]
    assert run(requests) == sets("a", "a", "bc", "b")


@pytest.mark.parametrize("run", [run_lmdeploy, run_vllm])
def test_arrivals_after_a_dry_spell_keep_their_distance(run: Any) -> None:
    requests = [request("a", tokens=1), request("b", 10, tokens=4), request("c", 12, tokens=1)]
    assert run(requests) == sets("a", "b", "b", "bc", "b")


def test_a_late_arrival_that_is_slow_to_be_known_is_waited_for() -> None:
    requests = [request("a", tokens=3), request("b", 1, tokens=1)]
    assert run_lmdeploy(requests, {"b": 0.03}) == sets("a", "ab", "a")


def test_a_refused_request_ends_the_run_instead_of_stopping_it() -> None:
    """It will never be known, and the others must not wait for it."""
    with pytest.raises(RuntimeError, match="refused b"):
        run_lmdeploy([request("a"), request("b")], {"b": 0.01}, refused=frozenset("b"))


cases = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(cases, st.integers(0, 1000))
def test_both_engines_form_the_same_batches(arrivals: list[tuple[int, int]], seed: int) -> None:
    requests = [request(f"r{at}", arrival, tokens) for at, (arrival, tokens) in enumerate(arrivals)]
    generator = random.Random(seed)
    delays = {r.name: generator.choice([0.0, 0.0, 0.002]) for r in requests}
    batches = run_lmdeploy(requests, delays)
    assert batches == run_vllm(requests)
    first = {r.name: next(step for step, batch in enumerate(batches) if r.name in batch) for r in requests}
    served = [sum(r.name in batch for batch in batches) for r in requests]
    assert served == [r.max_new_tokens for r in requests]
    for one in requests:
        for other in requests:
            if one.arrival == other.arrival:
                assert first[one.name] == first[other.name], "one arrival is admitted by one step"
            elif one.arrival < other.arrival:
                assert first[one.name] < first[other.name]


def test_a_gate_that_was_never_armed_lets_pass() -> None:
    """Warm-up happens before the first run."""

    async def forward() -> tuple[str, None]:
        return "inputs", None

    assert asyncio.run(Gate().wrap(forward)()) == ("inputs", None)


def test_steps_without_inputs_are_not_counted() -> None:
    submitted: list[str] = []
    answers = iter([None, None, "inputs", None, "inputs"])

    async def schedule(self: str, *, prefill: bool) -> tuple[str | None, str]:
        assert (self, prefill) == ("maker", True)
        return next(answers), "running"

    gate = Gate()
    gate.arm([(0, "a"), (1, "b"), (2, "c")], submitted.append, lambda key: True)
    gated = gate.wrap(schedule)
    assert gated.__name__ == "schedule"
    seen = []

    async def main() -> None:
        for _ in range(5):
            assert (await gated("maker", prefill=True))[1] == "running"
            seen.append("".join(submitted))

    asyncio.run(main())
    assert seen == ["a", "a", "a", "ab", "ab"]


def test_arming_again_begins_a_new_run() -> None:
    gate = Gate()
    first: list[str] = []
    second: list[str] = []
    gate.arm([(0, "a"), (5, "never")], first.append, lambda key: True)
    gate.arm([(0, "b")], second.append, lambda key: True)
    gate.release_next()
    assert (first, second) == (["a"], ["b"])


def test_synchronous_calls_run_on_the_adapters_loop() -> None:
    adapter = LmdeployAdapter()
    adapter._start_loop()
    try:

        async def where() -> str:
            return threading.current_thread().name

        assert adapter._call(where()) == "lmdeploy-loop"
    finally:
        assert adapter._loop is not None
        adapter._engine = SimpleNamespace(close=lambda: None)
        adapter.close()
        adapter.close()
    assert not adapter._thread.is_alive()
