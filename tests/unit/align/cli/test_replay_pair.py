"""``align replay`` as a paired run, with scripted engines: the patches that they are given decide what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.cli import resume as resume_module
from align.cli import run as run_module
from align.run import certify
from align.run.plan import SideExtras
from tests.unit.align.cli import test_run
from tests.unit.align.result.made import wrong_up
from tests.unit.align.run import recordings

Align = Callable[..., Any]
align, checkpoint = test_run.align, test_run.checkpoint


def wrong_norm(phase: str, step: int, tensors: dict[str, Any]) -> None:
    """A fault before the other one."""
    tensors["layers.0.attn_norm"] = tensors["layers.0.attn_norm"] * 2


#: What the candidate does wrong with these patches; unpatched it is ``wrong_up``.
PATCHED: dict[tuple[str, ...], Any] = {
    ("fix.py",): None,
    ("useless.py",): wrong_up,
    ("worse.py",): wrong_norm,
    ("useless.py", "fix.py"): None,
}


class Patched(recordings.Scripted):
    """Engines whose candidate has a fault that a patch mends."""

    extras: dict[str, SideExtras]
    fault: Any = staticmethod(wrong_up)

    def __init__(self, case: Any, info: Any, interpreters: Any, directory: Path, *rest: Any, **more: Any) -> None:
        super().__init__(directory)
        names = tuple(Path(file).name for file in rest[-1]["candidate"].patches) if "candidate" in rest[-1] else ()
        edit = PATCHED[names] if names else type(self).fault
        if edit is not None:
            self.edits["candidate"] = edit


@pytest.fixture
def first(align: Align, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that diverged, and patches beside it."""
    monkeypatch.setattr(run_module, "Session", Patched)
    monkeypatch.setattr(Patched, "fault", staticmethod(wrong_up))
    for module in (run_module, resume_module):
        monkeypatch.setattr(module, "resolve_model", lambda *_: recordings.info())
    monkeypatch.setattr(run_module, "check_device", lambda *_: None)  # the model has no files
    monkeypatch.setattr(certify, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    for name in ("fix", "useless", "worse"):
        (tmp_path / f"{name}.py").write_text(f'"""Tries {name}."""\n\n\ndef apply(ctx):\n    pass\n')
    recordings.case().save(tmp_path / "case.json")
    code, _, err = align("--case", str(tmp_path / "case.json"), "--out", str(tmp_path / "first"))
    assert code == 1, err
    return tmp_path / "first"


def result_of(path: Path) -> dict[str, Any]:
    content = json.loads((path / "result.json").read_text())
    assert isinstance(content, dict)
    return content


def replayed(align: Align, first: Path, *options: str, name: str = "second") -> tuple[int, dict[str, Any], str]:
    out = first.parent / name
    code, text, err = align("replay", str(first), *options, "--out", str(out))
    assert (out / "result.json").is_file(), err
    return code, result_of(out), text


def patch(first: Path, name: str) -> str:
    return f"--patch=candidate={first.parent / name}.py"


def test_a_run_of_its_own_is_no_pair(first: Path) -> None:
    content = result_of(first)
    assert content["paired"] is None
    assert "Paired run" not in (first / "report.md").read_text()


def test_unfixed_diverges_and_fixed_does_not(align: Align, first: Path) -> None:
    code, content, text = replayed(align, first, patch(first, "fix"))
    paired = content["paired"]
    assert (code, content["verdict"]) == (0, "aligned")
    assert (paired["earlier"], paired["verdict"], paired["outcome"]) == ("first", "diverged", "mended")
    assert paired["conclusive"] and paired["confounded"] == [] and paired["changes"] == 1
    assert paired["headline"]["checkpoint"] == "layers.1.mlp.up" and paired["gone"] == [paired["headline"]]
    assert paired["appeared"] == paired["removed"] == []
    (added,) = paired["added"]
    assert added == content["measures"][0] and added["change"] == "Tries fix."
    line = next(line for line in text.splitlines() if line.startswith("paired run: "))
    assert line.startswith("paired run: mended: first showed path B: unexplained at layers.1.mlp.up")
    assert line.endswith("and now nothing is wrong; changed: a patch on the candidate: fix.py")
    assert paired["what"] == line.removeprefix("paired run: ")
    # The earlier run is as it was.
    assert result_of(first)["verdict"] == "diverged"


def test_a_fix_that_is_none(align: Align, first: Path) -> None:
    code, content, text = replayed(align, first, patch(first, "useless"), "--quiet")
    paired = content["paired"]
    assert (code, paired["outcome"], paired["conclusive"]) == (1, "not mended", True)
    assert paired["gone"] == paired["appeared"] == []
    assert "\nnot mended: path B: unexplained at layers.1.mlp.up" in text


def test_a_fault_that_moved_says_what_is_gone(align: Align, first: Path) -> None:
    _, content, _ = replayed(align, first, patch(first, "worse"))
    paired = content["paired"]
    assert paired["outcome"] == "moved"
    assert [one["checkpoint"] for one in paired["gone"]] == ["layers.1.mlp.up"]
    assert content["findings"][0]["checkpoint"] == paired["appeared"][0]["checkpoint"] == "layers.0.attn_norm"
    report = (first.parent / "second" / "report.md").read_text()
    assert "Found in first and not here: path B: unexplained at layers.1.mlp.up" in report
    assert "The case is not closed" in report
    assert content["next"], "where to go on"


def test_without_a_change_it_is_a_pair_too(align: Align, first: Path) -> None:
    _, content, _ = replayed(align, first)
    paired = content["paired"]
    assert (paired["outcome"], paired["changes"], paired["conclusive"]) == ("not mended", 0, True)
    assert paired["what"].endswith("as in first; nothing was changed")


def test_a_right_run_stays_right_or_breaks(align: Align, first: Path) -> None:
    fixed = first.parent / "fixed"
    assert align("--case", str(first / "case.json"), patch(first, "fix"), "--out", str(fixed))[0] == 0
    _, content, _ = replayed(align, fixed, name="again")
    assert (content["paired"]["outcome"], content["paired"]["what"]) == (
        "same", "same: aligned, as fixed was; nothing was changed",
    )  # fmt: skip
    (first.parent / "fix.py").write_text("def apply(ctx):\n    pass  # another text\n")
    PATCHED[("fix.py",)] = wrong_up
    try:
        _, content, _ = replayed(align, fixed, name="changed")
    finally:
        PATCHED[("fix.py",)] = None
    paired = content["paired"]
    assert (paired["outcome"], paired["changes"]) == ("broken", 1)
    assert len(paired["added"]) == len(paired["removed"]) == 1
    assert "changed: another content or value of a patch on the candidate: fix.py" in paired["what"]


def test_two_changes_at_once_are_inconclusive(align: Align, first: Path) -> None:
    _, content, _ = replayed(align, first, patch(first, "useless"), patch(first, "fix"))
    paired = content["paired"]
    assert (paired["outcome"], paired["changes"], paired["conclusive"]) == ("mended", 2, False)
    assert paired["what"].endswith("; inconclusive: 2 things were changed at once")
    assert "one thing alone may differ" in (first.parent / "second" / "report.md").read_text()


def test_the_mended_run_may_be_repeated_further(align: Align, first: Path) -> None:
    """A replay of a replay takes its patches over: of the pair, one is new."""
    replayed(align, first, patch(first, "useless"), name="second")
    _, content, _ = replayed(align, first.parent / "second", patch(first, "fix"), name="third")
    paired = content["paired"]
    assert (paired["earlier"], paired["outcome"], paired["changes"]) == ("second", "mended", 1)
    assert [one["change"] for one in paired["added"]] == ["Tries fix."]


def test_what_else_differs_is_confounded(align: Align, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = recordings.condition("false", allowed=True)
    monkeypatch.setattr(certify, "evaluate", lambda *_, **__: (allowed,))
    request = json.loads((first / "request.json").read_text())
    content = result_of(first)
    content["versions"]["candidate"]["torch"] = "1.0"
    (first / "result.json").write_text(json.dumps(content))
    (first / "request.json").write_text(json.dumps(request | {"tensors": False}))
    _, content, _ = replayed(align, first, patch(first, "fix"))
    paired = content["paired"]
    found = {(one["what"], one["name"]): (one["before"], one["after"]) for one in paired["confounded"]}
    assert found.pop(("version", "candidate torch"))[0] == "1.0"
    assert found == {
        ("condition", "eager"): ("ok", "false, allowed"), ("recording", "tensors"): ("not compared", "compared"),
    }  # fmt: skip
    assert paired["outcome"] == "mended" and not paired["conclusive"]
    assert "inconclusive: what should be alike differs: version candidate torch, condition eager" in paired["what"]
    assert "condition eager: before ok, now false, allowed" in (first.parent / "second" / "report.md").read_text()


def test_other_tokens_are_another_path(align: Align, first: Path) -> None:
    tokens = json.loads((first / "tokens.json").read_text())
    generations = tokens["free"]["candidate"]["generations"]
    for step in generations[0]["steps"][1:]:
        step["token_id"] = step["chosen"] = 9
    (first / "tokens.json").write_text(json.dumps(tokens))
    _, content, _ = replayed(align, first, "--along", "candidate")
    ids = recordings.generations()[0].token_ids
    (one,) = content["paired"]["confounded"]
    assert (one["what"], one["name"], one["before"]) == ("tokens", generations[0]["request"], f"token 1: {ids[1]}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it left no result"),
        ("{", "its result cannot be read: "),
        ("[]", "its result cannot be read: it is no object"),
        ('{"schema_version": 1}', "its result was written by another version of align"),
        ('{"schema_version": 2}', "its result cannot be read: source: Field required"),
    ],
)
def test_an_earlier_run_without_a_result_is_not_comparable(
    align: Align, first: Path, text: str | None, why: str
) -> None:
    (first / "result.json").unlink()
    if text is not None:
        (first / "result.json").write_text(text)
    _, content, _ = replayed(align, first, patch(first, "fix"))
    paired = content["paired"]
    assert (paired["outcome"], paired["verdict"], paired["conclusive"]) == ("unknown", "not comparable", False)
    assert why in paired["why"] and why in paired["what"]
    assert (paired["added"], paired["confounded"], paired["headline"]) == ([], [], None)


