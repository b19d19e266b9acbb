"""What the audit of the cache's indices costs: the same replay of two engines, one with and one without it.

    python -m tests.benchmarks.audit_overhead smollm2 lmdeploy 3

8 requests of 64 tokens. Rounds alternate, so that a slow moment of the machine meets both; medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.probe.spec import CaptureSpec
from align.case.schema import Case, CaseRequest
from align.ledger.record.files import FOLDER, read_records
from align.ledger.sides import audit_side
from align.models.info import ModelInfo
from align.run.cluster import Cluster
from align.run.plan import engine_spec, forced_along
from align.run.side import Limits, Side
from envs.profiles import resolve
from tests.integration.support import default_case, with_requests

REQUESTS, TOKENS = 8, 64
#: Whether projections and the operator residual are recorded besides, and its name.
MODES = {False: "nothing else", True: "projections and the operator residual"}


def eight(case: Case) -> Case:
    """Twice the preset's four prompts, the second four without their first token."""
    more = [CaseRequest(name=f"{one.name}b", token_ids=one.token_ids[1:] or one.token_ids) for one in case.requests]
    return with_requests(case, [*case.requests, *more][:REQUESTS])


def both(stack: ExitStack, engine: str, case: Case, info: ModelInfo, switch: str) -> tuple[Path, dict[bool, Side]]:
    """An engine without and with what a switch of its spec turns on, each in a directory named after the switch."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    hosts = stack.enter_context(Cluster())
    sides: dict[bool, Side] = {}
    for on in (False, True):
        place = directory / f"{switch}{on:d}"
        side = sides[on] = Side(
            hosts, "candidate", resolve("simnpu", engine), place, Limits(), lambda *_: None, threading.Event()
        )
        spec = engine_spec(case, info, engine=engine, role="candidate", device="simnpu", work_dir=place)
        changed: dict[str, Any] = {switch: on}
        side.launch(replace(spec, **changed))
        stack.callback(side.close)
    return directory, sides


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    engine = sys.argv[2] if len(sys.argv) > 2 else "lmdeploy"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    info, case = default_case(model, max_new_tokens=TOKENS)
    case = eight(case)
    requests = case.to_requests(info.eos_ids)
    seconds: dict[tuple[bool, bool], list[float]] = {(mode, audit): [] for mode in MODES for audit in (False, True)}
    with ExitStack() as stack:
        directory, sides = both(stack, engine, case, info, "audit")
        free = {audit: side.generate(requests, 5) for audit, side in sides.items()}
        same = free[False].generations == free[True].generations
        forced = forced_along(requests, free[False].generations)
        for number in range(rounds):
            for mode in MODES:
                for audit, side in sides.items():
                    trace = directory / f"audit{audit:d}" / f"trace{number}{mode:d}"
                    capture = CaptureSpec(str(trace), values=()) if mode else None
                    seconds[mode, audit].append(side.replay(forced, 5, capture).seconds)
        records = read_records(directory / "audit1" / FOLDER)
        assert records is not None
        cells = sum(record.rows * record.layers for record in records.records)
        started = time.perf_counter()
        found = audit_side(records, "")
        judged = time.perf_counter() - started
    print(f"{model} on {engine}: {REQUESTS} requests, {TOKENS} tokens each, medians of {rounds}; same tokens: {same}")
    for mode, name in MODES.items():
        bare, watched = (statistics.median(seconds[mode, audit]) for audit in (False, True))
        print(f"recorded {name:<38} {bare:6.2f} s, with the audit {watched:6.2f} s, ratio {watched / bare:.2f}")
    size = f"{records.bytes / cells:.1f} bytes per (token, layer)"
    print(f"{size}, {records.bytes / 1e6:.2f} MB of {len(records.runs)} runs")
    print(f"judged in {judged:.1f} s: {found.faults} faults, not observable: {list(found.unseen)}")


if __name__ == "__main__":
    main()
