"""Path A: the wrong index is named with its kind, writer, victim, step and layer, on either engine; and no other.

Most of it is ``make extended``. Values that are wrong are no index.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from align.case.schema import Case, CaseRequest, Decoding
from tests.integration.faults import patch
from tests.integration.index_faults import INDEX_FAULTS, IndexFault, Told, index_patch, requests
from tests.integration.support import ENGINES, run_align

pytestmark = pytest.mark.timeout(600)
#: One of writes, one of kernels, one of blocks, one of reads; the first that a user meets.
_USUAL = (
    ("slot_plus_one", "candidate"),
    ("padding_stale", "reference"),
    ("new_blocks_alone", "candidate"),
    ("foreign_row", "reference"),
)


def cases(silent: bool) -> list[Any]:
    return [
        pytest.param(name, side, marks=() if (name, side) in _USUAL else pytest.mark.extended)
        for name, fault in INDEX_FAULTS.items()
        for side in SIDES
        if ENGINES[side] in fault.told and (fault.told[ENGINES[side]] is None) == silent
    ]


def run(directory: Path, name: str, side: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and output of the fault's batch, with the fault on one side."""
    fault: IndexFault = INDEX_FAULTS[name]
    case = Case(
        model="qwen3",
        decoding=Decoding(max_new_tokens=8),
        requests=tuple(CaseRequest(**one) for one in requests(fault.batch_of(ENGINES[side]))),
    )
    case.save(directory / "case.json")
    out = directory / "run"
    given = ["--case", str(directory / "case.json"), "--patch", f"{side}={index_patch(name, directory)}"]
    for role in SIDES:
        for option in fault.options.get(ENGINES[role], ()):
            given += ["--set", f"{role}.{option}"]
    for condition in fault.allow:
        given += ["--allow", condition]
    done = run_align("run", *given, "--quiet", "--out", str(out), timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def place(told: dict[str, Any]) -> tuple[str, int]:
    return told["request"] or told["kind"], told["position"]


@pytest.mark.parametrize(("name", "side"), cases(silent=False))
def test_a_wrong_index_is_named(name: str, side: str, tmp_path: Path) -> None:
    expected = INDEX_FAULTS[name].told[ENGINES[side]]
    assert expected is not None
    code, result, output = run(tmp_path, name, side)
    assert code == 1, output
    first = result["findings"][0]
    evidence = first["evidence"]
    assert (first["path"], first["kind"], first["side"]) == ("A", "slots", side)
    said = Told(evidence["fault"], place(evidence["writer"]), place(evidence["victim"]), first["step"], first["layer"])
    assert said == expected, output
    # One fault is one kind, and the other side has none.
    of_indices = [finding for finding in result["findings"] if finding["path"] == "A"]
    assert [(one["side"], one["evidence"]["fault"]) for one in of_indices] == [(side, expected.kind)]


@pytest.mark.parametrize(("name", "side"), cases(silent=True))
def test_what_harms_nobody_is_no_fault(name: str, side: str, tmp_path: Path) -> None:
    code, result, output = run(tmp_path, name, side)
    assert (code, result.get("findings")) == (0, []), output


@pytest.mark.extended
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fault", ["norm", "row", "qk", "rope_precision"])
def test_a_wrong_value_is_no_wrong_index(fault: str, side: str, tmp_path: Path) -> None:
    """``rope_precision`` grows with the position, as what comes of a polluted cache may."""
    out = tmp_path / "run"
    given = ("--patch", f"{side}={patch(fault, tmp_path)}", "--no-confirm", "--quiet", "--out", str(out))
    run_align("run", *given, timeout=580)
    result = json.loads((out / "result.json").read_text())
    assert all(finding["path"] != "A" for finding in result["findings"])
    assert [one["faults"] for one in result["ledger"].values()] == [0, 0]
