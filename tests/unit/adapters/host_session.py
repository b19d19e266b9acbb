"""One engine host over a fake adapter, in a process of its own; run by test_host.py as ``host_session.py WHAT DIR``.

The host takes over the output of its process, so answers go to ``answer.json`` in the directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from adapters import host
from adapters.base import Adapter, EngineSpec, Observation, Progress, Request, RunResult
from adapters.mistakes import Mistake
from adapters.probe.spec import CaptureSpec

WHAT, DIRECTORY = sys.argv[1], Path(sys.argv[2])


class Fake(Adapter):
    name = "fake"
    closed = 0

    def launch(self, spec: EngineSpec, progress: Progress) -> None:
        progress("build", spec.model_path)
        print("said on stdout", flush=True)
        os.write(2, b"said on file descriptor 2\n")
        subprocess.run(["echo", "said by a child"], check=True)
        if spec.model_path == "broken":
            raise LookupError("no such\nmodel")
        if spec.model_path == "mistaken":
            raise Mistake("no option blok_size", "correct it")
        if WHAT in ("children", "orphan"):
            subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
            subprocess.Popen(["true"])  # a zombie soon, and no worker
            time.sleep(0.3)

    def observe(self) -> Sequence[Observation]:
        return (Observation("tp", 1, "config"), Observation("dp", None, "config", "not there"))

    def generate(self, requests: Sequence[Request], top_k: int) -> RunResult:
        if any(request.forced is not None for request in requests):
            raise AssertionError("forced")
        return RunResult((), (), float(top_k))

    def replay(self, requests: Sequence[Request], top_k: int, capture: CaptureSpec | None = None) -> RunResult:
        if capture is not None:
            return RunResult((), (), float(capture.sample_rows))
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed += 1


def answer(**values: Any) -> None:
    plain = {
        name: {"type": type(value).__name__, **asdict(value)}
        if is_dataclass(value) and not isinstance(value, type)
        else value
        for name, value in values.items()
    }
    (DIRECTORY / "answer.json").write_text(json.dumps(plain, default=asdict))


def main() -> None:
    host.ADAPTERS["fake"] = "__main__:Fake"
    engine = host.EngineHost("fake", str(DIRECTORY))
    spec = EngineSpec("fake", "candidate", "tiny", "bfloat16", str(DIRECTORY))
    if WHAT == "calls":
        launched = engine.launch(spec)
        ready = json.loads((DIRECTORY / "progress.json").read_text())
        observed: Any = engine.observe()
        free = engine.generate((Request("a", (1,), 1),), 5)
        stage = json.loads((DIRECTORY / "progress.json").read_text())
        recorded = engine.replay((), 5, CaptureSpec("/t", sample_rows=7))
        closed = engine.close()
        answer(
            launched=launched, ready=ready, observed=observed, free=free, stage=stage, recorded=recorded, closed=closed
        )
    elif WHAT == "failures":
        broken = engine.launch(EngineSpec("fake", "candidate", "broken", "bfloat16", str(DIRECTORY)))
        mistaken = engine.launch(EngineSpec("fake", "candidate", "mistaken", "bfloat16", str(DIRECTORY)))
        mixed = engine.generate((Request("a", (1,), 1, forced=(1,)),), 5)
        full = engine.replay((), 5)
        (DIRECTORY / f"progress.json.{os.getpid()}.tmp").mkdir()  # progress cannot be written any more
        answer(broken=broken, mistaken=mistaken, mixed=mixed, full=full, unwritable=engine.generate((), 5))
    elif WHAT == "threads":
        errors: list[str] = []

        def report() -> None:
            try:
                for number in range(200):
                    engine._progress("stage", str(number))
                    json.loads((DIRECTORY / "progress.json").read_text())
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=report) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer(errors=errors)
    elif WHAT == "children":
        launched = engine.launch(spec)
        answer(launched=launched, names=[_command(pid) for pid in getattr(launched, "workers", ())])
        for pid in reversed(getattr(launched, "workers", ())):
            os.kill(pid, 9)
    elif WHAT == "orphan":
        answer(launched=engine.launch(spec))
        time.sleep(60)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


main()
