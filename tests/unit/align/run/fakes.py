"""A tiny Ray and an engine's actor, so that the watch over a side is tested without either."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from adapters.base import Generation, RunResult, TokenStep
from adapters.host import Launched
from align.case.schema import Case, CaseRequest
from align.models.info import ModelInfo
from align.run.cluster import ActorHost


class RayError(Exception):
    """Base of all errors of Ray."""


class ActorDiedError(RayError):
    """The actor's process is gone."""


class RayTaskError(RayError):
    """An exception inside of a call; ``cause`` is the original."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::EngineHost.call() (pid=1)\n  {cause}")
        self.cause = cause


def tell_progress(directory: Path, stage: str, detail: str) -> None:
    """What a host is doing, written as a host writes it: whole, because the watch reads at any moment."""
    temporary = directory / "progress.json.tmp"
    temporary.write_text(json.dumps({"stage": stage, "detail": detail}))
    os.replace(temporary, directory / "progress.json")


def fake_ray() -> ModuleType:
    """As much of Ray as :class:`align.run.cluster.ActorHost` uses; references are futures."""
    module = ModuleType("ray")

    def wait(references: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done, pending = wait_for(references, timeout)
        return list(done), list(pending)

    errors = SimpleNamespace(RayError=RayError)
    vars(module).update(wait=wait, get=lambda reference: reference.result(), exceptions=errors)
    return module


class FakeActor:
    """Answers calls from a thread; ``script`` holds a value, an error or a function for each method."""

    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.released = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._pool.submit(self._answer, method, args))

    def _answer(self, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((method, args))
        answer = self.script[method]
        if isinstance(answer, Exception):
            raise answer
        return answer(*args) if callable(answer) else answer

    def hang(self, *_: Any) -> None:
        """A call that ends when the test does."""
        self.released.wait(20)

    def end(self) -> None:
        self.released.set()
        self._pool.shutdown(cancel_futures=True)


class FakeCluster:
    """Hands out one actor's host and remembers how it was started."""

    waits_for = "Ray"

    def __init__(self, actor: FakeActor, run_id: str = "no such run") -> None:
        self.run_id = run_id
        self.started: list[tuple[Any, ...]] = []
        self._actor = actor

    def __enter__(self) -> FakeCluster:
        return self

    def close(self) -> None:
        """Nothing was started."""

    def start(self, *arguments: Any) -> ActorHost:
        self.started.append(arguments)
        return ActorHost(self._actor)


def launched(pid: int = 1, workers: tuple[int, ...] = ()) -> Launched:
    return Launched(pid, workers, "/python", "3.11.2", {"torch": "2"}, True)


def generation(name: str, *ids: int) -> Generation:
    return Generation(name, tuple(TokenStep(token, token, ((token, -0.1), (token + 1, -2.0))) for token in ids))


def result(**ids: tuple[int, ...]) -> RunResult:
    return RunResult(tuple(generation(name, *tokens) for name, tokens in ids.items()), (), 1.0)


def case(*requests: CaseRequest, **fields: Any) -> Case:
    return Case(model="qwen3", requests=requests or (CaseRequest(name="r0", token_ids=(1, 2, 3)),), **fields)


def info(path: Path = Path("/models/tiny"), name: str = "tiny", layers: int = 4) -> ModelInfo:
    return ModelInfo(
        name=name, path=path, preset=False, config={"num_attention_heads": 4, "intermediate_size": 64}, vocab_size=100,
        max_positions=512, heads=4, kv_heads=2, head_dim=16, layers=layers, hidden=64, intermediate=64, bos_id=None,
        eos_ids=(2,), fingerprint="0123456789abcdef",
    )  # fmt: skip
