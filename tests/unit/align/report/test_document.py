"""``report.md``: seed 000's sections in both languages, numbers with their bounds, and foreign text as text."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from align.cli.commands import run_command
from align.errors import SideError, UserError
from align.report import again
from align.report.document import language, number, render
from align.result.build import Command, result_of
from align.result.facts import Answers
from align.result.ground import Ground
from align.result.schema import Result
from align.run.flow import Wishes
from align.run.plan import SideExtras
from align.run.report import Report
from tests.unit.align.result import made
from tests.unit.align.run import recordings

PARSER = MarkdownIt("commonmark").enable("table")
#: Headings of seed 000's template, and of what the issue adds, in order.
ENGLISH = [
    "Precision report", "Problem", "Root cause", "Scope of effect", "Measures", "Verification", "What was checked",
    "What was not checked", "Remaining risks", "How to reproduce", "The walk",
]  # fmt: skip
CHINESE = [
    "精度调试报告", "问题概要", "根因分析", "影响范围", "修复措施", "修复验证", "已检查的内容", "未检查的内容",
    "遗留风险", "复现方法", "排查过程",
]  # fmt: skip
EVIL = "</td><script>x</script> | **b** [l](http://x) `c` ![i](j)\n# h"


def headings(text: str) -> list[str]:
    tokens = PARSER.parse(text)
    return [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "heading_open"]


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def clean(result: Result, language: str) -> str:
    """The document after a look at its form: whole tables, no markup of others."""
    text = render(result, language)
    tokens = PARSER.parse(text)
    inner = [child for token in tokens for child in token.children or ()]
    assert not {token.type for token in (*tokens, *inner)} & {"html_block", "html_inline", "link_open", "image"}
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    widths: list[int] = []
    for token in tokens:
        if token.type == "tr_open":
            widths.append(0)
        elif token.type in ("th_open", "td_open"):
            widths[-1] += 1
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    assert len(rows) == len(widths), "a row that is not part of a table"
    assert [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows] == widths
    return text


@pytest.mark.parametrize(("lang", "expected"), [("en", ENGLISH), ("zh", CHINESE)])
def test_the_sections_of_the_template(
    lang: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverged = made.Run(tmp_path / "wrong", monkeypatch, made.wrong_up).go().result()
    stopped = made.Run(tmp_path / "stopped", monkeypatch, conditions=(recordings.condition("false"),)).go().result()
    right = made.Run(tmp_path / "right", monkeypatch).go().result()
    nothing = result_of(Report(reason="no such model"), Ground("run"), Command())
    for result in (diverged, stopped, right, nothing):
        assert headings(clean(result, lang)) == expected


def test_a_clean_run_says_what_was_checked_and_what_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch).go().result()
    expected = result.coverage.paired.expected if result.coverage else 0
    text = clean(result, "en")
    checked = section(text, "What was checked")
    assert "1 of 1 conditions were read back" in checked
    assert "4 greedy tokens of 2 requests" in checked
    assert f"{expected} of {expected} checkpoints on both sides (100 %)" in checked
    left = section(text, "What was not checked")
    assert "The candidate's weights." in left
    assert "Layouts other than tp1 dp1 ep1" in left
    assert "Nothing was found wrong" in text
    assert "Tensors: the tokens alone" not in text


def test_tokens_alone_are_said_to_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, wishes=Wishes(tensors=False)).go()
    text = clean(run.result(), "en")
    assert "Tensors: the tokens alone were compared." in section(text, "What was not checked")
    assert "a fault that moves no token" in section(text, "Remaining risks")
    assert "Precision: not done" in section(text, "Verification")


def test_a_divergence_has_evidence_bounds_and_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    text = clean(result, "en")
    assert "Path B, operator precision" in section(text, "Root cause")
    assert "layers.1.mlp.up" in section(text, "Root cause")
    assert "align explain" in section(text, "Root cause")
    scope = section(text, "Scope of effect")
    assert "* Layers where it begins: layer 1 (of 2 compared)\n" in scope
    assert "* Layers where the two sides differ by more than rounding: layer 1 (checkpoints: 1)\n" in scope
    assert "Precision: not passed" in section(text, "Verification")
    assert result.tensors is not None
    shown = next(one for one in result.tensors.shown if one.name == "layers.1.mlp.up")
    row = next(line for line in section(text, "Verification").splitlines() if line.startswith("| layers.1.mlp.up "))
    assert f"(0.001, above the seeds' threshold) | {shown.cosine:.6g} | 1 ({shown.rel_l2_bound:.4g})" in row
    assert "align run --case" in section(text, "How to reproduce")
    assert "第 0 层" in clean(result, "zh")


def test_the_problem_names_symptom_phase_and_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result(Answers(symptom="worse by 2 points"))
    problem = section(clean(result, "en"), "Problem").splitlines()
    said = {line.partition(":")[0]: line.partition(":")[2] for line in problem if line.startswith("* ")}
    assert said["* Symptom"] == " worse by 2 points"
    assert any(phase in said["* Phase"] for phase in ("prefill", "decode", "both"))
    assert "Path B, operator precision" in said["* Module"]
    assert "layers.1.mlp.up" in said["* Module"]


def test_what_stopped_it_is_told_with_its_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(recordings.condition("false"),)).go()
    text = clean(run.result(), "en")
    assert "Condition eager: requested True; because. Mend: switch it on" in section(text, "Root cause")
    assert "Nothing is known about what was not reached." in section(text, "Remaining risks")


def test_what_was_allowed_stays_a_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = (recordings.condition("false", "eager", allowed=True),)
    result = made.Run(tmp_path / "run", monkeypatch, conditions=conditions).go().result()
    text = clean(result, "en")
    risks = section(text, "Remaining risks")
    assert "The condition eager does not hold, and the run went on because `--allow` names it: it must be" in risks
    assert "--allow eager" in section(text, "How to reproduce")


def test_fixes_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = tmp_path / "fix.py"
    patch.write_text('"""Adds the epsilon.\n\nFile: a/norm.py\nReason: it | was left out.\n"""\n')
    extras = {"candidate": SideExtras({"x": 5}, (str(patch),))}
    result = made.Run(tmp_path / "run", monkeypatch, extras=extras).go().result()
    rows = section(clean(result, "en"), "Measures").splitlines()
    assert "| a/norm.py | candidate | Adds the epsilon. | it \\| was left out. |" in rows
    assert "| x | candidate | x = 5 | engine option given with --set |" in rows
    again = section(clean(result, "en"), "How to reproduce")
    assert f"--patch candidate={patch}" in again
    assert "--set candidate.x=5" in again
    assert "尚未尝试修复" in clean(made.Run(tmp_path / "plain", monkeypatch).go().result(), "zh")


def test_foreign_text_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = recordings.condition("unknown", EVIL)
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(condition,)).go()
    run.report.reason = EVIL
    answers = Answers(symptom=EVIL, stage=EVIL, baseline=EVIL)
    result = run.result(answers, argv=("align", "run", "--symptom", "```\n# out"))
    for lang in ("en", "zh"):
        text = clean(result, lang)
        assert len(headings(text)) == len(ENGLISH)


def test_the_answers_are_beside_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch).go().result(Answers(onset="first"))
    row = next(line for line in render(result).splitlines() if line.startswith("| First token wrong"))
    assert row == (
        "| First token wrong, or a later one | the first token, so prefill | answered | no token differs: 4 tokens |"
    )


def test_numbers_and_languages() -> None:
    assert [number(one) for one in (None, 0.123456, 3, "inf")] == ["?", "0.1235", "3", "inf"]
    assert language("zh") == "zh"
    with pytest.raises(UserError, match="--lang fr is not known"):
        language("fr")


def test_remarks_and_rows_computed_ahead_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch).go()
    run.report.remarks = ("the sides were *changed* over",)
    run.report.surplus = {"candidate": 4, "reference": 0}
    result = run.result()
    assert (result.remarks, result.surplus) == (["the sides were *changed* over"], {"candidate": 4, "reference": 0})
    text = clean(result, "en")
    assert "Note: the sides were \\*changed\\* over\n" in text
    (ahead,) = (line for line in section(text, "Verification").splitlines() if "ahead" in line)
    assert ahead == "* Rows that the candidate computed ahead of what was asked for: 4. They need no partner."
    chinese = clean(result, "zh")
    assert "注意：原文：the sides were" in chinese
    assert "候选侧超前计算、并未要求的行：4 行。" in section(chinese, "修复验证")
    run.report.remarks, run.report.surplus = (), {"candidate": 0, "reference": 0}
    assert "ahead" not in clean(run.result(), "en")


def test_the_same_run_again_has_every_option_that_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = (
        "align", "run", "--model", "x", "--tp", "1", "--out", "there", "--lean", "--floor=none", "--capture",
        "layers.1.*", "--capture", "logits", "--values-budget", "64", "--min-coverage", "90", "--policy", "seed",
        "--allow", "soc", "--no-confirm", "--confirm", "candidate:layers.1.mlp.up", "--lang", "zh", "--quiet",
    )  # fmt: skip
    result = made.Run(tmp_path / "run", monkeypatch).go().result(argv=typed)
    words = again.command_again(result)
    assert words is not None
    assert words[:4] == ["align", "run", "--case", f"{tmp_path / 'run'}/case.json"]
    assert words[4:] == [
        "--lean", "--floor", "none", "--capture", "layers.1.*", "--capture", "logits", "--values-budget", "64",
        "--min-coverage", "90", "--policy", "seed", "--allow", "soc", "--no-confirm", "--confirm",
        "candidate:layers.1.mlp.up",
    ]  # fmt: skip
    assert " --lean --floor none " in section(clean(result, "en"), "How to reproduce")


def test_no_option_that_changes_a_run_is_forgotten() -> None:
    """What makes the case is in its file, and what only shows or keeps it changes nothing."""
    case = {"model", "prompts", "case", "only", "dtype", "tp", "dp", "ep", "max_new_tokens", "block_size"}
    case |= {"numerics", "device", "set_", "patch", "against"}  # said by other parts of the result
    shown = {"out", "symptom", "onset", "batching", "stage", "baseline", "interactive", "lang", "dry_run", "json"}
    shown |= {"quiet", "verbose", "debug"}
    names = set(inspect.signature(run_command).parameters) - case - shown
    kept = {name.removeprefix("--").replace("-", "_") for name in (*again.WITH_VALUE, *again.FLAGS)}
    assert names == kept


def test_a_verdict_with_a_patch_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {
        "candidate": SideExtras({"x": 5, "y": 6}, ("/p/fix.py",)),
        "reference": SideExtras({}, ("/a.py", "/b.py")),
    }
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up, extras=extras).go().result()
    line = clean(result, "en").splitlines()[4]
    assert line == (
        "This is the verdict with a patch on the candidate: fix.py; patches on the reference: a.py, b.py; "
        "options of the candidate: x, y."
    )
    assert "候选侧的补丁 fix.py；参考侧的补丁 a.py、b.py；候选侧的选项 x、y" in clean(result, "zh").splitlines()[4]
    plain = made.Run(tmp_path / "plain", monkeypatch).go().result()
    assert "verdict with" not in clean(plain, "en")


def test_a_patch_of_the_accused_side_is_a_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"reference": SideExtras({}, ("/p/row.py",))}
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up, extras=extras).go().result()
    found = {"kind": "weights", "side": "reference", "evidence": {"parameter": "w.weight"}}
    first = result.findings[0].model_copy(update=found)
    text = clean(result.model_copy(update={"findings": [first]}), "en")
    assert text.count("See how the reference loads w.weight; a patch is active on the reference: row.py.") == 2
    other = first.model_copy(update={"side": "candidate"})
    assert "a patch is active" not in clean(result.model_copy(update={"findings": [other]}), "en")
    assert again.suspects(["/p/row.py"], "reference", "/p/row.py:7") is None, "the place names it already"


def test_a_run_that_failed_before_anything_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, extras={"candidate": SideExtras({}, ("/p/raises.py",))})
    run.session.failure = SideError("candidate", "the candidate died", "correct the patch")
    text = clean(run.go().result(), "en")
    for filler in ("the tokens alone were compared", "All numbers are simulated", "or not known", "measures ran in"):
        assert filler not in text
    assert section(text, "Scope of effect").strip() == "* Nothing was compared, so that nothing is known of it."
    assert "* Tensors.\n" in section(text, "What was not checked")
    assert "The run was given a patch on the candidate: raises.py." in text
    assert "ended before anything was compared" in section(text, "Measures")


def test_estimates_from_digests_are_said_to_be_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    assert result.tensors is not None and result.tensors.estimated == 0
    assert "by digests" not in clean(result, "en")
    shown = [one.model_copy(update={"estimated": True}) for one in result.tensors.shown]
    lean = result.tensors.model_copy(update={"estimated": 39, "estimated_rows": 3, "shown": shown})
    text = clean(result.model_copy(update={"tensors": lean}), "en")
    assert "39 of 40 checkpoints were compared by digests (random projections) of 3 of 7 rows" in section(
        text, "Verification"
    )
    assert "| layers.1.mlp.up | beyond, estimated, **accused**" in text
    assert "only digests of 3 of 7 rows were compared" in section(text, "What was not checked")
    assert "39 个仅凭 7 行中 3 行的摘要" in clean(result.model_copy(update={"tensors": lean}), "zh")


def test_the_table_says_which_checkpoints_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    assert result.tensors is not None
    text = section(clean(result, "en"), "Verification")
    assert f"The table shows {len(result.tensors.shown)} of 40 checkpoints: those that a finding names" in text


@pytest.mark.parametrize(
    ("test", "label"),
    [("gain", "Worst place by a row's factor"), ("element", "Worst place by a single element"), ("", "Worst place (")],
)
def test_the_worst_place_says_by_which_test(
    test: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    evidence = {**result.findings[0].evidence, "worst_by": test}
    found = {"kind": "operator", "requests": ["r0"], "positions": [1], "evidence": evidence}
    text = clean(result.model_copy(update={"findings": [result.findings[0].model_copy(update=found)]}), "en")
    assert f"   * {label}" in section(text, "Root cause")


def test_a_call_shows_the_engines_own_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    argument = {
        "name": "x", "type": "Tensor", "mark": "", "dtype": "bfloat16", "shape": [1, 241, 256], "form": "T×256",
        "strides": [61696, 256, 1], "device": "npu", "format": 2,
    }  # fmt: skip
    evidence = {**result.findings[0].evidence, "calls": {"candidate": {"rows": 241, "arguments": [argument]}}}
    first = result.findings[0].model_copy(update={"evidence": evidence})
    text = render(result.model_copy(update={"findings": [first]}))
    assert "| candidate | 0 | x | bfloat16 | 1×T×256 | 61696 256 1 |  |" in text
