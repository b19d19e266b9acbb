"""``align resume`` and ``align replay``: an earlier run, taken up or repeated as it was asked for."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.base import SIDES
from align.case.schema import load_case
from align.cli import ladder, run
from align.cli.errors import note_next
from align.cli.leave import Known
from align.cli.options import extras_of, policy_name
from align.cli.paired import generated
from align.cli.screen import Screen, screen
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.models.resolve import resolve_model
from align.report import terminal
from align.report.forms import report_names
from align.report.read import read_result
from align.result.schema import SCHEMA_VERSION
from align.run.directory import CASE, REQUEST, RESULT, RunDirectory
from align.run.earlier import earlier_run, last_run, newest_run, note_refusal
from align.run.request import RunRequest, load_request
from align.run.resume import Judged, judge_traces, verdict_on_disk, whole_traces
from envs.errors import EnvError


@dataclass(frozen=True)
class ResumeSettings:
    """The options of ``align resume``."""

    run: Path | None
    json: bool
    quiet: bool
    verbose: bool


@dataclass(frozen=True)
class ReplaySettings:
    """The options of ``align replay``; what is empty is as in the earlier run."""

    run: Path | None
    along: str
    out: Path | None
    sets: tuple[str, ...]
    patches: tuple[str, ...]
    allow: tuple[str, ...]
    capture: tuple[str, ...]
    values_budget: int | None
    json: bool
    quiet: bool
    verbose: bool


class RefusedError(UserError):
    """A run cannot go on, for a reason that another try would meet again. Nothing in its directory was changed."""


def resume(settings: ResumeSettings) -> int:
    """Go on with a run, and return the exit code.

    Raises:
        UserError: there is no such run, it is in use, or what it was made of has changed.
    """
    console = screen(settings.quiet, settings.json)
    if settings.run is not None:
        return _take_up(settings.run.absolute(), settings, console)
    refused: list[Path] = []
    while True:
        path = last_run(but=refused)
        try:
            return _take_up(path, settings, console)
        except RefusedError as error:
            console.say(f"{path.name} cannot go on: {error.message}")
            refused.append(path)


def _take_up(path: Path, settings: ResumeSettings, console: Screen) -> int:
    """One run.

    Raises:
        RefusedError: it would be refused whenever it is tried.
        UserError: it is in use, or something else stops it.
    """
    if not (path / REQUEST).is_file() or not (path / CASE).is_file():
        load_request(path)  # says what is missing
    earlier = earlier_run(path)
    if settings.run is not None and earlier.state == "refused":
        console.say(f"{path} was refused: {earlier.reason}; it is tried once more")
    with contextlib.closing(RunDirectory.reopen(path)) as directory:
        ended = verdict_on_disk(path / RESULT)
        if ended is not None and (taken := _climb(path, settings, directory, console)) is not None:
            return taken
        if ended is not None:
            console.say(f"{path} has ended: {ended['verdict']}")
            if ended.get("schema_version") != SCHEMA_VERSION:
                console.say(f"it was written by another version of align: its {RESULT} has another format")
            console.say(f"next: read {path / 'report.md'}; or run the case again: align run --case {path / CASE}")
            if settings.json:
                sys.stdout.write((path / RESULT).read_text(encoding="utf-8"))
            return _exit_code(ended["verdict"])
        try:
            request, again = _checked(path, settings, console)
        except EnvError:  # of this machine, not of the run
            raise
        except UserError as error:
            note_refusal(directory, error)
            raise RefusedError(error.message, error.hint) from error
        if settings.run is None:
            reason = f": {earlier.reason}" if earlier.reason else ""
            console.say(f"the newest run that can go on is {path} ({earlier.state}{reason})")
        traces, why = whole_traces(path) if request.tensors else ({}, "tokens are generated again")
        if traces:
            console.say(f"both recordings of {path} are whole: they are judged without the engines")
            try:
                judged, why = judge_traces(
                    traces,
                    request.allow,
                    policy_name(request.policy),
                    request.min_coverage,
                    lambda where: None,
                    request.floor,
                )
                if judged is not None:
                    return _finish(replace(again, reopened=directory), judged, console)
            except (KeyboardInterrupt, SystemExit) as error:
                note_next(error, f"align resume {path}")
                raise
        console.say(f"the engines of {path} are started again: {why}")
        return run.execute(replace(again, reopened=directory))


def _climb(path: Path, settings: ResumeSettings, directory: RunDirectory, console: Screen) -> int | None:
    """Go on with the ladder of a run that has its verdict; ``None`` if there is nothing to go on with."""
    again = replace(settings_of(load_request(path), path, settings), reopened=directory)
    assert again.case_file is not None
    known = run.known_of(again)
    known.answers, known.lang, known.directory = run.answers_in(again), again.lang, directory
    known.case = load_case(again.case_file)
    try:
        known.result = read_result(path / RESULT)
        if not ladder.pending(again, known.case, known.result):
            return None
        known.info = resolve_model(known.case.model, lambda line: None)
    except UserError:  # of another version, or the model is gone: the verdict is all that can be said
        return None
    console.say(f"{path} has its verdict, {known.result.verdict}; the ladder goes on")
    try:
        run.climbed(again, known)
    except (KeyboardInterrupt, SystemExit) as error:
        note_next(error, f"align resume {path}")
        raise
    if settings.json:
        known.tell()
    return _exit_code(known.result.verdict)


def _checked(path: Path, settings: ResumeSettings, console: Screen) -> tuple[RunRequest, run.RunSettings]:
    """What the run was asked for, if it can still be done. Nothing is changed.

    Raises:
        UserError: it cannot: request, case, model, patches or options are not what a run can be made of.
    """
    request = load_request(path)
    request.check_patches()
    again = settings_of(request, path, settings)
    info = run.check(again, run.known_of(again), console).info
    if info.fingerprint != request.fingerprint:
        raise UserError(
            f"the model {info.name} is not what it was when the run began",
            f"start a new run: align run --case {path / CASE}",
        )
    return request, again


def _finish(settings: run.RunSettings, judged: Judged, console: Screen) -> int:
    """Leave what the run would have left, from its recordings."""
    directory = settings.reopened
    assert directory is not None and settings.case_file is not None
    known = run.known_of(settings)
    known.answers, known.lang = run.answers_in(settings), settings.lang
    known.directory, known.outcome, known.report = directory, judged.outcome, judged.report
    known.extras = extras_of(settings.sets, settings.patches)
    known.case = load_case(settings.case_file)
    known.info = resolve_model(known.case.model, lambda line: None)
    try:
        if judged.error is not None:
            known.leave_after(judged.error)
            raise judged.error
        _show(settings, judged, known, console)
        run.climbed(settings, known)
    finally:
        if settings.json:
            known.tell()
    return _exit_code(judged.report.verdict)


def _show(settings: run.RunSettings, judged: Judged, known: Known, console: Screen) -> None:
    """What was left is the summary of the run."""
    assert judged.compared is not None and settings.reopened is not None
    compared, directory = judged.compared, settings.reopened
    next_step = terminal.next_step(judged.report, f"CASE={settings.case_file}")
    paired = known.leave(next_step).paired
    if settings.quiet and not settings.json:
        terminal.say_in_short(judged.report, compared.engines, compared.simulated, directory.path, next_step, paired)
    elif not settings.quiet:
        terminal.show_comparison(
            console, compared.engines, judged.report, compared.simulated, compared.generated, settings.verbose, paired
        )
        console.say(f"run directory: {directory.path} ({', '.join((*report_names(known.lang), RESULT))})")


def _exit_code(verdict: str) -> int:
    return EXIT_ALIGNED if verdict == "aligned" else EXIT_DIVERGED


def settings_of(request: RunRequest, path: Path, asked: ResumeSettings | ReplaySettings) -> run.RunSettings:
    """The options of the run as it was asked for."""
    return run.RunSettings(
        model=None,
        prompts=None,
        case_file=path / CASE,
        device=request.device,
        dtype=None,
        layout=(None, None, None),
        max_new_tokens=None,
        block_size=None,
        numerics=(),
        sets=request.sets,
        patches=request.patches,
        allow=request.allow,
        policy=request.policy,
        floor=request.floor,
        min_coverage=request.min_coverage,
        tensors=request.tensors,
        capture=request.capture,
        values_budget=request.values_budget,
        replay=request.replay,
        out=None,
        launch_timeout=request.launch_timeout,
        step_timeout=request.step_timeout,
        quiet=asked.quiet,
        verbose=asked.verbose,
        symptom=request.symptom,
        onset=request.onset,
        batching=request.batching,
        stage=request.stage,
        baseline=request.baseline,
        lang=request.lang,
        json=asked.json,
        command=request.command,
        named=(request.named_model, request.named_layout),
        along=request.along,
        earlier=request.earlier,
        confirm=request.confirm,
        accuse=request.accuse,
        lean=request.lean,
        audit=request.audit,
        fa=request.fa,
        fresh=request.fresh,
        routing=request.routing,
        ladder=request.ladder,
        layouts=request.layouts,
        min_tp=request.min_tp,
        device_memory=request.device_memory,
    )


def replay(settings: ReplaySettings) -> int:
    """Repeat a run along the tokens that one of its sides generated, and return the exit code.

    Raises:
        UserError: there is no such run, or it left no tokens.
    """
    path = (settings.run or newest_run()).absolute()
    if settings.along not in SIDES:
        raise UserError(f"--along {settings.along} is no side", f"choose one of {', '.join(SIDES)}")
    request = load_request(path)
    base = settings_of(request, path, settings)
    return run.execute(
        replace(
            base,
            out=settings.out,
            sets=(*request.sets, *settings.sets),
            patches=(*request.patches, *settings.patches),
            allow=(*request.allow, *settings.allow),
            capture=settings.capture or request.capture,
            values_budget=request.values_budget if settings.values_budget is None else settings.values_budget,
            tensors=True,
            replay="auto",
            command=None,
            along=generated(path, settings.along),
            earlier=str(path),
            ladder="never",
        )
    )
