"""``align run``: from options to a verdict and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from align.calibrate.choose import choose_floor
from align.case.build import NewCase, new_case
from align.case.prompts import EncodedPrompt
from align.case.schema import Batch, Case, Decoding, Numerics, explain
from align.checkpoints.table import Structure
from align.cli import ladder
from align.cli.errors import note_next
from align.cli.interview import answers_of, ask_on_terminal, interview, is_terminal
from align.cli.leave import Known
from align.cli.options import (
    budget_bytes,
    case_in,
    check_counts,
    check_patterns,
    check_seconds,
    dtype_of,
    extras_of,
    interpreters_for,
    numerics_of,
    policy_name,
)
from align.cli.screen import screen
from align.cli.settings import RunSettings as RunSettings
from align.conditions import require_names
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.layout import Layout
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.report import prompts, terminal
from align.report.document import language
from align.report.forms import report_names
from align.report.live import LiveProgress
from align.report.steps import expected_steps
from align.result.facts import NO_ANSWERS, Answers
from align.run.confirm import check_accusations
from align.run.directory import CASE, REQUEST, RunDirectory
from align.run.flow import Flow, Wishes, check_recordable
from align.run.judge import coverage_demanded
from align.run.plan import SIMULATED, check_device, check_launchable, generations_along
from align.run.recording import check_lean
from align.run.report import Report
from align.run.request import RunRequest, digests, patch_files
from align.run.routing import routing_mode
from align.run.session import Session
from align.run.side import Limits
from align.walk.transplant import accusation_of
from envs.home import align_home
from envs.profiles import PYTHON_VARIABLES

DEFAULT_MODEL = "qwen3"
REPLAY_MODES = ("auto", "always", "never")


def execute(settings: RunSettings) -> int:
    """Run, print the summary, and return the exit code.

    Raises:
        UserError, EnvError: what must change before the command can succeed.
    """
    if settings.dry:
        return _dry(settings)
    known = known_of(settings)
    failure: UserError | None = None
    try:
        try:
            settings = _against(_asked(settings), known)
            known.answers, known.lang = answers_in(settings), language(settings.lang)
            _run(settings, known)
        except BaseException as error:
            refused = known.directory is None
            if refused and isinstance(error, UserError) and ladder.goes_on_without_target(settings, known, _passes):
                _open(settings, known)
            known.leave_after(error)
            if known.directory is None or not isinstance(error, UserError):
                raise
            failure = error
        climbed(settings, known, failure is not None)
        if failure is not None:
            raise failure
    except BaseException as error:
        if known.directory is not None and not isinstance(error, Exception) and not settings.rung:
            note_next(error, f"align resume {known.directory.path}")
        raise
    finally:
        if settings.json and not settings.rung:
            known.tell()
        if known.directory is not None:
            known.directory.close()
    return EXIT_ALIGNED if known.report.verdict == "aligned" else EXIT_DIVERGED


def climbed(settings: RunSettings, known: Known, failed: bool = False) -> None:
    """Walk the ladder, where the run asks for it; the result in the directory is the whole then."""
    if known.result is None or known.case is None or known.info is None or known.directory is None:
        return
    if ladder.wanted(settings, known.case, known.result, failed):
        console = screen(settings.quiet, settings.json)
        known.result = ladder.climb(settings, known, console, execute)


def _passes(settings: RunSettings, case: Case) -> bool:
    """Whether a rung would be run at all."""
    again = replace(settings, case=case, case_file=None, ladder="never", only=())
    try:
        check(again, known_of(again), screen(True))
    except UserError:
        return False
    return True


def _against(settings: RunSettings, known: Known) -> RunSettings:
    """``--against``: the case becomes that of one engine against itself."""
    if not settings.against:
        return settings
    info, made = _asked_case(settings, screen(settings.quiet or settings.rung, settings.json))
    return ladder.against(settings, info, made.case, answers_in(settings))


def known_of(settings: RunSettings) -> Known:
    """What is known before anything was asked or looked at."""
    known = Known(settings.device, NO_ANSWERS, "en", settings.tensors, command_of(settings))
    known.earlier, known.followed = Path(settings.earlier) if settings.earlier else None, settings.along
    return known


def _dry(settings: RunSettings) -> int:
    """``--dry-run``: what would be done, and what it takes.

    Raises:
        UserError: what a run would refuse, too.
    """
    from align.cli.dry import show

    console = screen(settings.quiet, settings.json)
    settings = _against(settings, known_of(settings))
    found = check(settings, known_of(settings), console)
    prompts.show_prompts(console, found.made.prompts, settings.verbose)
    return show(console, found.made.case, found.info, found.structure, found.wishes)


@dataclass(frozen=True)
class Checked:
    """What the options of a run ask for, after everything that can be refused without engines was.

    Attributes:
        structure: the checkpoints that are recorded; ``None`` if no tensors are compared.
    """

    wishes: Wishes
    info: ModelInfo
    made: NewCase
    structure: Structure | None


def check(settings: RunSettings, known: Known, console: Console) -> Checked:
    """Refuse what the engines need not be started for. Nothing is written, so that a refusal leaves all as it was.

    Args:
        known: gets what is known, in case of a refusal too.

    Raises:
        UserError: what must change before the run can succeed.
    """
    check_seconds(launch_timeout=settings.launch_timeout, step_timeout=settings.step_timeout)
    wishes = _wishes(settings)
    known.extras = extras_of(settings.sets, settings.patches)
    info, made = _asked_case(settings, console)
    case = made.case
    known.case, known.info = case, info
    ladder.check(settings, case, info)
    check_launchable(case)
    check_device(case, info, settings.device)
    choose_floor(settings.floor, {"dtype": case.dtype})  # that there is one is said before the engines start
    structure = check_recordable(info, case.layout.tp) if wishes.tensors else None
    if structure is not None:
        check_patterns(wishes.values, structure)
    check_accusations(wishes.accusations, structure)
    check_lean(wishes.lean and wishes.tensors, case.layout.tp)
    return Checked(wishes, info, made, structure)


def _asked_case(settings: RunSettings, console: Console) -> tuple[ModelInfo, NewCase]:
    """The case, with the requests that are wanted of it."""
    settings = ladder.with_target(settings)
    numerics = numerics_of(settings.numerics, settings.device)
    info, made = _case(settings, numerics, lambda line: console.print(line, highlight=False))
    if settings.only:
        case = made.case.only(settings.only)
        made = NewCase(case, tuple(prompt for prompt in made.prompts if prompt.name in settings.only))
    return info, made


def command_of(settings: RunSettings) -> tuple[str, ...]:
    """The command as it was typed."""
    return tuple(sys.argv) if settings.command is None else settings.command


def answers_in(settings: RunSettings) -> Answers:
    """What the user said besides the options that make a case.

    Raises:
        UserError: an answer that is none.
    """
    case_given = settings.case_file is not None
    model, layout = settings.named or (
        settings.model is not None or case_given,
        any(size is not None for size in settings.layout) or case_given,
    )
    return answers_of(vars(settings), model, layout)


def _asked(settings: RunSettings) -> RunSettings:
    """With what ``--interactive`` asks for."""
    if not settings.interactive:
        return settings
    given = {**asdict(settings), "tp": settings.layout[0]}
    return _answered(settings, interview(given, settings.case_file is not None, ask_on_terminal, is_terminal()))


def _run(settings: RunSettings, known: Known) -> Report:
    """The same; ``known`` is filled on the way, and written once there is a verdict."""
    console = screen(settings.quiet, settings.json)
    found = check(settings, known, console)  # what is refused here leaves no directory, and changes none
    wishes, info, made, case, extras = found.wishes, found.info, found.made, found.made.case, known.extras
    interpreters = interpreters_for(case, settings.device, extras)
    if settings.device == SIMULATED:
        for variable in PYTHON_VARIABLES.values():
            if os.environ.get(variable):
                console.print(f"[yellow]{variable} is not used on the simulated NPU; add DEVICE=ascend[/yellow]")
    directory = _open(settings, known)
    if not settings.rung:
        prompts.show_prompts(console, made.prompts, settings.verbose)
    limits = Limits(launch=settings.launch_timeout, step=settings.step_timeout)
    engines = {role: interpreter.engine for role, interpreter in interpreters.items()}
    with LiveProgress(console, engines, settings.quiet, expected_steps(case)) as watcher:
        session = Session(
            case, info, interpreters, directory.path, limits, watcher, extras, audit=settings.audit, fa=settings.fa
        )
        flow = Flow(session, case, info, wishes, known.keep_tokens)
        known.outcome, known.report = session.outcome, flow.report
        report = flow.run()
    next_step = terminal.next_step(report, "CASE=RUN/case.json")
    paired = known.leave(next_step).paired
    if settings.rung or (settings.quiet and settings.json):
        return report
    if settings.quiet:
        simulated = settings.device == SIMULATED
        terminal.say_in_short(report, (case.candidate, case.reference), simulated, directory.path, next_step, paired)
    else:
        names = report_names(known.lang)
        terminal.show_summary(
            console, case, info, session.outcome, report, directory.path, settings.verbose, names, paired
        )
    return report


def _open(settings: RunSettings, known: Known) -> RunDirectory:
    """The run's directory, with its case and what it was asked for.

    Raises:
        UserError: it holds something, or cannot be written.
    """
    assert known.case is not None and known.info is not None, "check() comes first"
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", known.info.name)
    directory = settings.reopened or RunDirectory(settings.out, align_home() / "runs", label)
    if settings.reopened is not None:
        directory.clear((CASE, REQUEST, ladder.LADDER))
    known.directory = directory
    directory.write(CASE, known.case.to_text())
    directory.write(REQUEST, _request(settings, known.info, known).to_text())
    return directory


# --------------------------------------------------------------------------------------------------- from options


def _answered(settings: RunSettings, found: Mapping[str, str]) -> RunSettings:
    """With what was answered on the terminal."""
    plain: dict[str, Any] = dict(found)
    size = plain.pop("tp", None)
    if size is not None:
        if not size.isdecimal():
            raise UserError(f"{size} is no tensor-parallel size", "answer with a number, for example 2")
        plain["layout"] = (int(size), *settings.layout[1:])
    return replace(settings, **plain)


def _wishes(settings: RunSettings) -> Wishes:
    if settings.replay not in REPLAY_MODES:
        raise UserError(f"--replay {settings.replay} is not known", f"choose one of {', '.join(REPLAY_MODES)}")
    if settings.tensors and settings.replay == "never":
        raise UserError("tensors are recorded during the replay, so it cannot be left out", "add --no-tensors")
    require_names(settings.allow)
    return Wishes(
        tensors=settings.tensors,
        replay=settings.replay,
        policy=policy_name(settings.policy),
        floor=settings.floor,
        allow=settings.allow,
        values=settings.capture,
        budget=budget_bytes(settings.values_budget),
        min_coverage=coverage_demanded(settings.min_coverage),
        along=None if settings.along is None else generations_along(settings.along),
        confirm=settings.confirm,
        accusations=tuple(map(accusation_of, settings.accuse)),
        lean=settings.lean,
        fresh=settings.fresh,
        routing=routing_mode(settings.routing),
    )


def _request(settings: RunSettings, info: ModelInfo, known: Known) -> RunRequest:
    """What ``align resume`` needs besides the case."""
    patches = tuple(f"{role}={file}" for role, extras in known.extras.items() for file in extras.patches)
    given = {name: value for name, value in vars(settings).items() if name in RunRequest.model_fields}
    decided = {
        "command": tuple(known.argv),
        "fingerprint": info.fingerprint,
        "patches": patches,
        "patch_sha256": digests(patch_files(patches)),
        "named_model": known.answers.model,
        "named_layout": known.answers.layout,
        "along": None if settings.along is None else dict(settings.along),
    }
    return RunRequest.model_validate(given | decided)


def _case(settings: RunSettings, numerics: Numerics, say: Callable[[str], None]) -> tuple[ModelInfo, NewCase]:
    if settings.case is not None:
        return _given_case(settings.case, say)
    if settings.case_file is not None:
        given = {
            "--model": settings.model,
            "--prompts": settings.prompts,
            "--dtype": settings.dtype,
            "--tp": settings.layout[0],
            "--dp": settings.layout[1],
            "--ep": settings.layout[2],
            "--max-new-tokens": settings.max_new_tokens,
            "--block-size": settings.block_size,
            "--numerics": settings.numerics or None,
        }
        clashing = [name for name, value in given.items() if value is not None]
        if clashing:
            raise UserError(
                f"--case already decides what {', '.join(clashing)} would",
                f"leave {'them' if len(clashing) > 1 else 'it'} out, or edit a copy of {settings.case_file}",
            )
        return _given_case(case_in(settings.case_file), say)
    info = resolve_model(DEFAULT_MODEL if settings.model is None else settings.model, say)
    try:
        layout = Layout(*(1 if value is None else value for value in settings.layout))
    except ValueError as error:
        raise UserError(str(error), "correct --tp, --dp or --ep") from None
    check_counts(max_new_tokens=settings.max_new_tokens, block_size=settings.block_size)
    extra: dict[str, Any] = {} if settings.dtype is None else {"dtype": dtype_of(settings.dtype)}
    try:
        decoding = None if settings.max_new_tokens is None else Decoding(max_new_tokens=settings.max_new_tokens)
        batch = None if settings.block_size is None else Batch(block_size=settings.block_size)
    except ValidationError as error:
        raise explain(error, "the command line") from None
    made = new_case(
        info, prompts_file=settings.prompts, layout=layout, decoding=decoding, batch=batch, numerics=numerics, **extra
    )
    return info, made


def _given_case(case: Case, say: Callable[[str], None]) -> tuple[ModelInfo, NewCase]:
    info = resolve_model(case.model, say)
    case.check(info)
    prompts = tuple(
        EncodedPrompt(
            name=request.name, token_ids=request.token_ids, source="case", rendered=request.text,
            arrival=request.arrival, dp_rank=request.dp_rank,
        )
        for request in case.requests
    )  # fmt: skip
    return info, NewCase(case, prompts)
