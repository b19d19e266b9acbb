"""What recording the arguments of attention and cache operators costs: the same run of two engines, one with and one
without it.

    python -m tests.benchmarks.fa_overhead smollm2 lmdeploy 3

8 requests of 64 tokens, with the audit of cache indices on, as a run has it. Rounds alternate, so that a slow moment of
the machine meets both; medians are compared. Seconds of the processor are told too: they do not count what other
programs of a busy machine take.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack

import psutil

from align.attention.audit import audit_side
from align.attention.model import model_of
from align.fa.files import FOLDER, read_records
from align.run.plan import forced_along
from align.run.side import Side
from tests.benchmarks.audit_overhead import REQUESTS, TOKENS, both, eight
from tests.integration.support import default_case


def processor(side: Side) -> float:
    """Seconds that a side's processes have computed so far."""
    assert side.launched is not None
    pids = {side.launched.pid, *side.launched.workers}
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    engine = sys.argv[2] if len(sys.argv) > 2 else "lmdeploy"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    info, case = default_case(model, max_new_tokens=TOKENS)
    case = eight(case)
    requests = case.to_requests(info.eos_ids)
    wall: dict[bool, list[float]] = {False: [], True: []}
    work: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        directory, sides = both(stack, engine, case, info, "fa")
        free = {fa: side.generate(requests, 5) for fa, side in sides.items()}
        same = free[False].generations == free[True].generations
        forced = forced_along(requests, free[False].generations)
        for _ in range(rounds):
            for fa, side in sides.items():
                before = processor(side)
                wall[fa].append(side.replay(forced, 5).seconds)
                work[fa].append(processor(side) - before)
        records = read_records(directory / "fa1" / FOLDER)
        assert records is not None
        started = time.perf_counter()
        found = audit_side(records, model_of(info.config, 1, case.dtype), engine)
        judged = time.perf_counter() - started
    print(f"{model} on {engine}: {REQUESTS} requests, {TOKENS} tokens each, medians of {rounds}; same tokens: {same}")
    for name, seconds in (("wall clock", wall), ("processor", work)):
        bare, watched = (statistics.median(seconds[fa]) for fa in (False, True))
        print(f"{name:<10} {bare:6.2f} s, with arguments {watched:6.2f} s, ratio {watched / bare:.3f}")
    print(f"{found.calls} calls, {found.distinct} different, {found.bytes / 1e6:.2f} MB, judged in {judged:.1f} s")


if __name__ == "__main__":
    main()
