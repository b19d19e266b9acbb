"""How much longer than both engines' own runs does a comparison take, with everything built?

``python -m tests.benchmarks.warm_run [MODEL] [ROUNDS]`` times, in turn and on the same machine, lmdeploy alone, vLLM
alone and ``align run`` on the same prompts, and prints the medians and the ratio of the comparison to the sum.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from align.case.build import new_case
from align.models.resolve import resolve_model
from envs.home import REPOSITORY
from envs.profiles import resolve


def _timed(command: list[str], env: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "qwen3"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    info = resolve_model(model)
    here = Path(__file__).parent
    times: dict[str, list[float]] = {"lmdeploy": [], "vllm": [], "align": []}
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch, "case.json")
        case.write_text(new_case(info).case.to_text(), encoding="utf-8")
        for number in range(rounds):
            for engine in ("lmdeploy", "vllm"):
                found = resolve("simnpu", engine)
                env = {**found.env, "PYTHONPATH": os.pathsep.join(found.pythonpath)}
                script = str(here / f"bare_{engine}.py")
                times[engine].append(_timed([str(found.python), script, str(case), str(info.path)], env))
            out = str(Path(scratch, f"out{number}"))
            command = [sys.executable, "-m", "align", "run", "--case", str(case), "--out", out, "--quiet"]
            times["align"].append(_timed(command, {"PYTHONPATH": str(REPOSITORY)}))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:<9} median {medians[name]:6.1f} s   of {', '.join(f'{value:.1f}' for value in values)}")
    print(f"ratio     {medians['align'] / (medians['lmdeploy'] + medians['vllm']):6.2f}   align / (lmdeploy + vllm)")


if __name__ == "__main__":
    main()
