"""The host of one engine in the engine's own interpreter: a Ray actor, or a process at the end of a pipe.

Everything it returns is plain data: an engine's exception may not even be importable on the driver's side, so failures
come back as :class:`Failure`. Its output, and that of every process the engine starts, goes to ``engine.log`` in the
side's directory; what it is doing goes to ``progress.json`` there.

As a process: ``python -m adapters.host --engine NAME --dir DIRECTORY --channel FD``, where ``FD`` is an inherited end
of a :func:`multiprocessing.Pipe`. Calls come as ``(method, args)``; answers go back as ``(True, answer)``, or as
``(False, text)`` where the call itself could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from adapters.base import Adapter, EngineSpec, Observation, Request, RunResult
from adapters.mistakes import Mistake
from adapters.probe.births import announced
from adapters.probe.spec import CaptureSpec

#: Engine name → ``module:class`` of its adapter.
ADAPTERS = {
    "lmdeploy": "adapters.lmdeploy.adapter:LmdeployAdapter",
    "vllm": "adapters.vllm.adapter:VllmAdapter",
}
#: Distributions whose versions describe a side.
_DISTRIBUTIONS = ("lmdeploy", "dlinfer-ascend", "vllm", "vllm-ascend", "torch", "torch-npu", "transformers", "ray")
_PARENT_POLL_SECONDS = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception on the engine's side, as text.

    Attributes:
        hint: what the user has to correct; empty unless it is a :class:`adapters.mistakes.Mistake`.
    """

    kind: str
    message: str
    traceback: str
    hint: str = ""


@dataclass(frozen=True)
class Launched:
    """What a side is: ``pid`` of the host, ``workers`` that its engine started, interpreter and versions."""

    pid: int
    workers: tuple[int, ...]
    python: str
    python_version: str
    versions: dict[str, str]
    simulated: bool


def _children(pid: int) -> list[int]:
    """Live processes below ``pid``, nearest first, from /proc: psutil need not be in the engine's interpreter."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The command name is in parentheses and may hold spaces; state and parent come behind it.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = parents.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _die_with_parent() -> None:
    """End this process and its children when the process that started it is gone.

    The parent is the driver, or the raylet from which Ray starts actors. Killed with SIGKILL it tells nobody, and an
    engine may be in native code for minutes, so a thread watches.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SECONDS)
        for pid in _children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="align-parent-watch", daemon=True).start()


class EngineHost:
    """One engine, driven synchronously. Calls run one after the other in the process's main thread.

    Args:
        engine: name in :data:`ADAPTERS`.
        work_dir: directory of this side; exists and is empty.
    """

    def __init__(self, engine: str, work_dir: str) -> None:
        self._dir = Path(work_dir)
        self._lock = threading.Lock()
        log = os.open(self._dir / "engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        _die_with_parent()
        module, _, name = ADAPTERS[engine].partition(":")
        self._adapter: Adapter = getattr(import_module(module), name)()

    def _progress(self, stage: str, detail: str = "") -> None:
        text = json.dumps({"stage": stage, "detail": detail, "time": time.time()})
        with self._lock:  # any thread may report
            temporary = self._dir / f"progress.json.{os.getpid()}.tmp"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._dir / "progress.json")
        print(f"[align] {stage} {detail}", flush=True)

    def _guarded(self, call: Callable[[], T]) -> T | Failure:
        try:
            return call()
        except Exception as error:
            text = traceback.format_exc()
            print(text, flush=True)
            hint = error.hint if isinstance(error, Mistake) else ""
            return Failure(type(error).__name__, str(error), text, hint)

    def launch(self, spec: EngineSpec) -> Launched | Failure:
        return self._guarded(lambda: self._launch(spec))

    def _launch(self, spec: EngineSpec) -> Launched:
        self._adapter.launch(spec, self._progress)
        self._progress("ready")
        versions = {}
        for name in _DISTRIBUTIONS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        npu = sys.modules.get("torch_npu")
        return Launched(
            pid=os.getpid(),
            # Those of Ray are nobody's children here.
            workers=tuple(dict.fromkeys((*_children(os.getpid()), *announced(self._dir).values()))),
            python=sys.executable,
            python_version=platform.python_version(),
            versions=versions,
            simulated=bool(getattr(npu, "__simulated__", False)),
        )

    def observe(self) -> list[Observation] | Failure:
        return self._guarded(lambda: list(self._adapter.observe()))

    def generate(
        self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None
    ) -> RunResult | Failure:
        return self._guarded(lambda: self._run("generate", requests, top_k, capture))

    def replay(
        self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None
    ) -> RunResult | Failure:
        return self._guarded(lambda: self._run("replay", requests, top_k, capture))

    def _run(self, method: str, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None) -> RunResult:
        self._progress(method, f"{len(requests)} requests")
        # An adapter without a probe takes no capture.
        more = () if capture is None else (capture,)
        result: RunResult = getattr(self._adapter, method)(requests, top_k, *more)
        return result

    def repatch(self, files: Sequence[str]) -> Failure | None:
        """Other patches for the engine that lives, see :meth:`adapters.base.Adapter.repatch`."""
        return self._guarded(lambda: self._adapter.repatch(files))

    def close(self) -> Failure | None:
        return self._guarded(self._adapter.close)


def serve(host: EngineHost, channel: Connection[Any, Any]) -> None:
    """Answer calls until the driver closes its end."""
    while True:
        try:
            method, args = channel.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(host, method)(*args))
        except Exception as error:
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}")
        channel.send(answer)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="adapters.host")
    parser.add_argument("--engine", required=True, choices=ADAPTERS)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--channel", required=True, type=int)
    given = parser.parse_args()
    # What the engine starts must not hold the pipe: its end tells the driver that this process is gone.
    os.set_inheritable(given.channel, False)
    serve(EngineHost(given.engine, given.dir), Connection(given.channel))


if __name__ == "__main__":
    # Under its real name, so that what is pickled is found at the other end.
    import_module("adapters.host").main()
