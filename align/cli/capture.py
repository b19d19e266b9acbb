"""``align capture``: one engine alone, recorded along its own tokens or those of another trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.base import SIDES, Generation
from adapters.host import ADAPTERS
from align.case.schema import Case
from align.cli.options import budget_bytes, case_in, check_patterns, check_seconds, interpreters_for, own_extras
from align.cli.output import print_json
from align.cli.screen import screen
from align.errors import EXIT_ALIGNED, SideError, UserError
from align.models.resolve import resolve_model
from align.report.live import LiveProgress
from align.report.recorded import next_command, show_recorded
from align.report.steps import expected_steps
from align.result.plain import plain
from align.run.alone import Alone, Recorded
from align.run.cluster import Cluster
from align.run.directory import RunDirectory
from align.run.flow import check_recordable
from align.run.local import LocalHosts
from align.run.manifest import REPLAY, generations_of
from align.run.plan import SideExtras, check_device, check_launchable, without_side
from align.run.record import tokens_record
from align.run.session import Session
from align.run.side import Limits
from align.run.traces import find_trace, open_trace
from align.run.transport import Hosts
from envs.home import align_home

#: The engine's own files, inside of the trace.
ENGINE = "engine"


@dataclass(frozen=True)
class CaptureSettings:
    """The options of ``align capture``; ``None`` means not given."""

    engine: str
    case_file: Path
    out: Path
    side: str | None
    along: Path | None
    device: str
    sets: tuple[str, ...]
    patches: tuple[str, ...]
    capture: tuple[str, ...]
    values_budget: int | None
    launch_timeout: float
    step_timeout: float
    quiet: bool
    json: bool = False
    only: tuple[str, ...] = ()
    lean: bool = False
    audit: bool = True
    fa: bool = True


def execute(settings: CaptureSettings) -> int:
    """Record, print what was recorded, and return the exit code.

    Raises:
        UserError, EnvError: what must change before the command can succeed.
    """
    console = screen(settings.quiet, settings.json)
    check_seconds(launch_timeout=settings.launch_timeout, step_timeout=settings.step_timeout)
    if settings.engine not in ADAPTERS:
        raise UserError(f"{settings.engine} is no engine that is recorded", f"name one of {', '.join(ADAPTERS)}")
    extras = own_extras(settings.sets, settings.patches)
    case = case_in(settings.case_file)
    role = _role(settings, case)
    case = case.model_copy(update={role: settings.engine})
    if settings.only:
        case = case.only(settings.only)
    info = resolve_model(case.model, lambda line: console.print(line, highlight=False))
    case.check(info)
    check_launchable(case)
    check_device(case, info, settings.device)
    check_patterns(settings.capture, check_recordable(info, case.at(role).layout.tp))
    along = None if settings.along is None else _tokens_of(settings.along, case)
    interpreters = interpreters_for(case, settings.device, {role: extras}, (role,))
    directory = RunDirectory(settings.out, align_home() / "runs", role)
    limits = Limits(launch=settings.launch_timeout, step=settings.step_timeout)
    progress = LiveProgress(console, {role: settings.engine}, settings.quiet, expected_steps(case))
    with _withdrawn_on_failure(directory, role), progress as watcher:
        directory.write("case.json", case.to_text())
        session = Session(
            case,
            info,
            interpreters,
            directory.path,
            limits,
            watcher,
            {role: extras},
            hosts=hosts_for(settings.engine, case, extras),
            directories={role: directory.path / ENGINE},
            audit=settings.audit,
            fa=settings.fa,
        )
        alone = Alone(
            session, case, info, directory.path, budget_bytes(settings.values_budget), settings.capture, settings.lean
        )
        recorded = alone.run(along)
    directory.write_json("tokens.json", tokens_record(session.outcome))
    # Absolute as the other one is: the hint works wherever it is pasted.
    followed = None if settings.along is None else settings.along.absolute()
    show_recorded(console, recorded, directory.path, role, followed=followed)
    if settings.json:
        print_json(_content(settings, recorded, directory.path, role))
    elif settings.quiet:
        print(f"recorded: {directory.path}")
    return EXIT_ALIGNED


def hosts_for(engine: str, case: Case, extras: SideExtras) -> Hosts:
    """A process of its own, unless the engine's workers are actors of Ray: then the host is one too."""
    chosen = extras.options.get("distributed_executor_backend")
    actors = engine == "lmdeploy" and (chosen == "ray" or (chosen is None and case.layout.dp > 1))
    return Cluster() if actors else LocalHosts()


def _content(settings: CaptureSettings, recorded: Recorded, directory: Path, role: str) -> dict[str, Any]:
    content: dict[str, Any] = plain(
        {
            "trace": directory,
            "side": role,
            "engine": settings.engine,
            "along": settings.along,
            "checkpoints": recorded.checkpoints,
            "expected": recorded.expected,
            "values": recorded.values,
            "steps": recorded.steps,
            "rows": recorded.rows,
            "bytes": recorded.bytes,
            "stability": recorded.stable.to_dict(),
            "conditions": [one.to_dict() for one in recorded.conditions],
            "next": next_command(directory, role, None if settings.along is None else settings.along.absolute()),
        }
    )
    return content


@contextmanager
def _withdrawn_on_failure(directory: RunDirectory, role: str) -> Iterator[None]:
    """What a failed recording wrote is no trace, and would keep the same command from working; only its log stays."""
    log = directory.path / ENGINE / "engine.log"
    try:
        yield
    except BaseException as error:
        try:
            kept = directory.withdraw(log, align_home() / "logs")
        except OSError as second:  # the failure itself stays the news
            kept = log
            if isinstance(error, UserError):
                error.hint += f"; remove {directory.path}, which could not be done: {second.strerror or second}"
        if isinstance(error, SideError):
            hint = error.hint if kept is None else error.hint.replace(str(log), str(kept))
            error.hint = without_side(hint, role)
        raise


def _role(settings: CaptureSettings, case: Case) -> str:
    if settings.side is None:
        return next((role for role in SIDES if getattr(case, role) == settings.engine), SIDES[0])
    if settings.side not in SIDES:
        raise UserError(f"--side {settings.side} is not known", f"choose one of {', '.join(SIDES)}")
    return settings.side


def _tokens_of(directory: Path, case: Case) -> tuple[Generation, ...]:
    """The tokens of another trace, which must hold the case's prompts."""
    trace = open_trace(find_trace(directory))
    try:
        tokens = generations_of(trace.manifest, REPLAY)
        theirs = {one["name"]: tuple(one["token_ids"]) for one in trace.manifest["requests"]}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory} cannot be followed: {error}", "record it again: align capture") from error
    finally:
        trace.close()
    if any(theirs.get(request.name) != request.token_ids for request in case.requests):
        raise UserError(
            f"{directory} was recorded with other prompts than the case has",
            f"take the case it was recorded with: {directory / 'case.json'}",
        )
    if tokens is None:
        raise UserError(f"{directory} holds no tokens to follow", "record it again: align capture")
    return tokens
