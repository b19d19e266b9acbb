"""``align calibrate`` without engines: which runs it makes, what it uses again, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from align.calibrate.floor import load_floor
from align.cli import calibrate as work
from align.cli import run
from align.cli.run import RunSettings
from align.golden.size import TooLargeError
from align.run.directory import CASE
from tests.unit.align.cli.recorded_runs import Align, make_run
from tests.unit.align.compare import traces


class Runs:
    """Stands in for :func:`align.cli.run.execute`: scripted sides, of which the candidate is noisy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.made: list[RunSettings] = []
        self.verdict = "aligned"
        self.stop_at: int | None = None

    def __call__(self, settings: RunSettings) -> int:
        assert settings.out is not None and settings.case_file is not None
        if len(self.made) == self.stop_at:
            raise KeyboardInterrupt
        self.made.append(settings)
        number = len(self.made)

        def noise(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
            value = tensors["layers.0.attn.out"].float()
            random = torch.randn(value.shape, generator=torch.Generator().manual_seed(10 * number + step))
            tensors["layers.0.attn.out"] = (value + 0.01 * value.abs() * random).bfloat16()

        make_run(settings.out, self._monkeypatch, noise)
        (settings.out / CASE).write_text(settings.case_file.read_text())
        (settings.out / "result.json").write_text(json.dumps({"verdict": self.verdict}))
        return 0 if self.verdict == "aligned" else 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs(monkeypatch)
    monkeypatch.setattr(run, "execute", found)
    return found


def test_a_floor_of_four_runs(
    align: Align, runs: Runs, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = traces.write(tmp_path / "exact")
    monkeypatch.setattr(work, "golden_trace", lambda place, say: exact)
    code, text, err = align("calibrate", "--model", str(checkpoint))
    assert (code, err) == (0, "")
    assert len(runs.made) == 4
    assert [one.along is None for one in runs.made] == [True, False, False, False]
    assert runs.made[2].along == dict(traces.GENERATED), "the others follow the first one's tokens"
    assert {(one.floor, one.policy, one.device) for one in runs.made} == {("none", "derived", "simnpu")}
    file = tmp_path / "home" / "floors" / "tiny-bfloat16-tp1-simnpu.json"
    found = load_floor(file)
    assert found.provenance.simulated and found.provenance.golden and found.provenance.rows == 7
    assert len(found.provenance.pairs) == 10 + 8
    noisy, quiet = found.kinds["attn.out"], found.kinds["mlp.up"]
    assert noisy.carried["whole"].raw == pytest.approx(0.014, rel=0.7) and noisy.golden["whole"].largest > 0
    assert quiet.carried["whole"].largest == 0.0
    assert "attn.kv_start_indices" not in found.kinds
    for words in ("numerics swapped: aligned", "18 pairs of recordings", "attn.out", str(file), "simulated"):
        assert words in text, words


def test_it_goes_on_where_it_stopped(align: Align, runs: Runs, checkpoint: Path) -> None:
    runs.stop_at = 2
    asked = ("calibrate", "--model", str(checkpoint), "--no-golden", "--runs", "3")
    assert align(*asked)[0] == 130
    assert len(runs.made) == 2
    runs.stop_at = None
    code, text, _ = align(*asked)
    assert code == 0 and len(runs.made) == 3
    assert "run1 of 3: as it is (candidate native, reference fp32-internal): there already" in text


def test_json_is_the_file(align: Align, runs: Runs, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    code, text, _ = align(
        "calibrate", "--model", str(checkpoint), "--no-golden", "--runs", "1", "--out", str(file), "--json"
    )
    assert code == 0
    assert json.loads(text) == json.loads(file.read_text())
    assert not load_floor(file).provenance.golden


def test_a_run_that_is_not_clean_makes_no_floor(align: Align, runs: Runs, checkpoint: Path, tmp_path: Path) -> None:
    runs.verdict = "diverged"
    code, _, err = align("calibrate", "--model", str(checkpoint), "--no-golden")
    assert code == 2
    assert "run1 (as it is) is not clean" in err and "report.md" in err
    assert len(runs.made) == 1 and not list((tmp_path / "home" / "floors").glob("*.json"))


def test_golden_that_does_not_fit_is_left_out(
    align: Align, runs: Runs, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path, say: Any) -> None:
        raise TooLargeError("golden needs about 40 GB", "a larger machine")

    monkeypatch.setattr(work, "golden_trace", refuse)
    code, text, _ = align("calibrate", "--model", str(checkpoint), "--runs", "1")
    assert code == 0
    assert "golden is left out: golden needs about 40 GB" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--runs", "0"), "--runs 0 measures nothing"),
        (("--dtype", "int8"), "dtype"),
        (("--tp", "3"), "layout tp3"),
        (("--step-timeout", "0"), "is not a time"),
    ],
)
def test_bad_options_are_refused(
    align: Align, runs: Runs, checkpoint: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, _, err = align("calibrate", "--model", str(checkpoint), *arguments)
    assert code == 2 and words in err and "next:" in err
    assert not runs.made


def test_another_case_in_the_directory_is_refused(align: Align, runs: Runs, checkpoint: Path, tmp_path: Path) -> None:
    asked = ("calibrate", "--model", str(checkpoint), "--no-golden", "--runs", "1", "--work", str(tmp_path / "w"))
    assert align(*asked)[0] == 0
    code, _, err = align(*asked, "--max-new-tokens", "3")
    assert code == 2 and "holds another case" in err
