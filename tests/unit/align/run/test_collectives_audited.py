"""Records of collectives beside a trace are found, judged and told, damaged ones too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from align.collectives.record.files import FOLDER, CollectiveWriter, End, Run
from align.collectives.record.types import Place
from align.run.collectives import audit_collectives
from align.run.judge import judge_tensors
from align.trace.reader import Trace
from tests.unit.align.collectives.calls import call
from tests.unit.align.collectives.two_ranks import write
from tests.unit.align.compare import traces

A, B = torch.ones(3, 4), torch.full((3, 4), 2.0)
NAME = "layers.1.mlp.down"


def recorded(directory: Path, off: float = 0.0) -> Trace:
    """A trace of two ranks; in run 1 all is right, in run 2, which was recorded, rank 1's sum is off."""
    trace = write(directory, capture={"directory": "/elsewhere/trace"})
    for rank in (0, 1):
        writer = CollectiveWriter(directory / FOLDER, rank)
        for run in (1, 2):
            writer.run(Run(run, "trace" if run == 2 else ""))
            out = A + B + off * rank * (run - 1)
            one = call(rank, "all_reduce", [(A, B)[rank]], [out], run - 1, place=Place(run, 0, inside=(NAME,)))
            writer.begin(replace(one, ended=False, values=False, tensors={}))
            writer.end(End(run - 1, values=True), one.tensors)
        writer.close()
    return trace


def test_right_ones_are_counted_over_all_runs_or_the_recorded_one(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    found = audit_collectives({"candidate": trace, "reference": traces.write(tmp_path / "single")})
    assert list(found) == ["candidate"], "one rank has no collectives"
    assert [(row.right, row.wrong) for row in found["candidate"].rows] == [(2, 0)]
    alone = audit_collectives({"candidate": trace}, everywhere=False)["candidate"]
    assert [(row.right, row.wrong) for row in alone.rows] == [(1, 0)]


def test_a_wrong_one_is_a_finding_of_the_comparison(tmp_path: Path) -> None:
    sides = {"candidate": recorded(tmp_path / "a", 1.0), "reference": recorded(tmp_path / "b")}
    audits = audit_collectives(sides)
    _, findings = judge_tensors(sides["candidate"], sides["reference"], "seed", {}, collectives=audits)
    found = [one for one in findings if one.path == "C" and one.side == "candidate"]
    assert [(one.kind, one.checkpoint, one.ranks) for one in found if "wrong" in one.evidence] == [
        ("collective", NAME, (1,))
    ]


def test_damaged_and_absent_records_are_no_pass(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    (tmp_path / FOLDER / "rank1.jsonl").write_text("{not json}\n")
    found = audit_collectives({"candidate": trace})["candidate"]
    assert not found.observable and "cannot be read" in found.unseen[0]
    bare = audit_collectives({"candidate": traces.write(tmp_path / "bare", tp=2)})["candidate"]
    assert not bare.observable and not bare.rows
