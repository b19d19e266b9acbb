"""What recording costs: the same replay with and without it, as ratios inside one run.

    python -m tests.benchmarks.capture_overhead smollm2 lmdeploy 3

Each mode runs in turn, so that a slow moment of the machine meets all of them; medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from adapters.probe.spec import CaptureSpec
from align.run.session import Session
from align.run.side import Limits
from envs.profiles import resolve
from tests.integration.support import Silent, default_case

#: Mode → what is recorded.
MODES: dict[str, dict[str, Any] | None] = {
    "nothing": None,
    "projections of every checkpoint": {"values": (), "digest": True, "residual": False},
    "with the operator residual": {"values": (), "digest": True, "residual": True},
    "values of one layer": {"values": ("layers.1.*",), "digest": False, "residual": False},
    "values of every checkpoint": {"values": ("*",), "digest": False, "residual": False},
}


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    engine = sys.argv[2] if len(sys.argv) > 2 else "lmdeploy"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    info, case = default_case(model)
    role = "candidate"
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with Session(case, info, {role: resolve("simnpu", engine)}, directory, Limits(), Silent()) as session:
            session.launch()
            session.generate()
            free = session.outcome.sides[role].free
            assert free is not None
            for number in range(rounds):
                for mode, what in MODES.items():
                    trace = directory / f"trace{number}{len(seconds[mode])}{list(MODES).index(mode)}"
                    captures = {} if what is None else {role: CaptureSpec(str(trace), **what)}
                    session.replay(free.generations, captures)
                    replayed = session.outcome.sides[role].replay
                    assert replayed is not None
                    seconds[mode].append(replayed.seconds)
                    written[mode] = size(trace) if what is not None else 0
    steps = len([step for step in free.steps if not step.dummy])
    bare = statistics.median(seconds["nothing"])
    print(f"{model} on {engine}: {steps} steps of {len(case.requests)} requests, medians of {rounds}")
    for mode, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{mode:<32} {median:7.2f} s  ratio {median / bare:5.2f}  {written[mode] / 1e6:8.1f} MB written")


if __name__ == "__main__":
    main()
