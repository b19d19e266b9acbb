"""Models with experts on several ranks of both real engines: aligned, and faults of theirs named as path C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from tests.integration import expert_faults
from tests.integration.expert_rank_faults import EXPERT_FAULTS, expert_patch
from tests.integration.support import ENGINES, run_align

pytestmark = pytest.mark.timeout(600)
_USUAL_FAULTS = (("shared_twice", "reference"),)


def run(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    out = directory / "run"
    done = run_align("run", "--quiet", "--out", str(out), *arguments, timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def conditions(directory: Path) -> dict[str, str]:
    record = json.loads((directory / "run" / "run.json").read_text())
    return {one["name"]: one["verdict"] for one in record["conditions"]}


def cases() -> list[Any]:
    return [
        pytest.param(name, side, marks=[] if (name, side) in _USUAL_FAULTS else [pytest.mark.extended])
        for name in EXPERT_FAULTS
        for side in SIDES
        if ENGINES[side] in EXPERT_FAULTS[name].engines
    ]


@pytest.mark.parametrize(("name", "side"), cases())
def test_a_fault_of_experts_on_several_ranks_is_named(name: str, side: str, tmp_path: Path) -> None:
    fault = EXPERT_FAULTS[name]
    given = ("--model", fault.model, *fault.layout, "--max-new-tokens", "6", "--no-confirm", "--no-ladder")
    code, result, output = run(tmp_path, *given, "--patch", f"{side}={expert_patch(name, tmp_path)}")
    assert code == 1, output
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["side"]) == ("C", fault.kind, side), first["summary"]
    assert first["checkpoint"] == fault.checkpoint, first["summary"]
    assert tuple(first["ranks"]) == fault.ranks, first["summary"]
    for key, expected in fault.numbers.items():
        found = first["evidence"][key]
        assert found == (pytest.approx(expected, rel=0.02) if isinstance(expected, float) else expected), key


def audited(result: dict[str, Any], side: str) -> dict[str, int]:
    """Operation → how many calls were judged right; nothing may be wrong or unseen."""
    audit = result["collectives"][side]
    assert audit["observable"] and not audit["faults"] and not any(row["unseen"] for row in audit["rows"]), audit
    found: dict[str, int] = {}
    for row in audit["rows"]:
        found[row["operation"]] = found.get(row["operation"], 0) + row["right"]
    return found


def test_experts_on_the_ranks_of_two_groups_align(tmp_path: Path) -> None:
    """Two requests for each group in one step, all of unequal lengths: all-to-all for prompts, the kernels behind."""
    code, result, output = run(tmp_path, "--model", "qwen3-moe", "--dp", "2", "--ep", "2", "--max-new-tokens", "8")
    assert (code, result["verdict"], result["findings"]) == (0, "aligned", []), output
    held = conditions(tmp_path)
    assert {name: held[name] for name in ("tp", "dp", "ep", "expert_placement")} == dict.fromkeys(
        ("tp", "dp", "ep", "expert_placement"), "ok"
    )
    for side in SIDES:
        right = audited(result, side)
        assert right["dispatch"] >= 4 and right["combine"] == right["dispatch"] and right["all_to_all"] >= 4, right


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "layout"),
    [("qwen3-moe", ("--tp", "2")), ("qwen3-moe", ("--dp", "2")), ("qwen2-moe", ("--tp", "2"))],
)
def test_experts_on_several_ranks_align(model: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    code, result, output = run(tmp_path, "--model", model, *layout, "--no-ladder")
    assert (code, result["verdict"], result["findings"]) == (0, "aligned", []), output
    assert {name: result["coverage"][name]["percent"] for name in SIDES} == dict.fromkeys(SIDES, 100.0)
    assert conditions(tmp_path)["expert_placement"] == "ok"
    for side in SIDES:
        audited(result, side)


#: Fault → side, and the dimension that introduces it with the layouts around it; worked out before it was run.
#: Where the experts are shared by groups without EP, a rank asks for experts as well, so faults of that are DP's.
_INTRODUCED = {
    ("shared_twice", "reference"): ("tp", "tp1 dp1 ep1", "tp2 dp1 ep1"),
    ("not_reduced", "candidate"): ("tp", "tp1 dp1 ep1", "tp2 dp1 ep1"),
    ("reduced_twice", "reference"): ("tp", "tp1 dp1 ep1", "tp2 dp1 ep1"),
    ("of_rank_0", "reference"): ("tp", "tp1 dp1 ep1", "tp2 dp1 ep1"),
    ("dispatch_counts", "candidate"): ("ep", "tp1 dp2 ep1", "tp1 dp2 ep2"),
    ("dispatch_order", "reference"): ("ep", "tp2 dp1 ep1", "tp2 dp1 ep2"),
    ("splits", "reference"): ("ep", "tp2 dp1 ep1", "tp2 dp1 ep2"),
    ("local_ids", "reference"): ("dp", "tp1 dp1 ep1", "tp1 dp2 ep1"),
    ("home_order", "candidate"): ("dp", "tp1 dp1 ep1", "tp1 dp2 ep1"),
}


@pytest.mark.extended
@pytest.mark.parametrize(("name", "side"), list(_INTRODUCED))
def test_the_dimension_that_introduces_a_fault_of_experts_is_named(name: str, side: str, tmp_path: Path) -> None:
    """The ladder walks up to the asked layout, whose first finding stays what it is without the ladder."""
    fault, (dimension, clean, at) = EXPERT_FAULTS[name], _INTRODUCED[name, side]
    given = ("--model", fault.model, *fault.layout, "--max-new-tokens", "6", "--no-confirm", "--ladder")
    code, result, output = run(tmp_path, *given, "--patch", f"{side}={expert_patch(name, tmp_path)}")
    assert code == 1, output
    first, found = result["findings"][0], result["ladder"]["conclusion"]
    assert (first["path"], first["kind"], first["side"]) == ("C", fault.kind, side), first["summary"]
    assert (first["checkpoint"], tuple(first["ranks"])) == (fault.checkpoint, fault.ranks), first["summary"]
    assert (found["state"], found["dimension"]) == ("introduced", dimension), found["sentence"]
    assert (found["clean_at"], found["introduced_at"]) == (clean, at), found["sentence"]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "side"), [("not_renormalised", "candidate"), ("coarse_router", "reference")])
def test_a_fault_of_experts_that_one_rank_has_is_no_dimensions(name: str, side: str, tmp_path: Path) -> None:
    """F16 and F18: the simplest layout diverges, so that no dimension is accused."""
    patch = expert_faults.expert_patch(name, tmp_path)
    given = ("--model", "qwen3-moe", "--tp", "2", "--max-new-tokens", "4", "--no-confirm", "--ladder")
    code, result, output = run(tmp_path, *given, "--patch", f"{side}={patch}")
    assert code == 1, output
    found = result["ladder"]["conclusion"]
    assert (found["state"], found["dimension"], found["introduced_at"]) == ("everywhere", None, "tp1 dp1 ep1"), output
    assert result["findings"][0]["side"] == side, output
