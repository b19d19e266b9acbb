"""``--json``: one object on standard output, and everything else on standard error, whatever the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from adapters.probe.taps import load_taps
from align.cli.output import asked_in
from align.errors import SideError
from align.knowledge import knowledge
from align.result.schema import Result
from tests.unit.align.cli.recorded_runs import Align, FakeAlone


def test_compare_prints_the_result(align: Align, clean: Path, faulty: Path) -> None:
    for run, code in ((clean, 0), (faulty, 1)):
        sides = [str(run / role) for role in SIDES]
        got, out, err = align("compare", *sides, "--json")
        found = Result.model_validate_json(out)
        assert got == code
        assert (found.source, found.verdict) == ("compare", "diverged" if code else "aligned")
        assert found.verdict in err, "people still see the summary"
        assert align("compare", *sides, "--json", "-q")[2] == ""


def test_compare_prints_and_writes_the_same(align: Align, faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    code, out, _ = align("compare", *(str(faulty / role) for role in SIDES), "--json", "--out", str(file), "-q")
    assert code == 1
    assert out == file.read_text()
    assert "--out" not in json.loads(out)["command"]


def test_compare_that_stops_is_a_result_too(align: Align, clean: Path, tmp_path: Path) -> None:
    sides = [str(clean / role) for role in SIDES]
    for arguments, words in (
        ([sides[0], str(tmp_path / "nowhere")], "does not exist"),
        ([sides[0], sides[0]], "both sides are the same recording"),
        ([*sides, "--policy", "mine"], "--policy mine is not known"),
        ([*sides, "--allow", "luck"], "no condition is called luck"),
        ([*sides, "--min-coverage", "101"], "--min-coverage 101 is no percentage"),
    ):
        code, out, err = align("compare", *arguments, "--json")
        found = Result.model_validate_json(out)
        assert (code, found.verdict) == (2, "not comparable"), arguments
        assert words in found.reason
        assert found.next
        assert words in err


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, "interrupted"),
        (ZeroDivisionError("by zero"), 2, "a defect of align: ZeroDivisionError: by zero"),
    ],
)
def test_whatever_ends_a_comparison_is_in_its_result(
    align: Align, clean: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, reason: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("align.run.offline.Offline.run", fail)
    got, out, _ = align("compare", *(str(clean / role) for role in SIDES), "--json")
    found = Result.model_validate_json(out)
    assert (got, found.verdict, found.reason) == (code, "not comparable", reason)


def test_a_full_disk_does_not_keep_the_result_from_its_reader(align: Align, clean: Path) -> None:
    blocked = clean / "candidate" / "trace" / "trace.json" / "x"
    code, out, err = align("compare", *(str(clean / role) for role in SIDES), "--json", "--out", str(blocked))
    assert code == 2
    assert "cannot be written" in err
    assert Result.model_validate_json(out).source == "compare"


def test_sides_changed_over_are_remarked(align: Align, clean: Path, tmp_path: Path) -> None:
    out = align("compare", str(clean / "reference"), str(clean / "candidate"), "--json", "-q")[1]
    found = Result.model_validate_json(out)
    (remark,) = found.remarks
    assert remark.startswith("the sides are swapped: ") and str(clean / "reference") in remark
    file = tmp_path / "swapped.json"
    file.write_text(out)
    for lang, word in (("en", "Note: "), ("zh", "注意：原文：")):
        text = align("report", str(file), "--out", "-", "--lang", lang)[1]
        assert f"{word}the sides are swapped: {clean}" in text.replace("\\", "")


def test_taps(align: Align) -> None:
    code, out, err = align("taps", "vllm", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["engine"] == "vllm"
    assert [row["checkpoint"] for row in found["taps"]] == [tap.checkpoint for tap in load_taps("vllm")]
    assert set(found["taps"][0]) == {"checkpoint", "where", "pick", "transform", "inverse", "when"}


def test_explain(align: Align) -> None:
    found = json.loads(align("explain", "slots", "--json", "--lang", "zh")[1])
    (entry,) = found["entries"]
    known = knowledge().entries["slots"]
    assert (entry["id"], entry["title"], entry["paths"]) == ("slots", known.title.zh, list(known.paths))
    assert entry["causes"] == [text.zh for text in known.causes]
    assert entry["files"] == list(knowledge().files(known))
    everything = json.loads(align("explain", "--json")[1])["entries"]
    assert [one["id"] for one in everything] == list(knowledge().entries)


def test_export(align: Align, clean: Path, tmp_path: Path) -> None:
    out = tmp_path / "pt"
    code, text, err = align("export", str(clean / "candidate"), "--out", str(out), "--native", "--json")
    assert code == 0
    assert "next: align compare" in err
    found = json.loads(text)
    files = [path for path in out.rglob("*.pt") if path.is_file()]
    assert (found["files"], found["shapes"], found["out"]) == (len(files), "native", str(out))
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert "attn.kv_start_indices" in found["canonical"]


def test_report(align: Align, clean: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    align("compare", *(str(clean / role) for role in SIDES), "--out", str(file), "-q")
    code, out, err = align("report", str(file), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["report"], found["lang"]) == (str(tmp_path / "report.md"), "en")
    assert found["text"] == (tmp_path / "report.md").read_text()
    printed = json.loads(align("report", str(file), "--json", "--out", "-", "--lang", "zh")[1])
    assert (printed["report"], printed["lang"]) == (None, "zh")
    assert printed["text"].startswith("# 精度调试报告\n")


def test_capture(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code, out, err = align("capture", "vllm", "--case", str(case_file), "--out", str(trace), "--json")
    assert code == 0
    assert "1 of 2 checkpoints recorded" in err
    found = json.loads(out)
    assert (found["trace"], found["side"], found["engine"], found["along"]) == (str(trace), "reference", "vllm", None)
    assert [found[name] for name in ("expected", "values", "steps", "rows", "bytes")] == [2, 1, 3, 4, 5000]
    assert found["checkpoints"] == ["embed"]
    assert found["stability"]["stable"] is True
    assert [one["verdict"] for one in found["conditions"]] == ["ok", "unknown"]
    assert found["next"] == f"align capture lmdeploy --case {trace}/case.json --along {trace} --out OTHER"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SideError("reference", "the reference died", "read its log", ("last",)), 2, "the reference died"),
        (ZeroDivisionError("by zero"), 2, "this is a defect of align: ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, "interrupted"),
    ],
)
def test_what_fails_says_so_to_programs(
    align: Align,
    recorder: list[FakeAlone],
    case_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(FakeAlone, "error", error)
    got, out, _ = align("capture", "vllm", "--case", str(case_file), "--out", str(tmp_path / "out"), "--json")
    found = json.loads(out)
    assert set(found) == {"error", "next", "exit"}
    assert (got, found["error"], found["exit"]) == (code, words, code)
    assert found["next"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["taps", "sglang"], "sglang"),
        (["explain", "slotz"], "nothing is known about 'slotz'"),
        (["export", "nowhere", "--out", "o"], "does not exist"),
        (["report", "nowhere"], "does not exist"),
        (["taps"], "Missing argument"),
        (["taps", "vllm", "--nope"], "No such option: --nope"),
        (["run", "--tp", "two"], "Invalid value for '--tp'"),
        (["walk"], "No such command 'walk'"),
    ],
)
def test_refusals_are_objects(align: Align, arguments: list[str], words: str) -> None:
    code, out, err = align(*arguments, "--json")
    found = json.loads(out)
    assert (code, found["exit"]) == (2, 2)
    assert words in found["error"]
    assert f"error: {found['error']}\nnext: {found['next']}\n" == err


def test_without_the_option_nothing_of_it(align: Align) -> None:
    assert align("taps", "sglang")[1] == ""
    assert align("taps", "vllm", "--nope")[1] == ""
    assert not asked_in(["align", "explain", "--", "--json"])
    assert asked_in(["align", "explain", "--json", "--", "x"])
