"""The prompts as they are shown before a run, also those that look like markup."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from align.case.prompts import EncodedPrompt
from align.case.tokenizer import SpecialToken
from align.report import prompts

NASTY = "[red]x[/red] [/] :smile: [link=file:///etc]y[/link] \\[bold] back\\"


def screen(coloured: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, force_terminal=coloured, color_system="truecolor" if coloured else None,
                   emoji=False), out  # fmt: skip


def prompt(**changes: Any) -> EncodedPrompt:
    base = EncodedPrompt(
        "r0", (1, 2, 3), "text", NASTY, (SpecialToken(0, 1, "[BOS]", "template"),), ("double BOS [1] [1]",)
    )
    return replace(base, **changes)


@pytest.mark.parametrize("coloured", [False, True])
def test_prompts_are_shown_as_they_are(coloured: bool) -> None:
    console, out = screen(coloured)
    prompts.show_prompts(console, [prompt(), prompt(name="r1", source="case", special=(), warnings=())], verbose=False)
    text = out.getvalue()
    assert f"r0 as the model reads it: {NASTY!r}" in text
    assert "[BOS]=1" in text
    assert "r0: double BOS [1] [1]" in text
    assert "r1 as the model reads it" not in text, "a case's text is for verbose readers"


def test_long_prompts_are_cut_unless_verbose() -> None:
    long = prompt(rendered="word " * 60, token_ids=tuple(range(100, 140)))
    for verbose in (False, True):
        console, out = screen()
        prompts.show_prompts(console, [long], verbose)
        joined = " ".join(out.getvalue().split())
        assert ("…" in joined) is not verbose
        assert all(str(token) in joined for token in range(100, 140)) is verbose
        assert "40" in joined


def test_a_special_token_is_counted_and_the_end_of_a_text_is_shown() -> None:
    token, other = SpecialToken(0, 1, "<s>", "template"), SpecialToken(2, 2, "</s>", "template")
    rendered = "<s>user " + "word " * 60 + "</s><s>assistant\n"
    console, out = screen()
    prompts.show_prompts(console, [prompt(special=(token, other, token, token), rendered=rendered)], verbose=False)
    text = out.getvalue()
    assert "<s>=1 ×3 </s>=2" in " ".join(text.split())
    assert text.count("<s>=1") == 1
    assert "'<s>user word" in text
    assert "</s><s>assistant\\n'" in text, "where the model begins to answer"
    assert " … " in text


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(2, 20))
def test_ids_keep_both_ends(ids: list[int], limit: int) -> None:
    words = prompts.ids_text(ids, limit).split()
    if len(ids) <= limit:
        assert words == [str(token) for token in ids]
    else:
        at = words.index("…")
        assert len(words) == limit + 1
        assert words[:at] == [str(token) for token in ids[:at]]
        assert words[at + 1 :] == [str(token) for token in ids[at - limit :]][: limit - at]
