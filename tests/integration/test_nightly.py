"""Nights on both real engines: killed and gone on with, and a fault that is new, then known, then fixed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from align.history.store import SqlStore, without_times
from tests.integration.faults import patch
from tests.integration.support import align_command, align_environment, run_align

NO_FAULT = "def apply(ctx):\n    pass\n"
SMALL = 'options = ["--max-new-tokens", "4", "--no-confirm"]\n'


def night(plan: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = run_align("nightly", str(plan), "--out", str(out), "--json", *options, timeout=1500)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(found: dict[str, Any]) -> list[list[str]]:
    return [[one["state"] for one in case["findings"]] for case in found["cases"]]


@pytest.mark.timeout(600)
def test_a_fault_is_new_then_known_then_fixed(tmp_path: Path) -> None:
    """The patch of the plan's second case is wrong in two nights, and right in the third."""
    change = tmp_path / "change.py"
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'{SMALL}[[case]]\nname = "patched"\nmodel = "qwen3"\noptions = ["--patch", "candidate=change.py"]\n'
        '[[case]]\nname = "impossible"\nmodel = "nowhere"\n'
    )
    told = []
    for text in (patch("norm", tmp_path).read_text(), None, NO_FAULT):
        if text is not None:
            change.write_text(text)
        told.append(night(plan, tmp_path / "nights"))
    assert [states(found) for _, found in told] == [[["new"], []], [["known"], []], [["fixed"], []]]
    assert [code for code, _ in told] == [1, 0, 0], "a case that cannot be compared counts in its first night alone"
    verdicts = [[case["verdict"] for case in found["cases"]] for _, found in told]
    assert verdicts == [["diverged", "not comparable"]] * 2 + [["aligned", "not comparable"]]
    first = told[0][1]["cases"][0]["findings"][0]["after"]
    assert (first["path"], first["side"], first["checkpoint"]) == ("B", "candidate", "layers.2.mlp_norm")
    assert "nowhere" in told[0][1]["cases"][1]["reason"]
    index = (tmp_path / "nights" / "index.html").read_text()
    assert "nights/00003/cases/patched/report." in index and "fixed" in index


def _killed(plan: Path, out: Path, seconds: float) -> int:
    """Begin or go on, and kill the night by force after a while; returns how many cases were done."""
    done = len(_outcomes(out))
    with (out.parent / "night.log").open("ab") as log:
        words = align_command("nightly", str(plan), "--out", str(out))
        command = subprocess.Popen(words, env=align_environment(), stdout=log, stderr=log)
    time.sleep(seconds)
    children = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert children, "a case was running"
    _gone, alive = psutil.wait_procs(children, timeout=100)
    assert not alive, "what it had started ends with it"
    return len(_outcomes(out)) - done


def _outcomes(out: Path) -> tuple[Any, ...]:
    if not (out / "nights.sqlite").is_file():
        return ()
    store = SqlStore.at(out / "nights.sqlite")
    nights = store.nights("killed")
    found = store.outcomes(nights[0]) if nights else ()
    store.close()
    return found


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_a_night_of_twelve_that_is_killed_three_times_ends_in_the_same_store(tmp_path: Path) -> None:
    """Points in time are drawn; the seed is told, and can be given back in ALIGN_NIGHT_SEED."""
    seed = int(os.environ.get("ALIGN_NIGHT_SEED") or time.time_ns() % 100_000)
    print(f"ALIGN_NIGHT_SEED={seed}")
    draw = random.Random(seed)
    wrong = patch("norm", tmp_path)
    cases = [f'[[case]]\nname = "{number}"\nmodel = "qwen3"\n' for number in range(12)]
    cases[4] += f'options = ["--patch", "candidate={wrong}"]\n'
    plan = tmp_path / "plan.toml"
    plan.write_text(f'name = "killed"\n{SMALL}{"".join(cases)}')
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert night(plan, whole)[0] == 1
    for _ in range(3):
        _killed(plan, killed, draw.uniform(8, 70))
    code, found = night(plan, killed)
    assert (code, len(found["cases"]), found["left"]) == (1, 12, [])
    stores = [SqlStore.at(out / "nights.sqlite") for out in (whole, killed)]
    texts = [without_times(store, store.nights("killed")[0]) for store in stores]
    assert texts[0] == texts[1]
    assert len(stores[1].nights("killed")) == 1
    for store in stores:
        store.close()
