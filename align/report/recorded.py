"""What a recording of one engine holds, and what to do with it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from align.conditions.check import describe
from align.report.size import size_text
from align.run.alone import Recorded


def show_recorded(
    console: Console, recorded: Recorded, directory: Path, role: str, followed: Path | None = None
) -> None:
    """Checkpoints, rows and bytes, and the next command."""
    noise = recorded.stable.noise
    console.print(
        f"{role}: {len(recorded.checkpoints)} of {recorded.expected} checkpoints recorded, values of "
        f"{recorded.values}; {recorded.rows} rows in {recorded.steps} steps; {size_text(recorded.bytes)}",
        highlight=False,
    )
    console.print(
        f"two runs gave the same {recorded.stable.tokens} tokens"
        + ("" if noise is None else f"; their logprobs differ by up to {noise:.3g}"),
        highlight=False,
    )
    if len(recorded.checkpoints) < recorded.expected:
        console.print(
            f"[yellow]{recorded.expected - len(recorded.checkpoints)} checkpoints were not observable; "
            f"{escape(str(directory / 'engine'))} says why[/yellow]",
            highlight=False,
        )
    for condition in recorded.conditions:
        if condition.blocks:
            text = f"{describe(condition)}; align compare will ask for it. {condition.mend}"
            console.print(text, style="yellow", highlight=False, markup=False)
    path = escape(str(directory))
    console.print(f"trace: {path}", highlight=False, soft_wrap=True)
    if followed is None:
        other = "vllm" if role == "candidate" else "lmdeploy"
        command = f"align capture {other} --case {path}/case.json --along {path} --out OTHER"
    else:
        first, second = (directory, followed) if role == "candidate" else (followed, directory)
        command = f"align compare {first} {second}"
    console.print(f"next: {escape(command) if followed is not None else command}", highlight=False, soft_wrap=True)
