"""Drills on both real engines: known faults in engines that stay up are named, and clean runs are silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import run_align

pytestmark = pytest.mark.timeout(600)


def drill(out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, summary and output."""
    done = run_align("drill", "--out", str(out), *arguments, timeout=580)
    summary = json.loads((out / "drill.json").read_text()) if (out / "drill.json").is_file() else {}
    return done.returncode, summary, done.stdout + done.stderr


def test_faults_come_and_go_in_engines_that_stay_up(tmp_path: Path) -> None:
    """One of an operator, one of weights, one of slots and one of arguments, and a clean run in the same engines.

    The second call goes on where the first one ended: nothing is left to do.
    """
    faults = ("norm_factor", "gate_up_swapped", "slot_too_far", "fa_scale")
    chosen = [word for name in faults for word in ("--only", name)]
    arguments = (*chosen, "--trials", "2", "--controls", "1", "--seed", "4")
    code, summary, output = drill(tmp_path / "drill", *arguments)
    assert (code, summary["misses"], summary["alarms"]) == (0, [], []), output
    assert (summary["trials"], summary["controls"]) == (2 * len(faults), 1)
    assert {name: one["share"] for name, one in summary["rates"].items() if one["count"]} == dict.fromkeys(
        ("found", "path", "checkpoint", "side", "kind", "place", "right"), 1.0
    )
    assert len(list((tmp_path / "drill" / "run001" / "engines").iterdir())) == 2, "a launch for each setting"
    report = (tmp_path / "drill" / "drill.md").read_text()
    assert "simulated NPU" in report and "| all | 8 | 100.0 %" in report

    again, same, said = drill(tmp_path / "drill", *arguments)
    assert again == 0 and "9 of 9 trials are done already" in said
    assert same["rates"] == summary["rates"]


@pytest.mark.extended
def test_a_fault_that_the_harness_does_not_name_is_a_miss(tmp_path: Path) -> None:
    """A drill that cannot fail would measure nothing: this fault says of itself what is not so."""
    (tmp_path / "faults").mkdir()
    text = '"""A norm that is wrong where it is said to be right."""\n' + (
        "from adapters.drill.places import change_output, operator\n"
        'FAULT = {"path": "B", "kind": "operator", "checkpoint": "layers.3.mlp_norm", "source": "a test"}\n'
        "DRAWN = {}\n"
        "def apply(ctx):\n    pass\n"
        'def after_load(ctx):\n    change_output(ctx, operator(ctx, 1, "mlp_norm"), lambda out: out * 1.2)\n'
    )
    (tmp_path / "faults" / "mislabelled.py").write_text(text)
    (tmp_path / "faults" / "nothing.py").write_text(text.replace("out * 1.2", "out * 1.0"))
    code, summary, output = drill(
        tmp_path / "drill", "--faults", str(tmp_path / "faults"), "--only", "mislabelled", "--only", "nothing",
        "--trials", "2", "--controls", "0",
    )  # fmt: skip
    assert code == 1, output
    rates = {name: (one["hits"], one["count"]) for name, one in summary["rates"].items()}
    assert (rates["found"], rates["checkpoint"], rates["side"]) == ((2, 4), (0, 4), (2, 2))
    assert {one["why"] for one in summary["misses"]} == {
        "nothing was found",
        "checkpoint layers.1.mlp_norm, not layers.3.mlp_norm",
    }
