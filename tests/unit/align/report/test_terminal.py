"""What the summary says: verdicts, differences, conditions, and texts that look like markup."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, models

from adapters.base import Generation, Observation, TokenStep
from align.case.prompts import EncodedPrompt
from align.case.schema import CaseRequest
from align.case.tokenizer import SpecialToken
from align.compare.noise import NoisePolicy
from align.compare.tokens import TokenComparison, compare_tokens
from align.report import terminal
from align.run.session import Outcome, SideOutcome
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


def summary(
    candidate: list[Generation], reference: list[Generation], coloured: bool = False, **more: TokenComparison
) -> str:
    console, out = screen(coloured)
    comparisons = {"free": compare(candidate, reference), **more}
    verdict = comparisons.get("replay", comparisons["free"]).verdict
    case = fakes.case(*(CaseRequest(name=g.request, token_ids=(1,)) for g in candidate))
    terminal.show_summary(
        console, case, fakes.info(), outcome(candidate, reference), comparisons, verdict, Path("/runs/[1]")
    )
    return out.getvalue()


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
    assert "a token 2: candidate 4, reference 3 (near-tie: margins 0.02 and 0.01 are within the noise 0.05)" in text
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
    console, out = screen()
    real = outcome(candidate, reference)
    for side in real.sides.values():
        side.launched = replace(fakes.launched(), simulated=False)
    comparisons = {"free": compare(candidate, reference)}
    terminal.show_summary(console, fakes.case(), fakes.info(), real, comparisons, "aligned", Path("/r"))
    assert "simulated" not in out.getvalue()


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
    console, out = screen(coloured)
    candidate, reference = [run("a", (1,))], [run("a", (2,))]
    comparisons = {"free": compare(candidate, reference)}
    terminal.show_summary(
        console, fakes.case(), fakes.info(tmp_path), outcome(candidate, reference), comparisons, "diverged", Path("/r")
    )
    assert f"a candidate says {NASTY!r}" in out.getvalue()
    assert "a reference says 'plain'" in out.getvalue()


def test_random_weights_say_nothing(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    assert terminal.decoder(fakes.info(tmp_path)) is not None
    assert terminal.decoder(fakes.info(tmp_path, name="qwen3")) is None
    assert terminal.decoder(fakes.info(tmp_path / "none")) is None


def prompt(**changes: Any) -> EncodedPrompt:
    base = EncodedPrompt(
        "r0", (1, 2, 3), "text", NASTY, (SpecialToken(0, 1, "[BOS]", "template"),), ("double BOS [1] [1]",)
    )
    return replace(base, **changes)


@pytest.mark.parametrize("coloured", [False, True])
def test_prompts_are_shown_as_they_are(coloured: bool) -> None:
    console, out = screen(coloured)
    terminal.show_prompts(console, [prompt(), prompt(name="r1", source="case", special=(), warnings=())], verbose=False)
    text = out.getvalue()
    assert f"r0 as the model reads it: {NASTY!r}" in text
    assert "[BOS]=1" in text
    assert "r0: double BOS [1] [1]" in text
    assert "r1 as the model reads it" not in text, "a case's text is for verbose readers"


def test_long_prompts_are_cut_unless_verbose() -> None:
    long = prompt(rendered="word " * 60, token_ids=tuple(range(100, 140)))
    for verbose in (False, True):
        console, out = screen()
        terminal.show_prompts(console, [long], verbose)
        joined = " ".join(out.getvalue().split())
        assert ("…" in joined) is not verbose
        assert all(str(token) in joined for token in range(100, 140)) is verbose
        assert "40" in joined


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(2, 20))
def test_ids_keep_both_ends(ids: list[int], limit: int) -> None:
    words = terminal.ids_text(ids, limit).split()
    if len(ids) <= limit:
        assert words == [str(token) for token in ids]
    else:
        at = words.index("…")
        assert len(words) == limit + 1
        assert words[:at] == [str(token) for token in ids[:at]]
        assert words[at + 1 :] == [str(token) for token in ids[at - limit :]][: limit - at]
