"""An engine for tests of the local transport: registers itself as ``fake`` with the host that imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from adapters import host
from adapters.base import Adapter, EngineSpec, Observation, Progress, Request, RunResult

host.ADAPTERS["fake"] = f"{__name__}:Fake"


class Fake(Adapter):
    name = "fake"

    def launch(self, spec: EngineSpec, progress: Progress) -> None:
        progress("build", spec.model_path)
        print("said on stdout", flush=True)
        if spec.model_path == "broken":
            raise LookupError("no such model")
        if "child" in spec.options:
            subprocess.Popen(["sleep", "60"], start_new_session=True)
            time.sleep(0.2)

    def observe(self) -> Sequence[Observation]:
        seen = {
            "path": sys.path[1:],
            "cwd": os.getcwd(),
            "name": os.environ.get("NAME"),
            "home": "PYTHONHOME" in os.environ,
        }
        return [Observation(name, value, "process") for name, value in seen.items()]

    def generate(self, requests: Sequence[Request], top_k: int, capture: Any = None) -> RunResult:
        if top_k == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if top_k == 8:
            time.sleep(60)
        if top_k == 7:
            os._exit(3)
        return RunResult((), (), float(top_k))

    def replay(self, requests: Sequence[Request], top_k: int, capture: Any = None) -> RunResult:
        assert capture is not None
        return RunResult((), (), float(len(capture.directory)))

    def close(self) -> None:
        print("closed", flush=True)
