"""``align compare``: two recordings, judged as the run that made them judged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from adapters.base import SIDES
from align.checklists.evaluate import with_checklists
from align.cli.errors import reason_of
from align.cli.leave import text_of
from align.cli.options import policy_name
from align.cli.screen import screen
from align.conditions import require_names
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED
from align.report import terminal
from align.result.build import Command, result_of
from align.result.ground import ground_of_manifests
from align.run.directory import disk_error
from align.run.judge import coverage_demanded
from align.run.offline import Offline
from align.run.record import report_record
from align.run.traces import sides_of


@dataclass(frozen=True)
class CompareSettings:
    """The options of ``align compare``."""

    candidate: Path
    reference: Path | None
    policy: str
    floor: str
    min_coverage: float
    allow: tuple[str, ...]
    out: Path | None
    json: bool
    quiet: bool
    verbose: bool


def execute(settings: CompareSettings) -> int:
    """Compare, print the summary, and return the exit code.

    Raises:
        UserError: what must change before the recordings can be compared.
    """
    console = screen(settings.quiet, settings.json)
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    paths = {SIDES[0]: settings.candidate}
    offline = Offline((), "derived")  # all that is known if the options themselves are refused
    status = console.status("comparing") if console.is_terminal and not settings.quiet else contextlib.nullcontext()
    try:
        paths = dict(zip(SIDES, sides_of(settings.candidate, settings.reference), strict=True))
        require_names(settings.allow)
        offline = Offline(
            settings.allow, policy_name(settings.policy), coverage_demanded(settings.min_coverage), settings.floor
        )
        with status as shown:
            progress = (lambda where: shown.update(f"comparing {where}")) if shown is not None else None
            compared = offline.run(paths, progress)
    except BaseException as error:
        reason, hint = reason_of(error)
        offline.report.reason = offline.report.reason or reason
        try:
            _leave(settings, offline, paths, started, hint)
        except Exception as second:  # the first error stays the news
            error.add_note(f"what is known could not be written: {second}")
        raise
    _leave(settings, offline, paths, started, terminal.next_step(compared.report))
    if not settings.quiet:
        terminal.show_comparison(
            console, compared.engines, compared.report, compared.simulated, compared.generated, settings.verbose
        )
    elif not settings.json:
        for remark in compared.report.remarks:
            sys.stderr.write(f"warning: {remark}\n")
        simulated = " (simulated)" if compared.simulated else ""
        print(f"{compared.report.verdict}{simulated}: {terminal.sentence(*compared.engines, compared.report)}")
    return EXIT_ALIGNED if compared.report.verdict == "aligned" else EXIT_DIVERGED


def _leave(
    settings: CompareSettings, offline: Offline, paths: Mapping[str, Path], started: str, next_step: str
) -> None:
    """The result, with all of the comparison as its details, wherever it is asked for.

    Raises:
        UserError: the file cannot be written; what was asked for on standard output is there.
    """
    if settings.out is None and not settings.json:
        return
    report = offline.report
    whole = report_record(report)
    result = result_of(
        report,
        ground_of_manifests(offline.manifests),
        Command(sys.argv, started, next=next_step, traces={role: str(path) for role, path in paths.items()}),
        details={name: whole[name] for name in ("comparisons", "tensors")},
    )
    text = text_of(with_checklists(result))
    try:
        if settings.out is not None:
            _write(settings.out, text)
    finally:
        if settings.json:
            sys.stdout.write(text)
            sys.stdout.flush()


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        raise disk_error(error, file) from error
