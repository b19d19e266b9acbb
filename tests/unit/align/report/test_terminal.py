"""What the summary says: verdicts, findings, differences, conditions, and texts that look like markup."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from adapters.base import Generation, Observation, TokenStep
from align.case.schema import CaseRequest
from align.compare.noise import NoisePolicy
from align.compare.tokens import TokenComparison, compare_tokens
from align.conditions import Condition
from align.findings import Finding
from align.report import terminal
from align.run.outcome import Outcome, SideOutcome
from align.run.plan import SideExtras
from align.run.report import Report
from align.run.stability import Stability
from tests.unit.align.run import fakes

POLICY = NoisePolicy(floor=0.05, cap=0.5)
NASTY = "[red]x[/red] [/] :smile: [link=file:///etc]y[/link] \\[bold] back\\"


def screen(coloured: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, force_terminal=coloured, color_system="truecolor" if coloured else None,
                   emoji=False), out  # fmt: skip


def run(name: str, ids: tuple[int, ...], shift: float = 0.0) -> Generation:
    """Every id is preferred to the next one (id + 1) by 1 + shift."""
    return Generation(
        name, tuple(TokenStep(token, token, ((token, -0.1), (token + 1, -1.1 - shift), (99, -5.0))) for token in ids)
    )


def flip(name: str, ids: tuple[int, ...], margin: float) -> Generation:
    """As :func:`run`, but the last id wins over the one below it by this margin only."""
    whole = run(name, ids)
    last = TokenStep(ids[-1], ids[-1], ((ids[-1], -0.7), (ids[-1] - 1, -0.7 - margin), (99, -5.0)))
    return Generation(name, (*whole.steps[:-1], last))


def close_reference(name: str, ids: tuple[int, ...], margin: float) -> Generation:
    """The other side of :func:`flip`: the last id wins over the one above it by this margin."""
    whole = run(name, ids)
    last = TokenStep(ids[-1], ids[-1], ((ids[-1], -0.7), (ids[-1] + 1, -0.7 - margin), (99, -5.0)))
    return Generation(name, (*whole.steps[:-1], last))


def compare(candidate: list[Generation], reference: list[Generation], mode: Any = "free") -> TokenComparison:
    return compare_tokens(candidate, reference, mode=mode, policy=POLICY)


def outcome(candidate: list[Generation], reference: list[Generation]) -> Outcome:
    sides = {}
    for role, generations in (("candidate", candidate), ("reference", reference)):
        side = SideOutcome("lmdeploy" if role == "candidate" else "vllm", launched=fakes.launched())
        side.free = replace(fakes.result(), generations=tuple(generations))
        side.observations = [Observation("tp", 1, "config"), Observation("dtype", "[b]bf16[/b]", "config")]
        sides[role] = side
    return Outcome(sides)


def report(
    candidate: list[Generation], reference: list[Generation], findings: tuple[Finding, ...] = (), **more: Any
) -> Report:
    comparisons = {"free": compare(candidate, reference), **more}
    verdict: Any = "diverged" if findings else comparisons.get("replay", comparisons["free"]).verdict
    return Report(verdict=verdict, comparisons=comparisons, findings=findings)


def shown(
    found: Report, candidate: list[Generation], reference: list[Generation], coloured: bool = False, **more: Any
) -> str:
    console, out = screen(coloured)
    case = fakes.case(*(CaseRequest(name=g.request, token_ids=(1,)) for g in candidate))
    info, sides = more.pop("info", fakes.info()), more.pop("outcome", outcome(candidate, reference))
    terminal.show_summary(console, case, info, sides, found, Path("/runs/[1]"), **more)
    return out.getvalue()


def summary(
    candidate: list[Generation], reference: list[Generation], coloured: bool = False, **more: TokenComparison
) -> str:
    return shown(report(candidate, reference, (), **more), candidate, reference, coloured)


# ---------------------------------------------------------------------------------------------------------- summary


def test_equal_tokens() -> None:
    text = summary([run("a", (1, 2, 3)), run("b", (7,))], [run("a", (1, 2, 3)), run("b", (7,))])
    assert "aligned: lmdeploy and vllm generate the same 4 greedy tokens for 2 requests" in text
    assert "differences" not in text
    assert "3/3" in text
    assert "same" in text
    assert "next: score the model" in text
    assert "/runs/[1]" in text


def test_a_near_tie_is_aligned_and_listed() -> None:
    text = summary([flip("a", (1, 2, 4), 0.02)], [close_reference("a", (1, 2, 3), 0.01)])
    assert "aligned: lmdeploy and vllm differ at 1 of 3 greedy tokens, at each by a near-tie" in text
    assert "differences (free-running):" in text
    assert (
        "a token 2: candidate 4, reference 3 (near-tie: margins 0.02 and 0.01 are together within twice the noise 0.05)"
        in text
    )
    assert "2/3" in text
    assert "near-tie" in text


def test_a_difference_names_the_step_and_what_to_do() -> None:
    text = summary([run("a", (1, 2, 50)), run("b", (7,))], [run("a", (1, 2, 3)), run("b", (7,))])
    assert "diverged: lmdeploy and vllm first differ at token 2, in decode, of request a" in text
    assert "a token 2: candidate 50, reference 3" in text
    assert "next: repeat it with CASE=/runs/[1]/case.json" in text


def test_a_difference_in_prefill() -> None:
    text = summary([run("a", (50, 2))], [run("a", (1, 2))])
    assert "first differ at the first token, so prefill, of request a" in text


def test_a_replay_decides_and_is_what_is_listed() -> None:
    candidate, reference = [run("a", (1, 50))], [run("a", (1, 3))]
    forced = [
        Generation("a", tuple(replace(step, chosen=token) for step, token in zip(side.steps, (1, 3), strict=True)))
        for side in (flip("a", (1, 4), 0.02), close_reference("a", (1, 3), 0.01))
    ]
    text = summary(candidate, reference, replay=compare(forced[:1], forced[1:], "replay"))
    assert "differences (teacher-forced along the reference):" in text
    assert "a token 1: candidate 4, reference 3 (near-tie" in text


def test_what_a_replay_does_not_repeat_is_still_listed() -> None:
    same = run("a", (1, 3))
    text = summary([run("a", (1, 50))], [same], replay=compare([same], [same], "replay"))
    assert "differences (free-running):" in text
    assert "candidate 50, reference 3" in text


def test_sides_of_unlike_length() -> None:
    text = summary([run("a", (1, 2))], [run("a", (1, 2, 3))])
    assert "length" in text
    assert "2/3" in text
    assert "diverged" in text


def test_many_differences_are_counted() -> None:
    names = [f"r{number}" for number in range(12)]
    text = summary([run(name, (50,)) for name in names], [run(name, (1,)) for name in names])
    assert text.count(" token 0: ") == 8
    assert "… and 4 more in run.json" in text


def test_noise_above_the_cap_is_a_warning() -> None:
    text = summary([run("a", (1, 2), shift=2.0)], [run("a", (1, 2))])
    assert "logprobs differ by up to 2, more than rounding explains (0.5)" in text


def test_settings_are_shown_as_read_back() -> None:
    text = summary([run("a", (1,))], [run("a", (1,))])
    assert "[b]bf16[/b]" in text, "a value is no markup"
    lines = [line.split() for line in text.splitlines()]
    assert ["tp", "1", "1"] in lines
    assert ["block_size", "unknown", "unknown"] in lines, "what was not read back is not ok"


def test_simulated_numbers_say_so() -> None:
    candidate, reference = [run("a", (1,))], [run("a", (1,))]
    assert "numbers are simulated" in summary(candidate, reference)
    real = outcome(candidate, reference)
    for side in real.sides.values():
        side.launched = replace(fakes.launched(), simulated=False)
    assert "simulated" not in shown(report(candidate, reference), candidate, reference, outcome=real)


def test_colour_on_a_terminal_only() -> None:
    candidate, reference = [run("a", (50,))], [run("a", (1,))]
    assert "\x1b[" not in summary(candidate, reference)
    assert "\x1b[1;31mdiverged" in summary(candidate, reference, coloured=True)
    assert "\x1b[1;32maligned" in summary(reference, reference, coloured=True)


# ------------------------------------------------------------------------------------------- texts from outside


@pytest.mark.parametrize("coloured", [False, True])
def test_what_a_model_says_is_no_markup(tmp_path: Path, coloured: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({NASTY: 1, "plain": 2}, unk_token="plain"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    candidate, reference = [run("a", (1,))], [run("a", (2,))]
    text = shown(report(candidate, reference), candidate, reference, coloured, info=fakes.info(tmp_path))
    assert f"a candidate says {NASTY!r}" in text
    assert "a reference says 'plain'" in text


def test_random_weights_say_nothing(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    assert terminal.decoder(fakes.info(tmp_path)) is not None
    assert terminal.decoder(fakes.info(tmp_path, name="qwen3")) is None
    assert terminal.decoder(fakes.info(tmp_path / "none")) is None


# --------------------------------------------------------------------------------------- conditions and findings

FINDING = Finding(
    "B", "operator", side="candidate", checkpoint="layers.2.mlp_norm", layer=2, phase="decode",
    evidence={"what": "rms_norm: [/] its result is 1.01 times too large"}, next="read how the candidate calls rms_norm",
)  # fmt: skip


def test_the_headline_is_a_finding() -> None:
    same = [run("a", (1,))]
    text = shown(report(same, same, (FINDING,)), same, same)
    assert "diverged: Path B (operator precision): operator of the candidate at layers.2.mlp_norm in decode" in text
    assert text.count("1.01 times too large") == 1
    assert "next: read how the candidate calls rms_norm" in text


def test_the_next_step_names_where_to_begin_to_read() -> None:
    same = [run("a", (1,))]
    read = {
        "candidate": [{"what": "Impl class", "place": "norm.py:22 forward"}],
        "reference": [{"place": "other.py:1"}],
    }
    found = replace(FINDING, evidence={**FINDING.evidence, "read": read})
    text = shown(report(same, same, (found,)), same, same)
    assert "next: read how the candidate calls rms_norm; begin at norm.py:22 forward\n" in text
    assert "begin at" not in shown(report(same, same, (FINDING,)), same, same)


def test_all_reports_that_were_left_are_named() -> None:
    same = [run("a", (1,))]
    assert "(report.md, result.json)" in shown(report(same, same), same, same)
    text = shown(report(same, same), same, same, reports=("report.md", "report.zh.md"))
    assert "(report.md, report.zh.md, result.json)" in text


def test_further_findings_follow() -> None:
    same = [run("a", (1,))]
    more = replace(FINDING, checkpoint="layers.3.mlp_norm")
    text = shown(report(same, same, (FINDING, *[more] * 7)), same, same)
    assert "(and 7 more findings)" in text
    assert text.count("layers.3.mlp_norm") == 5
    assert "… and 2 more findings in run.json" in text


def test_tokens_that_no_tensor_explains_are_told_as_tokens() -> None:
    lost = Finding("UNLOCATED", "tokens", next="repeat the case with one request at a time")
    candidate, reference = [run("a", (1, 50))], [run("a", (1, 3))]
    text = shown(report(candidate, reference, (lost,)), candidate, reference)
    assert "diverged: lmdeploy and vllm first differ at token 1, in decode, of request a" in text
    assert "UNLOCATED" in text
    assert "next: repeat the case with one request" in text


def condition(name: str, verdict: Any, allowed: bool = False) -> Condition:
    observed = {"candidate": "[b]on[/b]", "reference": None}
    return Condition(name, "off", "the case", observed, {}, verdict, f"why of {name}", "mend", "seed", allowed=allowed)


def test_conditions_that_are_ok_are_counted() -> None:
    same = [run("a", (1,))]
    found = report(same, same)
    found.conditions = (condition("eager", "ok"), condition("warmup", "unknown", allowed=True))
    text = shown(found, same, same)
    assert "conditions: 1 of 2 read back and ok" in text
    assert "eager" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("warmup")]
    assert row.split("  ")[-1].strip() == "why of warmup"
    assert "[b]on[/b]" in row
    assert "not observable" in row
    assert "unknown, allowed" in row
    assert "rests on conditions that do not hold and were allowed: warmup" in text
    assert "read back from the engines" not in text
    assert "why of eager" in shown(found, same, same, verbose=True)


def test_stability_and_bytes_are_stated() -> None:
    same = [run("a", (1,))]
    found = report(same, same)
    found.stability = (Stability("candidate", 1, None, 0.0), Stability("reference", 1, None, None))
    found.bytes = {"candidate": 20_300_000, "reference": 999}
    text = shown(found, same, same)
    assert "the candidate repeats its tokens; run-to-run noise of its logprobs: 0\n" in text
    assert "the reference repeats its tokens; run-to-run noise of its logprobs: not measured" in text
    assert "traces written: candidate 20.3 MB, reference 999 B" in text


def test_a_comparison_wrote_nothing() -> None:
    same = [run("a", (1,))]
    found = report(same, same)
    found.bytes = {"candidate": 999}
    console, out = screen()
    terminal.show_comparison(console, ("lmdeploy", "vllm"), found, True, {})
    assert "traces read: candidate 999 B" in out.getvalue()
    assert "written" not in out.getvalue()


def test_a_verdict_with_patches_and_options_says_so() -> None:
    same = [run("a", (1,))]
    found = report(same, same)
    found.extras = {"candidate": SideExtras({}, ("/p/bigger.py",)), "reference": SideExtras({"block_size": 64})}
    told = "; with a patch on the candidate: bigger.py; an option of the reference: block_size"
    assert terminal.sentence("lmdeploy", "vllm", found).endswith(told)
    assert told in shown(found, same, same)
    assert "; with" not in terminal.sentence("lmdeploy", "vllm", report(same, same))


def test_a_patch_of_the_accused_side_is_named_in_the_next_step() -> None:
    same = [run("a", (1,))]
    weights = Finding("B", "weights", side="reference", next="see how the reference loads w")
    found = report(same, same, (weights,))
    found.extras = {"reference": SideExtras({}, ("/p/row.py",)), "candidate": SideExtras()}
    assert terminal.next_step(found) == "see how the reference loads w; a patch is active on the reference: row.py"
    found.findings = (replace(weights, side="candidate", next="see"),)
    assert terminal.next_step(found) == "see"


def test_one_request_is_one() -> None:
    same = [run("a", (1,))]
    assert "1 greedy token for 1 request" in terminal.sentence("x", "y", report(same, same))
