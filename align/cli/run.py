"""``align run``: from options to a verdict and an exit code."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rich.console import Console

from adapters.base import SIDES, RunResult
from align.case.build import NewCase, new_case
from align.case.prompts import EncodedPrompt
from align.case.schema import Batch, Case, Decoding, Numerics, explain, load_case
from align.compare.noise import NoisePolicy
from align.compare.tokens import TokenComparison, compare_tokens
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.layout import Layout
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.report import terminal
from align.report.live import LiveProgress
from align.run.directory import RunDirectory
from align.run.record import run_record, tokens_record
from align.run.session import SIMULATED, Outcome, Session, check_device, check_launchable
from align.run.side import Limits
from envs.home import align_home
from envs.profiles import PYTHON_VARIABLES, Interpreter, resolve

DEFAULT_MODEL = "qwen3"
REPLAY_MODES = ("auto", "always", "never")
NUMERICS = ("native", "fp32-internal")


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
    replay: str
    out: Path | None
    launch_timeout: float
    step_timeout: float
    quiet: bool
    verbose: bool


def execute(settings: RunSettings) -> int:
    """Run, print the summary, and return the exit code.

    Raises:
        UserError, EnvError: what must change before the command can succeed.
    """
    # emoji: a text such as ":smile:" is shown as it is.
    console = Console(quiet=settings.quiet, soft_wrap=False, emoji=False)
    for option, seconds in (
        ("--launch-timeout", settings.launch_timeout),
        ("--step-timeout", settings.step_timeout),
    ):
        if not (isfinite(seconds) and seconds > 0):
            raise UserError(f"{option} {seconds:g} is not a time", f"give seconds, for example {option} 600")
    if settings.replay not in REPLAY_MODES:
        raise UserError(f"--replay {settings.replay} is not known", f"choose one of {', '.join(REPLAY_MODES)}")
    numerics = _numerics(settings)
    info, made = _case(settings, numerics, lambda line: console.print(line, highlight=False))
    case = made.case
    check_launchable(case)
    check_device(case, info, settings.device)
    interpreters = {
        role: _with_numerics(resolve(settings.device, engine), getattr(case.numerics, role))
        for role, engine in zip(SIDES, (case.candidate, case.reference), strict=True)
    }
    if settings.device == SIMULATED:
        for variable in PYTHON_VARIABLES.values():
            if os.environ.get(variable):
                console.print(f"[yellow]{variable} is not used on the simulated NPU; add DEVICE=ascend[/yellow]")
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", info.name)
    directory = RunDirectory(settings.out, align_home() / "runs", label)
    directory.write("case.json", case.to_text())
    terminal.show_prompts(console, made.prompts, settings.verbose)
    outcome, comparisons = _compare(settings, case, info, interpreters, directory, console)
    verdict = overall_verdict(comparisons)
    directory.write_json("tokens.json", tokens_record(outcome))
    directory.write_json("run.json", run_record(case, info, outcome, comparisons, verdict, sys.argv))
    if settings.quiet:
        simulated = " (simulated)" if settings.device == SIMULATED else ""
        print(f"{verdict}{simulated}: {terminal.sentence(case, comparisons, verdict)}")
    else:
        terminal.show_summary(console, case, info, outcome, comparisons, verdict, directory.path)
    return EXIT_ALIGNED if verdict == "aligned" else EXIT_DIVERGED


def overall_verdict(comparisons: dict[str, TokenComparison]) -> Literal["aligned", "diverged"]:
    """What the free run and, if there is one, the replay say together.

    A replay measures more, so it decides about every flip that it repeats. What parted in the free run and is no flip
    of the replay is not explained by it, and stays a difference.
    """
    free = comparisons["free"]
    replay = comparisons.get("replay", free)
    ties = {(difference.request, difference.index) for difference in (*free.near_ties, *replay.near_ties)}
    unexplained = any((difference.request, difference.index) not in ties for difference in free.differences)
    return "diverged" if unexplained or replay.verdict == "diverged" else "aligned"


def _peak(*results: RunResult) -> float:
    """The largest logit magnitude that the runs recorded."""
    return max(
        (step.peak for result in results for generation in result.generations for step in generation.steps), default=0.0
    )


def _compare(
    settings: RunSettings,
    case: Case,
    info: ModelInfo,
    interpreters: dict[str, Interpreter],
    directory: RunDirectory,
    console: Console,
) -> tuple[Outcome, dict[str, TokenComparison]]:
    limits = Limits(launch=settings.launch_timeout, step=settings.step_timeout)
    engines = {role: interpreter.engine for role, interpreter in interpreters.items()}
    policy = NoisePolicy.for_dtype(case.dtype, info.layers)
    lengths = {request.name: len(request.token_ids) for request in case.requests}
    comparisons: dict[str, TokenComparison] = {}
    with LiveProgress(console, engines, settings.quiet) as watcher:
        session = Session(case, info, interpreters, directory.path, limits, watcher)
        with session:
            session.launch()
            session.generate()
            free = {role: side.free for role, side in session.outcome.sides.items()}
            assert free["candidate"] is not None and free["reference"] is not None
            policy = policy.at(_peak(free["candidate"], free["reference"]), case.dtype)
            comparisons["free"] = compare_tokens(
                free["candidate"].generations,
                free["reference"].generations,
                mode="free",
                policy=policy,
                prompt_lengths=lengths,
            )
            differ = bool(comparisons["free"].differences)
            if settings.replay == "always" or (settings.replay == "auto" and differ):
                session.replay()
                replayed = {role: side.replay for role, side in session.outcome.sides.items()}
                assert replayed["candidate"] is not None and replayed["reference"] is not None
                comparisons["replay"] = compare_tokens(
                    replayed["candidate"].generations,
                    replayed["reference"].generations,
                    mode="replay",
                    policy=policy,
                    prompt_lengths=lengths,
                )
    return session.outcome, comparisons


# --------------------------------------------------------------------------------------------------- from options


def _case(settings: RunSettings, numerics: Numerics, say: Any) -> tuple[ModelInfo, NewCase]:
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


def _numerics(settings: RunSettings) -> Numerics:
    chosen: dict[str, Any] = {}
    for text in settings.numerics:
        role, _, name = text.partition("=")
        if role not in SIDES or name not in NUMERICS:
            raise UserError(
                f"--numerics {text} is not SIDE=NAME",
                f"SIDE is one of {', '.join(SIDES)}, NAME one of {', '.join(NUMERICS)}",
            )
        chosen[role] = name
    if chosen and settings.device != "simnpu":
        raise UserError(f"--numerics belongs to the simulated NPU, not to {settings.device}", "leave --numerics out")
    return Numerics(**chosen)


def _with_numerics(interpreter: Interpreter, name: str | None) -> Interpreter:
    if name is None:
        return interpreter
    return replace(interpreter, env={**interpreter.env, "ALIGN_SIMNPU_NUMERICS": name})
