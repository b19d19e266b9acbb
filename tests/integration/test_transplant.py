"""Transplants between the real engines: a true accusation is confirmed, a wrong one is refuted, on either side.

One run makes several transplants, because launching the engines is what takes the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from tests.integration.faults import patch
from tests.integration.support import run_align

_ROW = """
def apply(ctx):
    pass


def after_load(ctx):
    ctx.model.model.layers[2].mlp.down_proj.weight.data[5] *= 1.05
"""

#: Fault → the checkpoint where it is.
ORIGIN = {"norm": "layers.2.mlp_norm", "row": "layers.2.mlp.down"}
#: Of whichever fault, what is not its origin: before it, in its block, behind it.
WRONG = ("layers.1.mlp.up", "layers.2.mlp.gate", "layers.3.attn_norm")
NOISE = ("--numerics", "candidate=native")


def confirmed(
    out: Path, fault: str, side: str, *arguments: str, wrong: tuple[str, ...] = WRONG
) -> dict[str, dict[str, Any]]:
    """The transplants of a faulty run, by checkpoint, after a look at what they rest on."""
    file = patch(fault, out.parent) if fault != "row" else out.parent / "row.py"
    if fault == "row":
        file.write_text(_ROW)
    accused = [word for name in wrong for word in ("--confirm", f"{side}:{name}")]
    given = ("--patch", f"{side}={file}", "--max-new-tokens", "4", *accused, *arguments)
    done = run_align("run", *given, "--out", str(out))
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((out / "run.json").read_text())
    assert record["findings"][0]["checkpoint"].removesuffix("_partial") == ORIGIN[fault]
    first, *others = record["transplants"]
    assert record["findings"][0]["evidence"]["transplant"] == first
    assert [one["checkpoint"] for one in others] == list(wrong)
    for one in record["transplants"]:
        assert one["verdict"] != "not possible", one["why"]
        assert one["rows"] and all(one["rows"].values()), "nothing was replaced"
    assert "transplant of" in done.stdout
    assert json.loads((out / "result.json").read_text())["transplants"] == record["transplants"]
    return {one["checkpoint"].removesuffix("_partial"): one for one in record["transplants"]}


#: The rest belongs to `make extended`.
_USUAL = {("norm", "candidate"), ("row", "reference")}
_CASES = [
    pytest.param(fault, side, marks=() if (fault, side) in _USUAL else pytest.mark.extended)
    for fault in ORIGIN
    for side in SIDES
]


@pytest.mark.parametrize(("fault", "side"), _CASES)
def test_where_nothing_else_differs_the_logits_recover_whole(fault: str, side: str, tmp_path: Path) -> None:
    found = confirmed(tmp_path / "out", fault, side)
    true = found[ORIGIN[fault]]
    assert (true["verdict"], true["side"], true["where"]) == ("confirmed", side, "logits"), true["why"]
    logits = true["readings"][0]
    assert logits["none"] > 0
    assert logits["inputs"] > 0.8 * logits["none"]
    assert logits["output"] == 0.0, "bit by bit"
    for name in WRONG:
        assert found[name]["verdict"] == "refuted", found[name]["why"]
        assert found[name]["local"]["equal"], "on the other side's inputs a right operator says the same"


@pytest.mark.parametrize(("fault", "side"), _CASES)
def test_under_other_rounding(fault: str, side: str, tmp_path: Path) -> None:
    """With other numerics the fault is a small part of what differs: the share tells, and wrong accusations are no."""
    found = confirmed(tmp_path / "out", fault, side, *NOISE)
    assert found[ORIGIN[fault]]["verdict"] == "confirmed", found[ORIGIN[fault]]["why"]
    for name in WRONG:
        assert found[name]["verdict"] == "refuted", found[name]["why"]


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
def test_each_rank_replaces_its_part(side: str, tmp_path: Path) -> None:
    wrong = ("layers.1.mlp.up", "layers.2.attn.out")
    found = confirmed(tmp_path / "out", "norm", side, "--tp", "2", "--no-ladder", wrong=wrong)
    true = found[ORIGIN["norm"]]
    assert (true["verdict"], true["ranks"]) == ("confirmed", 2), true["why"]
    assert true["readings"][0]["output"] == 0.0
    assert [found[name]["verdict"] for name in wrong] == ["refuted", "refuted"]
