"""The prompts before a run, with the exact ids that both engines will get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from align.case.prompts import EncodedPrompt

_SHOWN_IDS = 12
#: Characters of a text's beginning and of its end: there stands what makes the model answer.
_SHOWN_TEXT, _SHOWN_END = 80, 40


def ids_text(ids: Sequence[int], limit: int = _SHOWN_IDS) -> str:
    """Ids as text, the middle left out where there are many."""
    if len(ids) <= limit:
        return " ".join(map(str, ids))
    head, tail = limit - limit // 3, limit // 3
    return f"{' '.join(map(str, ids[:head]))} … {' '.join(map(str, ids[len(ids) - tail :]))}"


def _special(prompt: EncodedPrompt) -> list[str]:
    """Each special token once, with its id and how often it is there."""
    counts = Counter((token.token, token.token_id) for token in prompt.special)
    return [f"{token}={number}" + (f" ×{count}" if count > 1 else "") for (token, number), count in counts.items()]


def _both_ends(text: str) -> str:
    """A text as Python writes it, the middle left out where it is long."""
    if len(text) <= _SHOWN_TEXT + _SHOWN_END:
        return repr(text)
    return f"{text[:_SHOWN_TEXT]!r} … {text[-_SHOWN_END:]!r}"


def show_prompts(console: Console, prompts: Sequence[EncodedPrompt], verbose: bool) -> None:
    """Each prompt with its exact ids, its special tokens, and what looks wrong about it."""
    table = Table(title="prompts", title_justify="left", box=None, pad_edge=False)
    for column in ("request", "from", "tokens", "ids", "special"):
        table.add_column(column, justify="right" if column == "tokens" else "left", overflow="fold")
    for prompt in prompts:
        special = " ".join(_special(prompt)) or "-"
        ids = ids_text(prompt.token_ids, len(prompt.token_ids) if verbose else _SHOWN_IDS)
        table.add_row(prompt.name, prompt.source, str(len(prompt.token_ids)), ids, escape(special))
    console.print(table)
    for prompt in prompts:
        if prompt.rendered is not None and (verbose or prompt.source in ("text", "messages")):
            text = repr(prompt.rendered) if verbose else _both_ends(prompt.rendered)
            console.print(f"  {prompt.name} as the model reads it: {escape(text)}", highlight=False)
        for warning in prompt.warnings:
            console.print(f"[yellow]  {prompt.name}: {escape(warning)}[/yellow]", highlight=False)
    console.print()
