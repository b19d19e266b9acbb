"""``align run``: from options to a verdict and an exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from align.case.build import NewCase, new_case
from align.case.prompts import EncodedPrompt
from align.case.schema import Batch, Decoding, Numerics, explain, load_case
from align.cli.interview import answers_of, ask_on_terminal, interview, is_terminal
from align.cli.leave import Known
from align.cli.options import (
    budget_bytes,
    check_patterns,
    check_seconds,
    extras_of,
    interpreters_for,
    numerics_of,
    policy_name,
)
from align.conditions import require_names
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.layout import Layout
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.report import prompts, terminal
from align.report.document import language
from align.report.live import LiveProgress
from align.run.directory import RunDirectory
from align.run.flow import Flow, Wishes, check_recordable
from align.run.judge import coverage_demanded
from align.run.plan import SIMULATED, check_device, check_launchable
from align.run.report import Report
from align.run.session import Session
from align.run.side import Limits
from envs.home import align_home
from envs.profiles import PYTHON_VARIABLES

DEFAULT_MODEL = "qwen3"
REPLAY_MODES = ("auto", "always", "never")


@dataclass(frozen=True)
class RunSettings:
    """The options of ``align run``; ``None`` means not given."""

    model: str | None
    prompts: Path | None
    case_file: Path | None
    device: str
    dtype: str | None
    layout: tuple[int | None, int | None, int | None]
    max_new_tokens: int | None
    block_size: int | None
    numerics: tuple[str, ...]
    sets: tuple[str, ...]
    patches: tuple[str, ...]
    allow: tuple[str, ...]
    policy: str
    min_coverage: float
    tensors: bool
    capture: tuple[str, ...]
    values_budget: int | None
    replay: str
    out: Path | None
    launch_timeout: float
    step_timeout: float
    quiet: bool
    verbose: bool
    symptom: str | None = None
    onset: str | None = None
    batching: str | None = None
    stage: str | None = None
    baseline: str | None = None
    interactive: bool = False
    lang: str = "en"
    json: bool = False


def execute(settings: RunSettings) -> int:
    """Run, print the summary, and return the exit code.

    Raises:
        UserError, EnvError: what must change before the command can succeed.
    """
    lang = language(settings.lang)
    if settings.interactive:
        given = asdict(settings)
        found = interview(
            given | {"tp": settings.layout[0]}, settings.case_file is not None, ask_on_terminal, is_terminal()
        )
        settings = _answered(settings, found)
    model, layout = settings.model is not None, any(size is not None for size in settings.layout)
    case_given = settings.case_file is not None
    answers = answers_of(asdict(settings), model or case_given, layout or case_given)
    known = Known(settings.device, answers, lang, settings.tensors, settings.json)
    try:
        report = _run(settings, known)
    except BaseException as error:
        known.leave_after(error)
        raise
    return EXIT_ALIGNED if report.verdict == "aligned" else EXIT_DIVERGED


def _run(settings: RunSettings, known: Known) -> Report:
    """The same; ``known`` is filled on the way, and written once there is a verdict."""
    # emoji: a text such as ":smile:" is shown as it is.
    console = Console(quiet=settings.quiet, soft_wrap=False, emoji=False, stderr=settings.json)
    check_seconds(launch_timeout=settings.launch_timeout, step_timeout=settings.step_timeout)
    wishes = _wishes(settings)
    known.extras = extras = extras_of(settings.sets, settings.patches)
    numerics = numerics_of(settings.numerics, settings.device)
    info, made = _case(settings, numerics, lambda line: console.print(line, highlight=False))
    case = made.case
    known.case, known.info = case, info
    check_launchable(case)
    check_device(case, info, settings.device)
    if wishes.tensors:
        check_patterns(wishes.values, check_recordable(info, case.layout.tp))
    interpreters = interpreters_for(case, settings.device, extras)
    if settings.device == SIMULATED:
        for variable in PYTHON_VARIABLES.values():
            if os.environ.get(variable):
                console.print(f"[yellow]{variable} is not used on the simulated NPU; add DEVICE=ascend[/yellow]")
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", info.name)
    directory = RunDirectory(settings.out, align_home() / "runs", label)
    known.directory = directory
    directory.write("case.json", case.to_text())
    prompts.show_prompts(console, made.prompts, settings.verbose)
    limits = Limits(launch=settings.launch_timeout, step=settings.step_timeout)
    engines = {role: interpreter.engine for role, interpreter in interpreters.items()}
    with LiveProgress(console, engines, settings.quiet) as watcher:
        session = Session(case, info, interpreters, directory.path, limits, watcher, extras)
        flow = Flow(session, case, info, wishes)
        known.outcome, known.report = session.outcome, flow.report
        report = flow.run()
    known.leave(terminal.next_step(report, "CASE=RUN/case.json"))
    if settings.quiet and settings.json:
        return report
    if settings.quiet:
        simulated = " (simulated)" if settings.device == SIMULATED else ""
        print(f"{report.verdict}{simulated}: {terminal.sentence(case.candidate, case.reference, report)}")
    else:
        terminal.show_summary(console, case, info, session.outcome, report, directory.path, settings.verbose)
    return report


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
        allow=settings.allow,
        values=settings.capture,
        budget=budget_bytes(settings.values_budget),
        min_coverage=coverage_demanded(settings.min_coverage),
    )


def _case(settings: RunSettings, numerics: Numerics, say: Callable[[str], None]) -> tuple[ModelInfo, NewCase]:
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
        case = load_case(settings.case_file)
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
    info = resolve_model(DEFAULT_MODEL if settings.model is None else settings.model, say)
    try:
        layout = Layout(*(1 if value is None else value for value in settings.layout))
    except ValueError as error:
        raise UserError(str(error), "correct --tp, --dp or --ep") from None
    extra: dict[str, Any] = {} if settings.dtype is None else {"dtype": settings.dtype}
    try:
        decoding = None if settings.max_new_tokens is None else Decoding(max_new_tokens=settings.max_new_tokens)
        batch = None if settings.block_size is None else Batch(block_size=settings.block_size)
    except ValidationError as error:
        raise explain(error, "the command line") from None
    made = new_case(
        info, prompts_file=settings.prompts, layout=layout, decoding=decoding, batch=batch, numerics=numerics, **extra
    )
    return info, made