def test_an_earlier_run_that_was_stopped_says_why(align: Align, first: Path) -> None:
    content = result_of(first) | {"verdict": "not comparable", "reason": "the candidate died", "reason_told": None}
    (first / "result.json").write_text(json.dumps(content))
    _, content, _ = replayed(align, first, patch(first, "fix"))
    assert content["paired"]["what"] == "unknown: first is not comparable: the candidate died"


def test_a_replay_that_stops_is_a_pair_of_which_nothing_is_known(
    align: Align, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "evaluate", lambda *_, **__: (recordings.condition("false"),))
    code, content, _ = replayed(align, first, patch(first, "fix"))
    assert code == 2
    assert content["paired"]["outcome"] == "unknown" and content["paired"]["verdict"] == "diverged"
    assert content["paired"]["what"].startswith("unknown: this run cannot be compared with first: ")


def test_a_replay_that_is_taken_up_again_is_still_a_pair(
    align: Align, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Patched, "launch", interrupt)
    second = first.parent / "second"
    assert align("replay", str(first), patch(first, "fix"), "--out", str(second))[0] == 130
    monkeypatch.setattr(Patched, "launch", recordings.Scripted.launch)
    for role in ("candidate", "reference"):
        (second / role).rmdir()
    code, text, _ = align("resume", str(second))
    assert code == 0 and "paired run: mended: first showed " in text
    assert result_of(second)["paired"]["outcome"] == "mended"


def test_the_pair_in_chinese(align: Align, first: Path) -> None:
    request = json.loads((first / "request.json").read_text())
    (first / "request.json").write_text(json.dumps(request | {"lang": "zh"}))
    replayed(align, first, patch(first, "fix"))
    text = (first.parent / "second" / "report.zh.md").read_text()
    line = next(line for line in text.splitlines() if "对照运行" in line)
    assert line.startswith("* 对照运行：已修复：first 中有路径 B：layers.1.mlp.up 处的无算子能解释的差异")
    assert line.endswith("改动：候选侧的补丁 fix.py")
