"""``--ladder``, ``align isolate`` and ``--against`` without engines: which layouts run, what is left, what goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from align.case.schema import Case, load_case
from align.cli import run as run_module
from align.errors import UserError
from align.result.schema import Result
from tests.unit.align.cli.test_run import IDS, TOKENS, FakeSession, align, checkpoint, steps

__all__ = ["align", "checkpoint"]

Align = Callable[..., tuple[int, str, str]]


class Laid(FakeSession):
    """The candidate is wrong in the layouts that ``wrong`` says; ``stops`` interrupts there."""

    wrong: Callable[[Case], bool]
    stops: Callable[[Case], BaseException | None]

    def launch(self) -> None:
        error = type(self).stops(self.case)
        if error is not None:
            raise error
        super().launch()

    def generate(self) -> None:
        bad = type(self).wrong(self.case)
        self.free = {"candidate": steps(4, 50, 6) if bad else steps(*IDS), "reference": steps(*IDS)}
        self.forced = {
            "candidate": steps(4, 50, 6, chosen=IDS) if bad else steps(*IDS),
            "reference": steps(*IDS),
        }
        super().generate()


@pytest.fixture(autouse=True)
def laid(align: Align, monkeypatch: pytest.MonkeyPatch) -> type[Laid]:
    monkeypatch.setattr(run_module, "Session", Laid)
    monkeypatch.setattr(Laid, "wrong", staticmethod(lambda case: False), raising=False)
    monkeypatch.setattr(Laid, "stops", staticmethod(lambda case: None), raising=False)
    return Laid


def wrong_at(laid: type[Laid], rule: Callable[[Case], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laid, "wrong", staticmethod(rule))


def layouts() -> list[str]:
    return [
        str(one.case.layout.to_layout())
        + ("" if one.case.reference_layout is None else f" against {one.case.reference_layout.to_layout()}")
        for one in FakeSession.made
    ]


def result_in(directory: Path) -> Result:
    return Result.model_validate_json((directory / "result.json").read_text())


TWO = ("tp2 dp1 ep1", "tp1 dp1 ep1")


def test_a_parallel_target_that_diverges_is_walked_by_itself(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(laid, lambda case: case.layout.tp == 2, monkeypatch)
    out = tmp_path / "out"
    code, text, _ = align(*TOKENS, "--model", str(checkpoint), "--tp", "2", "--out", str(out))
    assert code == 1
    # Nobody is accused by tokens alone, so both engines are compared with themselves.
    assert layouts() == [*TWO, *["tp2 dp1 ep1 against tp1 dp1 ep1"] * 2]
    assert [(one.case.candidate, one.case.reference) for one in FakeSession.made[2:]] == [
        ("lmdeploy", "lmdeploy"),
        ("vllm", "vllm"),
    ]
    found = result_in(out).ladder
    assert found is not None and found.conclusion is not None
    assert (found.conclusion.state, found.conclusion.dimension) == ("introduced", "tp")
    assert (found.conclusion.clean_at, found.conclusion.introduced_at) == ("tp1 dp1 ep1", "tp2 dp1 ep1")
    assert [(one.layout, one.verdict, one.directory) for one in found.rungs] == [
        ("tp1 dp1 ep1", "aligned", "ladder/tp1_dp1_ep1"),
        ("tp2 dp1 ep1", "diverged", ""),
    ]
    assert "introduced by TP: tp1 dp1 ep1 is aligned, tp2 dp1 ep1 diverges" in text
    for name in ("report.md", "result.json", "case.json", "request.json"):
        assert (out / "ladder" / "tp1_dp1_ep1" / name).is_file()
    whole, rung = load_case(out / "case.json"), load_case(out / "ladder" / "tp1_dp1_ep1" / "case.json")
    assert rung.requests == whole.requests and rung.decoding == whole.decoding
    report = (out / "report.md").read_text()
    assert "## Ladder of layouts" in report and "introduced by TP" in report


def test_not_if_told_so_nor_with_one_rank(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(laid, lambda case: True, monkeypatch)
    model = ("--model", str(checkpoint))
    assert align(*TOKENS, *model, "--tp", "2", "--no-ladder", "--out", str(tmp_path / "a"))[0] == 1
    assert align(*TOKENS, *model, "--out", str(tmp_path / "b"))[0] == 1
    assert layouts() == ["tp2 dp1 ep1", "tp1 dp1 ep1"]
    assert result_in(tmp_path / "a").ladder is None and result_in(tmp_path / "b").ladder is None


def test_a_fault_of_one_rank_ends_the_walk_at_the_simplest(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(laid, lambda case: True, monkeypatch)
    out = tmp_path / "out"
    code, text, _ = align(*TOKENS, "--model", str(checkpoint), "--tp", "4", "--out", str(out))
    assert code == 1 and layouts() == ["tp4 dp1 ep1", "tp1 dp1 ep1"]
    assert "not introduced by parallelism: it exists at tp1 dp1 ep1 too" in text


def test_isolate_walks_an_aligned_target_too(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, _ = align(*TOKENS, "--ladder", "--model", str(checkpoint), "--tp", "2", "--out", str(out))
    assert code == 0 and layouts() == list(TWO)
    assert "aligned at every layout that was compared: tp1 dp1 ep1, tp2 dp1 ep1" in text
    assert "smallest TP that fits: 1" in text


def test_any_list_of_layouts_and_the_dimension_that_changed_with_another(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    wrong_at(laid, lambda case: case.layout.tp == 4, monkeypatch)
    code, _, _ = align(*TOKENS, "--layouts", "tp4, tp1,tp2", "--model", str(checkpoint), "--out", str(out))
    assert code == 1 and layouts()[:3] == ["tp4 dp1 ep1", "tp1 dp1 ep1", "tp2 dp1 ep1"]
    found = result_in(out).ladder
    assert found is not None and found.planned == ["tp1 dp1 ep1", "tp2 dp1 ep1", "tp4 dp1 ep1"]
    assert found.conclusion is not None and found.conclusion.clean_at == "tp2 dp1 ep1"


def test_the_ladder_begins_where_it_is_told(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    given = (*TOKENS, "--ladder", "--model", str(checkpoint), "--tp", "4")
    assert align(*given, "--min-tp", "2")[0] == 0
    assert layouts() == ["tp4 dp1 ep1", "tp2 dp1 ep1"]
    FakeSession.made.clear()
    assert align(*given, "--device-memory", "0.0000001")[0] == 0
    assert layouts() == ["tp4 dp1 ep1"], "no layout fits, so the largest is the simplest"


def test_an_engine_that_fails_in_a_rung_is_no_obstacle(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(laid, lambda case: case.layout.tp == 4, monkeypatch)
    lost = staticmethod(lambda case: UserError("no memory is left", "add some") if case.layout.tp == 1 else None)
    monkeypatch.setattr(laid, "stops", lost)
    out = tmp_path / "out"
    code, text, _ = align(*TOKENS, "--layouts", "tp1,tp2,tp4", "--model", str(checkpoint), "--out", str(out))
    assert code == 1
    found = result_in(out).ladder
    assert found is not None and found.conclusion is not None
    assert (found.rungs[0].verdict, found.rungs[0].why) == ("not comparable", "no memory is left")
    assert (found.conclusion.state, found.conclusion.clean_at) == ("introduced", "tp2 dp1 ep1")
    assert "tp1 dp1 ep1  not comparable: no memory is left" in text


def test_a_target_that_cannot_be_run_leaves_what_the_simpler_ones_say(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = staticmethod(lambda case: UserError("it hangs", "wait") if case.layout.tp == 2 else None)
    monkeypatch.setattr(laid, "stops", lost)
    out = tmp_path / "out"
    code, _, err = align(*TOKENS, "--ladder", "--model", str(checkpoint), "--tp", "2", "--out", str(out))
    assert code == 2 and "it hangs" in err
    found = result_in(out)
    assert found.verdict == "not comparable" and found.ladder is not None and found.ladder.conclusion is not None
    assert found.ladder.conclusion.state == "unknown"
    assert [one.verdict for one in found.ladder.rungs] == ["aligned", "not comparable"]


def test_json_is_the_whole_result_and_nothing_else(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_at(laid, lambda case: case.layout.tp == 2, monkeypatch)
    out = tmp_path / "out"
    _, text, _ = align(*TOKENS, "--json", "--quiet", "--model", str(checkpoint), "--tp", "2", "--out", str(out))
    assert Result.model_validate_json(text) == result_in(out)
    _, text, _ = align(*TOKENS, "--quiet", "--model", str(checkpoint), "--tp", "2")
    lines = text.splitlines()
    assert lines[0].startswith("diverged") and lines[-1].startswith("ladder: introduced by TP")


def test_a_walk_that_was_interrupted_goes_on_and_runs_nothing_twice(
    align: Align, checkpoint: Path, tmp_path: Path, laid: type[Laid], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    wrong_at(laid, lambda case: case.layout.tp == 4, monkeypatch)
    stop = staticmethod(lambda case: KeyboardInterrupt() if case.layout.tp == 2 else None)
    monkeypatch.setattr(laid, "stops", stop)
    code, _, err = align(*TOKENS, "--layouts", "tp1,tp2,tp4", "--model", str(checkpoint), "--out", str(out))
    assert code == 130 and err.splitlines()[-1] == f"next: align resume {out}", "the whole run, and not the rung"
    found = result_in(out)
    assert found.verdict == "diverged" and found.ladder is not None and found.ladder.conclusion is None
    assert layouts() == ["tp4 dp1 ep1", "tp1 dp1 ep1", "tp2 dp1 ep1"]
    monkeypatch.setattr(laid, "stops", staticmethod(lambda case: None))
    FakeSession.made.clear()
    code, text, _ = align("resume", str(out))
    assert code == 1 and "the ladder goes on" in text
    assert layouts()[0] == "tp2 dp1 ep1" and "tp1 dp1 ep1" not in layouts()
    ladder = result_in(out).ladder
    assert ladder is not None and ladder.conclusion is not None and ladder.conclusion.clean_at == "tp2 dp1 ep1"
    FakeSession.made.clear()
    assert align("resume", str(out))[0] == 1 and not layouts()


def test_an_engine_against_itself(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    fix = tmp_path / "fix.py"
    fix.write_text("def apply(ctx):\n    pass\n")
    out = tmp_path / "out"
    given = ("--model", str(checkpoint), "--tp", "2", "--patch", f"reference={fix}", "--set", "candidate.a=1")
    assert align(*TOKENS, *given, "--against", "reference:tp1", "--out", str(out))[0] == 0
    (session,) = FakeSession.made
    assert (session.case.candidate, session.case.reference) == ("vllm", "vllm")
    assert layouts() == ["tp2 dp1 ep1 against tp1 dp1 ep1"]
    assert [session.case.at(role).layout.tp for role in ("candidate", "reference")] == [2, 1]
    assert all(one.patches == (str(fix),) and one.options == {} for one in session.extras.values())
    case = json.loads((out / "case.json").read_text())
    assert case["reference_layout"] == {"tp": 1, "dp": 1, "ep": 1}
    assert result_in(out).case.reference_layout == "tp1 dp1 ep1"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--layouts", "tp2, quick"), "'quick' is no layout"),
        (("--layouts", "tp1, tp3"), "tp must divide num_attention_heads"),
        (("--layouts", "tp1, tp2", "--tp", "4"), "--layouts decides what --tp, --dp and --ep would"),
        (("--min-tp", "0"), "--min-tp 0 is not possible"),
        (("--min-tp", "3"), "--min-tp 3 does not fit"),
        (("--device-memory", "-1"), "--device-memory -1 is no size"),
        (("--against", "tp1"), "is the layout of the run itself"),
        (("--against", "both:tp1", "--tp", "2"), "both is no side"),
        (("--against", "tp3", "--tp", "2"), "does not fit"),
    ],
)
def test_what_cannot_be_is_refused(
    align: Align, checkpoint: Path, tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    code, _, err = align(*TOKENS, "--model", str(checkpoint), *given, "--out", str(out))
    assert code == 2 and message in err and not out.exists() and not layouts()
