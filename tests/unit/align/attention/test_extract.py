"""Calls taken out of a recording: each different one once, with its context, and judged as in the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from align.attention.audit import audit_side
from align.attention.extract import Wanted, extract
from align.fa import Call, check_call, read_call
from align.fa.files import Records, Step
from tests.unit.align.attention.recorded_calls import MODEL, fused, left, paged, steps


def recorded(tmp_path: Path) -> Records:
    """Layer 1 has raw lengths; two runs, and a decode."""
    wrong = fused(actual_seq_lengths=[3, 5])
    made: dict[Step, Sequence[tuple[Call, Sequence[int]]]] = {
        steps("prefill"): [(fused(), (0, 2)), (wrong, (1,))],
        steps("prefill", 0, run=2): [(fused(), (0, 2)), (wrong, (1,))],
        steps("decode", 1): [(paged(), (0, 1, 2))],
        steps("decode", 1, run=1, rank=1): [(paged(), (0, 1, 2))],
    }
    return left(tmp_path, made)


def test_equal_calls_are_one_and_are_counted(tmp_path: Path) -> None:
    found = extract(recorded(tmp_path), MODEL)
    assert [(one.call.context.phase, one.layers, one.times) for one in found] == [
        ("prefill", (0, 2), 4),
        ("prefill", (1,), 2),
        ("decode", (0, 1, 2), 6),
    ]
    assert found[1].call.context.layer == 1 and found[1].to_dict()["made"]["at"]


def test_what_is_written_is_judged_as_the_run_was(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    broken = {
        finding.rule for one in extract(records, MODEL) for finding in check_call(read_call(one.to_dict())).of("ERROR")
    }
    assert broken == {group.rule for group in audit_side(records, MODEL).errors} and "fa.lengths.q-raw" in broken


def test_only_what_is_wanted(tmp_path: Path) -> None:
    records = recorded(tmp_path)

    def of(wanted: Wanted) -> list[tuple[str, tuple[int, ...], int]]:
        return [(one.call.context.phase, one.layers, one.times) for one in extract(records, MODEL, wanted)]

    assert of(Wanted(phase="decode", rank=1)) == [("decode", (0, 1, 2), 3)]
    assert of(Wanted(layer=1, run=2)) == [("prefill", (1,), 1)]
    assert of(Wanted(step=1, layer=2)) == [("decode", (2,), 2)]
    assert of(Wanted(operator="_npu_paged_attention")) == []


def test_layers_with_windows_of_their_own_are_apart(tmp_path: Path) -> None:
    sliding = replace(MODEL, windows=(0, 4, 0))
    found = extract(recorded(tmp_path), sliding, Wanted(phase="decode"))
    assert [(one.call.context.window, one.layers) for one in found] == [(0, (0, 2)), (4, (1,))]
