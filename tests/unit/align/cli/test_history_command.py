"""``align diff`` and ``align nightly``, up to where engines would start."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from align.history.plan import DEFAULT
from align.run.directory import RunDirectory
from tests.unit.align.cli.recorded_runs import Align


def result_of(align: Align, run: Path, folder: Path) -> Path:
    """A comparison's result in a directory of its own."""
    folder.mkdir()
    align("compare", str(run / "candidate"), str(run / "reference"), "--out", str(folder / "result.json"), "-q")
    return folder


def test_diff_says_what_is_new_known_and_fixed(align: Align, clean: Path, faulty: Path, tmp_path: Path) -> None:
    right, wrong = result_of(align, clean, tmp_path / "right"), result_of(align, faulty, tmp_path / "wrong")
    for before, after, code, words in (
        (right, wrong, 1, "new: Path"),
        (wrong, right, 0, "fixed: Path"),
        (wrong, wrong / "result.json", 0, "known: Path"),
        (right, right, 0, "no finding in either"),
    ):
        got, out, _ = align("diff", str(before), str(after))
        assert (got, words in out) == (code, True), out
        assert f"after:  {after if after.is_dir() else after.parent}".split("/")[-1] in out and "next: " in out
        got, out, err = align("diff", str(before), str(after), "--json")
        told = json.loads(out)
        assert (got, err) == (code, "")
        assert [one["state"] for one in told["findings"]] == ([words.split(":")[0]] if "Path" in words else [])


def test_diff_of_a_run_that_cannot_be_compared(align: Align, clean: Path, tmp_path: Path) -> None:
    right = result_of(align, clean, tmp_path / "right")
    plain = json.loads((right / "result.json").read_text())
    none = tmp_path / "none.json"
    none.write_text(json.dumps({**plain, "verdict": "not comparable", "reason": "no memory"}))
    code, out, _ = align("diff", str(right), str(none))
    assert code == 2 and "not comparable (no memory)" in out and "says nothing of findings" in out
    code, _, err = align("diff", str(right), str(tmp_path / "nowhere"))
    assert code == 2 and "does not exist" in err and "next:" in err


def test_a_plan_is_written_and_listed(align: Align, tmp_path: Path) -> None:
    plan = tmp_path / "made" / "plan.toml"
    code, out, _ = align("nightly", "--new", str(plan))
    assert code == 0 and f"run it: align nightly {plan}" in out
    assert plan.read_text() == DEFAULT.read_text()
    code, out, _ = align("nightly", str(plan), "--list")
    assert code == 0 and out.splitlines()[-1] == "12 cases" and "align run --model qwen3 --tp 1" in out
    code, out, _ = align("nightly", str(plan), "--list", "--json")
    assert len(json.loads(out)) == 12
    assert align("nightly", "--new", str(plan))[0] == 2, "it is there"


def test_what_a_night_refuses(align: Align, tmp_path: Path) -> None:
    for arguments, words in (
        ((str(tmp_path / "none.toml"),), "cannot be read"),
        (("--fail-on", "old"), "--fail-on old is not known"),
        (("--device", "abacus"), "the device 'abacus' is not known"),
    ):
        code, _, err = align("nightly", *arguments, "--out", str(tmp_path / "nights"))
        assert code == 2 and words in err and "next:" in err


def test_two_nights_of_one_store_do_not_run_at_once(align: Align, tmp_path: Path) -> None:
    out = tmp_path / "nights"
    out.mkdir()
    with closing(RunDirectory.reopen(out)):
        code, _, err = align("nightly", "--out", str(out))
    assert code == 2 and "is in use by" in err and not (out / "nights").exists()
