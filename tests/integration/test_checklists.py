"""The three checklists on real engines: a clean run fails no item, and a fault fails those that are about it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from align.case.schema import Case, CaseRequest, Decoding
from tests.integration.index_faults import index_patch, requests
from tests.integration.indices.seam import SEAM
from tests.integration.support import run_align

pytestmark = pytest.mark.timeout(600)
#: Items of a clean run of a dense model on one rank that must be ok: everything that a run observes by itself.
OBSERVED = {
    "000-Q01", "000-Q03", "000-Q08", "000-Q17", "003-CK-01", "003-CK-03", "003-CK-04", "003-CK-06", "003-CK-07",
    "003-TS-01", "003-TS-04", "003-TS-05", "003-TS-06", "003-TS-07", "003-TS-08",
}  # fmt: skip
#: And whose subject such a run does not have.
APART = {
    "000-Q15", "003-CK-02", "003-CK-05", "003-CK-08", "003-CK-09", "003-CK-10", "003-TS-02", "003-TS-03",
}  # fmt: skip

#: A layer changes the length of the second request of a batch, for itself and those behind it: what 000-Q17 forbids.
LAYER_LENGTH = """
def apply(ctx):
    held = {}
    each_step(ctx, lambda step: held.update(step=step))

    def shorter(layer, *rest):
        step = held.get("step")
        if layer != 1 or step is None or not step.decode or step.rows < 2:
            return
        if ctx.engine == "lmdeploy":
            lengths = step.metadata.kv_seqlens.clone()
            lengths[1] -= 1
            step.metadata.kv_seqlens = lengths
        else:
            lengths = list(step.metadata.seq_lens_list)
            lengths[1] -= 1
            step.metadata.seq_lens_list = lengths

    after_write(ctx, shorter)
"""


def items(directory: Path) -> dict[str, dict[str, Any]]:
    result = json.loads((directory / "result.json").read_text())
    return {item["id"]: item for one in result["checklists"] for item in one["items"]}


def in_state(found: dict[str, dict[str, Any]], state: str) -> set[str]:
    return {name for name, one in found.items() if one["state"] == state}


def test_a_clean_run_fails_no_item_and_says_on_how_much(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_align("run", "--model", "qwen3", "--quiet", "--out", str(out), timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    found = items(out)
    assert len(found) == 35 and in_state(found, "failed") == set()
    assert in_state(found, "ok") >= OBSERVED
    assert in_state(found, "not applicable") >= APART
    assert all(one["count"] > 0 for one in found.values() if one["state"] == "ok")
    assert all(one["what"] and one["mend"] for one in found.values() if one["state"] == "not observable")
    # 4 prompts in each of 3 runs of both engines; 4 layers, of which the first is what the others are compared with.
    assert found["000-Q08"]["count"] == 2 * 3 * 4
    assert found["000-Q17"]["count"] % 3 == 0 and found["003-CK-07"]["count"] == 20
    # The recordings judged again, without engines, say the same.
    again = tmp_path / "again.json"
    run_align("compare", str(out / "candidate"), str(out / "reference"), "--out", str(again), timeout=300)
    compared = {item["id"]: item for one in json.loads(again.read_text())["checklists"] for item in one["items"]}
    assert {name: one["state"] for name, one in compared.items()} == {name: one["state"] for name, one in found.items()}
    listed = run_align("checklist", str(out), "--json", timeout=60)
    assert listed.returncode == 0
    fresh = {item["id"]: item for one in json.loads(listed.stdout)["checklists"] for item in one["items"]}
    assert fresh == found


def drilled(directory: Path, patch: Path) -> dict[str, dict[str, Any]]:
    """The items of a run whose candidate is patched."""
    asked = tuple(CaseRequest(**one) for one in requests("plain"))
    Case(model="qwen3", decoding=Decoding(max_new_tokens=8), requests=asked).save(directory / "case.json")
    out = directory / "run"
    given = ("--case", str(directory / "case.json"), "--patch", f"candidate={patch}", "--quiet", "--out", str(out))
    done = run_align("run", *given, timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    return items(out)


def test_a_layer_that_changes_the_length_fails_the_items_about_lengths_alone(tmp_path: Path) -> None:
    patch = tmp_path / "layer_length.py"
    patch.write_text(SEAM + LAYER_LENGTH)
    found = drilled(tmp_path, patch)
    # The audit of the cache sees that a layer changes it, and the check of arguments that attention gets another length
    # than the step has.
    assert in_state(found, "failed") == {"000-Q10", "000-Q17"}
    assert found["000-Q17"]["findings"] == [1] and "layer" in found["000-Q17"]["what"]
    assert found["000-Q10"]["findings"] == [2] and "kv-step" in found["000-Q10"]["what"]
    # What was looked at and is right stays so, and what a divergence asks for was done.
    assert in_state(found, "ok") >= {
        "000-Q01",
        "000-Q03",
        "000-Q08",
        "003-CK-02",
        "003-CK-05",
        "003-CK-08",
        "003-CK-09",
    }
    assert found["003-CK-10"]["state"] == "not observable" and "align replay" in found["003-CK-10"]["mend"]


@pytest.mark.extended
def test_lengths_that_stay_in_decode_fail_how_lengths_are_built_and_not_what_prefill_left(tmp_path: Path) -> None:
    found = drilled(tmp_path, index_patch("length_frozen", tmp_path))
    assert in_state(found, "failed") == {"000-Q10"}
    assert found["000-Q08"]["state"] == "ok"
