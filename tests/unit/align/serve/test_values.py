"""Captured values: those of the recordings, the rows that differ most, bounded, and never a guess."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from align.compare.gather import gather
from align.compare.pairing import pair_rows
from align.serve.values import BARS, CHANNELS, ROWS, Values
from align.trace.reader import Trace
from tests.unit.align.cli.recorded_runs import make_run
from tests.unit.align.result import made

WRONG = "layers.1.mlp.up"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_run(tmp_path_factory.mktemp("runs") / "run", patch, made.wrong_up)


def test_they_are_those_of_both_recordings(run: Path) -> None:
    traces = {side: Trace(run / side / "trace") for side in ("candidate", "reference")}
    rows = pair_rows(traces["candidate"], traces["reference"]).rows
    with closing(Values(run)) as values:
        found = values.read(WRONG)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["step"] == min(found["steps"])
        chosen = [row for row in rows if row.candidate.step == found["step"]]
        for side, trace in traces.items():
            gathered = gather(trace, WRONG, [getattr(row, side) for row in chosen])
            assert gathered is not None
            whole = gathered.tensor.reshape(len(chosen), -1).double()
            told = found[side]
            assert told["shape"] == list(gathered.tensor.shape)
            assert (told["low"], told["high"]) == (float(whole.min()), float(whole.max()))
            names = [f"{row.key.request} {row.key.position}" for row in chosen]
            at = [names.index(name) for name in found["rows"]]
            assert told["slice"] == whole[at][:, found["channels"]].tolist()
        ours, theirs = (torch.tensor(found[side]["slice"]) for side in ("candidate", "reference"))
        assert torch.equal(torch.tensor(found["difference"]["slice"]), ours - theirs)
        assert torch.equal(ours, 2 * theirs), "the candidate's is twice the reference's"


def test_they_are_bounded_and_counted(run: Path) -> None:
    with closing(Values(run)) as values:
        for name in (WRONG, "embed", "logits", "layers.0.attn.q"):
            found = values.read(name)
            assert len(found["rows"]) <= ROWS and len(found["channels"]) <= CHANNELS
            assert all(len(row) == len(found["channels"]) for row in found["candidate"]["slice"])
            histogram = found["histogram"]
            if histogram is not None:
                assert len(histogram["edges"]) == BARS + 1
                elements = torch.Size(found["candidate"]["shape"]).numel()
                assert sum(histogram["candidate"]) == sum(histogram["reference"]) == elements


def test_a_step_can_be_chosen(run: Path) -> None:
    with closing(Values(run)) as values:
        steps = values.read(WRONG)["steps"]
        assert len(steps) > 1
        for step in steps:
            assert values.read(WRONG, step)["step"] == step
        with pytest.raises(LookupError, match="in step 999"):
            values.read(WRONG, 999)


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with closing(Values(run)) as values:
        with pytest.raises(ValueError, match="not a checkpoint"):
            values.read("../../etc/passwd")
        with pytest.raises(LookupError, match=r"no values of layers\.9\.mid were kept"):
            values.read("layers.9.mid")
    with closing(Values(tmp_path)) as nothing, pytest.raises(LookupError, match="no values"):
        nothing.read(WRONG)
