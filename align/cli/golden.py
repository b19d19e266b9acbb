"""``align golden``: who of the two sides is nearer to the truth."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from align.cli.output import print_json
from align.cli.screen import screen
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED
from align.golden.flow import run_golden
from align.report.golden import golden_sentence, show_golden
from align.result.plain import plain


@dataclass(frozen=True)
class GoldenSettings:
    """The options of ``align golden``."""

    run: Path
    json: bool
    quiet: bool
    verbose: bool


def execute(settings: GoldenSettings) -> int:
    """Record golden if need be, compare, print, and return the exit code.

    Raises:
        UserError: the run has no traces, or golden does not fit into memory.
    """
    console = screen(settings.quiet, settings.json)
    status = console.status("golden") if console.is_terminal and not settings.quiet else contextlib.nullcontext()
    with status as shown:

        def say(line: str) -> None:
            if shown is not None:
                shown.update(line)
            else:
                console.print(f"golden: {line}", highlight=False, markup=False)

        def progress(done: int, total: int, name: str) -> None:
            if shown is not None:
                shown.update(f"comparing {done}/{total} {name}")

        found = run_golden(settings.run.absolute(), say, progress)
    if settings.json:
        print_json(plain(found.to_dict()))
    if settings.quiet and not settings.json:
        print(golden_sentence(found))
    show_golden(console, found, settings.verbose)
    return EXIT_ALIGNED if found.comparison.first is None else EXIT_DIVERGED
