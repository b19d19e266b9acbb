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
    console.print(f"trace: {escape(str(directory))}", highlight=False, soft_wrap=True)
    console.print(f"next: {escape(next_command(directory, role, followed))}", highlight=False, soft_wrap=True)


def next_command(directory: Path, role: str, followed: Path | None) -> str:
    """What to run now: record the other side along this one, or compare with the one that was followed."""
    if followed is None:
        other = "vllm" if role == "candidate" else "lmdeploy"
        return f"align capture {other} --case {directory}/case.json --along {directory} --out OTHER"
    first, second = (directory, followed) if role == "candidate" else (followed, directory)
    return f"align compare {first} {second}"
